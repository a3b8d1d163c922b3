"""The products of `gpu_fp8` in PyTorch: shapes MxKxN. Prints medians as JSON: seconds of each in bf16 and in e4m3."""

import json
import statistics
import sys
import time

import torch

ROUNDS = 20
# Products that are started before the first is waited for, as in `gpu_fp8`.
AT_ONCE = 8


def seconds(job):
    times = []
    for round in range(ROUNDS + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        results = [job() for _ in range(AT_ONCE)]
        torch.cuda.synchronize()
        if round >= 3:
            times.append((time.perf_counter() - start) / AT_ONCE)
        del results
    return statistics.median(times)


def main():
    medians = []
    one = torch.ones((), device="cuda")
    for shape in sys.argv[1:]:
        m, k, n = map(int, shape.split("x"))
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        high = seconds(lambda: a @ b.t())
        # Precise sums are the default, in PyTorch and here; fast ones are what `MatmulSpec::fast_accumulation` asks for.
        low, fast = (
            seconds(
                lambda: torch._scaled_mm(
                    a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast
                )
            )
            for fast in (False, True)
        )
        medians.append({"bf16": high, "e4m3": low, "fast": fast})
        print(shape, medians[-1], file=sys.stderr)
    print(json.dumps(medians))


main()
