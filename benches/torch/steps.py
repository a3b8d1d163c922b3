"""The steps of `gpu_steps` in PyTorch: MODEL WAY BATCH. Prints what they take as JSON."""

import json
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

WARM_UP, STEPS = 5, 20


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
    def __init__(self, layers=12, width=768, patch=16):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (224 // patch) ** 2, width))
        self.blocks = blocks(layers, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x)[:, 0]))


class GPT2(nn.Module):
    def __init__(self, width=768, vocabulary=50257, context=1024):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.positions = nn.Parameter(0.02 * torch.randn(1, context, width))
        self.blocks = blocks(12, width)
        self.norm = nn.LayerNorm(width)
        mask = nn.Transformer.generate_square_subsequent_mask(context)
        self.register_buffer("mask", mask)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions
        x = self.norm(self.blocks(x, mask=self.mask, is_causal=True))
        return F.linear(x, self.tokens.weight).flatten(0, 1)


def main():
    name, way, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
    # f32 is f32; what PyTorch's defaults are, and Burn's tuner may pick, is in between: TF32 in convolutions only.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = way == "TF32"
    models = {"resnet50": resnet50, "vit_b_16": ViT, "vit_h_14": lambda: ViT(32, 1280, 14), "gpt2": GPT2}
    model = models[name]().cuda()
    if name == "gpt2":
        data = torch.randint(0, 50257, (batch, 1024), device="cuda")
        labels = data.flatten()
    else:
        data = torch.randn(batch, 3, 224, 224, device="cuda")
        labels = torch.arange(batch, device="cuda") % 1000
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    times = []
    for step in range(WARM_UP + STEPS):
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16, enabled=way == "bf16 autocast"):
            loss = F.cross_entropy(model(data), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        if step >= WARM_UP:
            times.append(time.perf_counter() - start)
        elif step == WARM_UP - 1:
            torch.cuda.reset_peak_memory_stats()
    peak = torch.cuda.max_memory_allocated()
    print(json.dumps({"way": f"PyTorch {way}", "seconds": statistics.median(times), "bytes": peak}))


main()
