"""The products of `gpu_fp8` in PyTorch: shapes MxKxN. Prints a table of medians."""

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
    # Precise sums are the default, in PyTorch and here; fast ones are what `MatmulSpec::fast_accumulation` asks for.
    print("| PyTorch | bf16 | e4m3, to bf16 | with fast sums | ratio | TFLOP/s in e4m3 |\n|---|---|---|---|---|---|")
    one = torch.ones((), device="cuda")
    for shape in sys.argv[1:]:
        m, k, n = map(int, shape.split("x"))
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        high = seconds(lambda: a @ b.t())
        low, fast = (
            seconds(
                lambda: torch._scaled_mm(
                    a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast
                )
            )
            for fast in (False, True)
        )
        rate = 2 * m * k * n / low / 1e12
        print(f"| {shape} | {high * 1e3:.3f} ms | {low * 1e3:.3f} ms | {fast * 1e3:.3f} ms | {low / high:.3f} | {rate:.0f} |")


main()
