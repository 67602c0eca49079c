"""How many pages the KV pool has, decided before it is allocated."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantkit.errors import RequestError
from quantkit.kernels.layouts import KVLayout, page_bytes, pages_for_budget, residual_bytes
from quantkit.quantities import byte_size
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.devices import free_bytes

_SHARE = {"cpu": 0.5, "cuda": 0.8}  # of free memory that a pool may take unasked; the rest is for activations
_STATELESS_TOKENS = 2**31  # a pool that only counts: the model keeps keys and values itself


def size_pool(layouts: Sequence[KVLayout], config: EngineConfig, max_length: int, device: torch.device) -> int:
    """Pages of the pool: as asked, as the budget allows, or enough for everybody as far as memory is free.

    Args:
        layouts: of all layers, a draft model's too; none when the model keeps its own keys and values.
        config: settings; its num_pages wins over its memory, which is for the pool and the residual windows.
        max_length: tokens of one sequence, whether asked for or the model's.
        device: where it will be.
    Raises:
        RequestError: no page, or not one sequence of the length asked for, fits; the message has the numbers.
    """
    wanted = config.max_sequences * config.pages_for(max_length)
    if not layouts:
        return config.num_pages or min(wanted, _STATELESS_TOKENS // config.page_size)
    if config.num_pages is not None:
        return config.num_pages
    budget = config.memory_bytes
    if budget is None:
        budget = int(free_bytes(device) * _SHARE.get(device.type, 0.5))
    num_pages = min(wanted, pages_for_budget(layouts, config.max_sequences, budget))
    least = 1 if config.max_length is None else config.pages_for(config.max_length)
    if num_pages < least:
        needed = least * page_bytes(layouts) + residual_bytes(layouts, config.max_sequences)
        what = "one page" if config.max_length is None else f"one sequence of {config.max_length} tokens"
        raise RequestError(
            f"a KV pool of {byte_size(budget)} is too small for {what}, which needs {byte_size(needed)} "
            f"(pages of {config.page_size} tokens, {byte_size(page_bytes(layouts))} each); "
            "give more memory, a smaller max_length or max_sequences, or a smaller KV type"
        )
    return num_pages
