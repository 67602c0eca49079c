"""How much fits: devices, byte counts, and the size of the KV pool, decided before it is allocated."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from quantkit.errors import InputError, RequestError
from quantkit.kernels.layouts import KVLayout, page_bytes, pages_for_budget, tail_bytes
from quantkit.quantities import byte_size
from quantkit.runtime.cache.memory import free_bytes

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4}
_SHARE = {"cpu": 0.5, "cuda": 0.8}  # of free memory that a pool may take unasked; the rest is for activations
_STATELESS_TOKENS = 2**31  # a pool that only counts: the model keeps keys and values itself


def parse_bytes(size: int | str) -> int:
    """Bytes of a size such as 4294967296, "4GiB", "512 MB" or "1.5g".

    Raises:
        InputError: it is no positive size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(size).lower())
    unit = None if found is None else {**_UNITS, **_BINARY}.get(found[2])
    if found is None or unit is None or float(found[1]) * unit < 1 or isinstance(size, bool):
        raise InputError(f"memory is {size!r}; give bytes, or a size such as '512MiB' or '4GiB'")
    return int(float(found[1]) * unit)


def check_settings(
    *, max_length: int | None, num_pages: int | None, page_size: int, max_sequences: int, token_budget: int
) -> None:
    """Settings that contradict each other, found before a model is loaded.

    Raises:
        RequestError: not positive, or pages that do not hold one sequence of the length asked for.
    """
    for name, value in (
        ("max_length", max_length),
        ("num_pages", num_pages),
        ("page_size", page_size),
        ("max_sequences", max_sequences),
        ("token_budget", token_budget),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise RequestError(f"{name} is {value!r}; give an integer of at least 1")
    if token_budget < max_sequences:
        raise RequestError(
            f"token_budget is {token_budget} for {max_sequences} sequences; each needs one token per step: "
            "give a larger budget or a smaller max_sequences"
        )
    if max_length is not None and num_pages is not None and num_pages * page_size < max_length:
        raise RequestError(
            f"{num_pages} pages of {page_size} tokens hold {num_pages * page_size}, not one sequence of max_length "
            f"{max_length}; use {-(-max_length // page_size)} pages or more, or a smaller max_length"
        )


def size_pool(
    layouts: Sequence[KVLayout],
    *,
    page_size: int,
    max_sequences: int,
    max_length: int,
    asked_length: int | None,
    num_pages: int | None,
    memory: int | None,
    device: torch.device,
) -> int:
    """Pages of the pool: as asked, as the budget allows, or enough for everybody as far as memory is free.

    Args:
        layouts: of all layers, a draft model's too; none when the model keeps its own keys and values.
        page_size: tokens per page.
        max_sequences: that run at the same time.
        max_length: of one sequence.
        asked_length: what the user said about it, if anything.
        num_pages: as asked; wins.
        memory: bytes for the pool and its tails, as asked.
        device: where it will be.
    Raises:
        RequestError: no page, or not one sequence of the length asked for, fits; the message has the numbers.
    """
    wanted = max_sequences * -(-max_length // page_size)
    if not layouts:
        return num_pages or min(wanted, _STATELESS_TOKENS // page_size)
    if num_pages is None:
        budget = int(free_bytes(device) * _SHARE.get(device.type, 0.5)) if memory is None else memory
        num_pages = min(wanted, pages_for_budget(layouts, max_sequences, budget))
        least = -(-asked_length // page_size) if asked_length is not None else 1
        if num_pages < least:
            needed = least * page_bytes(layouts) + tail_bytes(layouts, max_sequences)
            what = f"one sequence of {asked_length} tokens" if asked_length is not None else "one page"
            raise RequestError(
                f"a KV pool of {byte_size(budget)} is too small for {what}, which needs {byte_size(needed)} "
                f"(pages of {page_size} tokens, {byte_size(page_bytes(layouts))} each); "
                "give more memory, a smaller max_length or max_sequences, or a smaller KV type"
            )
    return num_pages
