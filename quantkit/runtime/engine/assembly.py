"""Puts an engine together from a loaded model: layouts, pool size, caches, proposer. No files are read here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quantkit.errors import RequestError
from quantkit.kernels.layouts import KVLayout, kv_dtype
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.cache.sizing import size_pool
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.engine.scheduler import SchedulerOptions
from quantkit.runtime.engine.speculation import DraftModelProposer, NgramProposer, Proposer
from quantkit.runtime.engine.speculation_controller import Governor
from quantkit.runtime.model.model import Model


def make_engine(
    model: Model,
    *,
    options: SchedulerOptions,
    kv_cache: str = "auto",
    max_length: int | None = None,
    num_pages: int | None = None,
    memory: int | None = None,
    draft: Model | None = None,
    governor: Governor | None = None,
    tokenizer: Any = None,
    prefix_cache: bool = True,
    identity: str = "",
    seed: int = 0,
) -> Engine:
    """An engine with its caches.

    Args:
        model: to run.
        options: limits of a step.
        kv_cache: name of the KV type.
        max_length, num_pages, memory: see `context.size_pool`; None = what the model can and memory allows.
        draft: proposes tokens; None with a governor = n-grams do.
        governor: says how many; None = no speculation.
        tokenizer, prefix_cache, seed: see `Engine`.
        identity: of the model, for the prefix cache.
    Raises:
        SchemeError: an unknown KV type.
        RequestError: the pool does not hold what was asked for, the draft has another vocabulary, or the model keeps
            its keys and values itself and a KV type is asked for.
        ResourceError: the memory is not there.
    """
    if not model.paged and kv_cache != "auto":
        raise RequestError(f"kv_cache {kv_cache!r} is only for models that run natively; leave it out")
    caches = model.stored_cache.choose(kv_cache)
    layouts = model.layouts(caches, options.page_size, kv_dtype(kv_cache, model.dtype))
    draft_layouts = [] if draft is None else draft.layouts(None, options.page_size)
    pages = size_pool(
        [*layouts, *draft_layouts],
        page_size=options.page_size,
        max_sequences=options.max_sequences,
        max_length=max_length or model.max_length,
        asked_length=max_length,
        num_pages=num_pages,
        memory=memory,
        device=model.device,
    )
    return Engine(
        model,
        _make_cache(layouts, pages, options, model.device),
        num_pages=pages,
        options=options,
        tokenizer=tokenizer,
        prefix_cache=prefix_cache,
        proposer=_make_proposer(draft, draft_layouts, pages, options, model.vocab_size, governor),
        governor=governor,
        identity=f"{identity} {model.dtype} {kv_cache}",
        max_length=max_length,
        seed=seed,
    )


def _make_proposer(
    draft: Model | None,
    layouts: Sequence[KVLayout],
    num_pages: int,
    options: SchedulerOptions,
    vocab_size: int,
    governor: Governor | None,
) -> Proposer | None:
    if draft is None:
        return None if governor is None else NgramProposer()
    cache = _make_cache(layouts, num_pages, options, draft.device)
    return DraftModelProposer(draft, cache, num_pages=num_pages, options=options, vocab_size=vocab_size)


def _make_cache(
    layouts: Sequence[KVLayout], num_pages: int, options: SchedulerOptions, device: torch.device
) -> KVCache | None:
    """A cache of these layouts; None for a model that keeps its own keys and values and so has none."""
    return KVCache(layouts, num_pages, options.max_sequences, device) if layouts else None
