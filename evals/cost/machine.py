"""Measure the rates of large matrix products on this machine, in operations per second of wall time, as JSON.

A rate is the median of five products of 4096 x 4096 matrices after one warm-up, with torch's default number of threads.
For float32, the faster one of two libraries counts; both keep its precision. If the CPU has no bfloat16 products, this
type is left out, because torch takes minutes for one product.
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
    """Return the operations per second of products in this dtype."""
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
