"""The steps of `gpu_steps` in PyTorch: MODEL BATCH SECONDS WAY...

Prints what each way takes as a line of JSON, or that it failed. After so many seconds rounds are left out.
"""

import gc
import json
import math
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

WARM_UP, STEPS = 5, 20
# Without a GPU: for a look at the script itself.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class ConvNorm(nn.Sequential):
    def __init__(self, cin, cout, kernel, stride):
        super().__init__(
            nn.Conv2d(cin, cout, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(cout),
        )


class Bottleneck(nn.Module):
    def __init__(self, cin, width, stride):
        super().__init__()
        self.layers = nn.Sequential(
            ConvNorm(cin, width, 1, 1),
            nn.ReLU(),
            ConvNorm(width, width, 3, stride),
            nn.ReLU(),
            ConvNorm(width, 4 * width, 1, 1),
        )
        self.shortcut = ConvNorm(cin, 4 * width, 1, stride) if cin != 4 * width else nn.Identity()

    def forward(self, x):
        return F.relu(self.layers(x) + self.shortcut(x))


def resnet50():
    layers = [ConvNorm(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, count in enumerate([3, 4, 6, 3]):
        for block in range(count):
            layers.append(Bottleneck(channels, 64 << stage, 2 if stage and not block else 1))
            channels = 4 * (64 << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def blocks(layers, width):
    """As PyTorch has them, with the attention that it picks."""
    layer = nn.TransformerEncoderLayer(
        width, width // 64, 4 * width, dropout=0.0, activation=F.gelu, batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class ViT(nn.Module):
    def __init__(self, layers=12, width=768, patch=16, side=224):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (side // patch) ** 2, width))
        self.blocks = blocks(layers, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x)[:, 0]))


class GPT2(nn.Module):
    def __init__(self, layers=12, width=768, vocabulary=50257, context=1024):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.positions = nn.Parameter(0.02 * torch.randn(1, context, width))
        self.blocks = blocks(layers, width)
        self.norm = nn.LayerNorm(width)
        mask = nn.Transformer.generate_square_subsequent_mask(context)
        self.register_buffer("mask", mask)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions
        x = self.norm(self.blocks(x, mask=self.mask, is_causal=True))
        return F.linear(x, self.tokens.weight).flatten(0, 1)


def rotated(x, cos, sin):
    """In f32, the dtype of the angles."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).type_as(x)


class LlamaBlock(nn.Module):
    def __init__(self, width, inner, groups):
        super().__init__()
        linear = lambda cin, cout: nn.Linear(cin, cout, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.output = linear(width, width), linear(width, width)
        self.key, self.value = linear(width, 64 * groups), linear(width, 64 * groups)
        self.gate, self.up, self.down = linear(width, inner), linear(width, inner), linear(inner, width)

    def forward(self, x, cos, sin):
        y = self.norm1(x)
        heads = lambda linear: linear(y).unflatten(2, (-1, 64)).transpose(1, 2)
        q, k, v = rotated(heads(self.query), cos, sin), rotated(heads(self.key), cos, sin), heads(self.value)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.output(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, layers=30, width=576, inner=1536, groups=3, vocabulary=49152, context=1024):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.ModuleList(LlamaBlock(width, inner, groups) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        angles = torch.outer(torch.arange(context).float(), 10_000.0 ** (-torch.arange(0, 64, 2) / 64))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.linear(self.norm(x), self.tokens.weight).flatten(0, 1)


# How each is made, and the height and width of its images, or its vocabulary and the length of its texts. The last three are for
# a look at the script itself.
MODELS = {
    "resnet50": (resnet50, 224),
    "vit_b_16": (ViT, 224),
    "vit_h_14": (lambda: ViT(32, 1280, 14), 224),
    "gpt2": (GPT2, (50257, 1024)),
    "smollm": (Llama, (49152, 1024)),
    "vit_tiny": (lambda: ViT(2, 64, 8, 32), 32),
    "gpt_tiny": (lambda: GPT2(2, 64, 256, 32), (256, 32)),
    "llama_tiny": (lambda: Llama(2, 128, 256, 1, 256, 32), (256, 32)),
}


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def measure(name, batch, way, until):
    # f32 is f32; by PyTorch's defaults convolutions are in TF32. Burn's tuner may pick TF32 for both.
    torch.backends.cuda.matmul.allow_tf32 = "TF32" in way
    torch.backends.cudnn.allow_tf32 = way != "f32"
    torch.backends.cudnn.benchmark = True
    low, last = "bf16 autocast" in way, "channels last" in way
    layout = torch.channels_last if last else torch.contiguous_format
    make, size = MODELS[name]
    model = make().to(DEVICE)
    if isinstance(size, tuple):
        vocabulary, length = size
        data = torch.randint(0, vocabulary, (batch, length), device=DEVICE)
        labels = data.flatten()
    else:
        model = model.to(memory_format=layout)
        data = torch.randn(batch, 3, size, size, device=DEVICE).to(memory_format=layout)
        labels = torch.arange(batch, device=DEVICE) % 1000
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    times, losses = [], []
    for step in range(WARM_UP + STEPS):
        if times and time.monotonic() > until:
            break
        start = time.perf_counter()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=low):
            loss = F.cross_entropy(model(data), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        synchronize()
        if step >= WARM_UP:
            times.append(time.perf_counter() - start)
        elif step == WARM_UP - 1 and DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        losses.append(loss.item())
    if not all(map(math.isfinite, losses)) or losses[0] == losses[-1]:
        raise RuntimeError(f"no training: losses from {losses[0]} to {losses[-1]}")
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    return {"way": way, "seconds": times, "bytes": peak}


def main():
    name, batch, seconds, ways = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
    start = time.monotonic()
    failed = False
    for number, way in enumerate(ways):
        # What is left is shared among the ways that are left; the last tenth is for the end.
        left = 0.9 * seconds - (time.monotonic() - start)
        try:
            found = measure(name, batch, way, time.monotonic() + left / (len(ways) - number))
        except Exception as problem:
            found, failed = {"way": way, "failed": " ".join(str(problem).split())[:300]}, True
        print(json.dumps(found), flush=True)
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    sys.exit(failed)


main()
