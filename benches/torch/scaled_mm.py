"""The products of `gpu_fp8` in PyTorch: shapes MxKxN.

Prints a line of JSON for each shape: seconds of its products in bf16 and in e4m3, round by round.
"""

import json
import sys
import time

import torch

ROUNDS = 20
# As many are started before the first is waited for as take this long, as in `gpu_fp8`, 256 at most.
QUEUE = 0.005
MOST_QUEUED = 256


def rounds(job, sets):
    """Seconds of one of many jobs, which take the sets in turn."""
    turn = 0

    def batch(at_once):
        nonlocal turn
        torch.cuda.synchronize()
        start = time.perf_counter()
        results = []
        for _ in range(at_once):
            results.append(job(*sets[turn % len(sets)]))
            turn += 1
        torch.cuda.synchronize()
        took = time.perf_counter() - start
        if not all(result[0, 0].isfinite() for result in results):
            raise RuntimeError("a product is not finite")
        return took

    batch(1)
    at_once = 1
    while at_once < MOST_QUEUED and batch(at_once) < QUEUE:
        at_once *= 2
    return [batch(at_once) / at_once for _ in range(ROUNDS)]


def main():
    one = torch.ones((), device="cuda")

    def scaled(fast):
        return lambda a, b, a8, b8: torch._scaled_mm(
            a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    for shape in sys.argv[1:]:
        m, k, n = map(int, shape.split("x"))
        # As `gpu_fp8` has them: larger than the cache, in fp8.
        sets = []
        for _ in range(min(max((128 << 20) // (m * k + k * n), 2), 16)):
            a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
            sets.append((a, b, a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)))
        found = {
            "size": [m, k, n],
            "bf16": rounds(lambda a, b, a8, b8: a @ b.t(), sets),
            # Precise sums are the default, in PyTorch and here; fast ones are what `MatmulSpec::fast_accumulation` asks for.
            "e4m3": rounds(scaled(False), sets),
            "fast": rounds(scaled(True), sets),
        }
        print(json.dumps(found), flush=True)


main()
