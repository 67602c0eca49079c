"""Rates of large matrix products on this machine, in operations per second of wall time, as JSON.

Median over five products of 4096 x 4096 after one, with as many threads as torch takes by itself; of the libraries that
keep the precision of float32, the faster. Bfloat16 is left out where the CPU has no products of it: torch then takes
minutes for one.
"""

from __future__ import annotations

import json
import statistics
import time

import torch

from quantkit.machine.devices import fast_cpu_dtype
from quantkit.numerics.matmul import quick_products

SIZE, TIMES = 4096, 5


def rate(dtype: torch.dtype) -> float:
    """Operations per second."""
    first, second = (torch.randn(SIZE, SIZE).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(TIMES + 1):
        started = time.perf_counter()
        first @ second
        seconds.append(time.perf_counter() - started)
    return 2 * SIZE**3 / statistics.median(seconds[1:])


if __name__ == "__main__":
    dtypes = (torch.float32, fast_cpu_dtype())
    rates = {str(dtype).removeprefix("torch."): rate(dtype) for dtype in dict.fromkeys(dtypes)}
    with quick_products(torch.device("cpu")):
        rates["float32"] = max(rates["float32"], rate(torch.float32))
    print(json.dumps({"rates": rates, "threads": torch.get_num_threads()}))
