"""Puts an engine together from a loaded model: layouts, pool size, caches, proposer. No files are read here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quantkit.errors import RequestError
from quantkit.kernels.layouts import KVLayout, kv_dtype
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.cache.sizing import size_pool
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine.capacity import context_length
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.engine.speculation import DraftModelProposer, NgramProposer, Proposer
from quantkit.runtime.engine.speculation_controller import SpeculationController
from quantkit.runtime.model.model import Model


def build_engine(
    model: Model,
    config: EngineConfig,
    *,
    draft: Model | None = None,
    controller: SpeculationController | None = None,
    tokenizer: Any = None,
    identity: str = "",
) -> Engine:
    """An engine with its caches.

    Args:
        model: to run.
        config: settings.
        draft: proposes tokens; None with a controller = n-grams do.
        controller: says how many; None = no speculation.
        tokenizer: see `Engine`.
        identity: of the model, for the prefix cache.
    Raises:
        SchemeError: an unknown KV type.
        RequestError: the pool does not hold what was asked for, the draft has another vocabulary, or the model keeps
            its keys and values itself and a KV type is asked for.
        ResourceError: the memory is not there.
    """
    if not model.paged and config.kv_cache != "auto":
        raise RequestError(f"kv_cache {config.kv_cache!r} is only for models that run natively; leave it out")
    length = context_length(config, model.max_length)
    caches = model.stored_cache.choose(config.kv_cache)
    layouts = model.layouts(caches, config.page_size, kv_dtype(config.kv_cache, model.dtype))
    draft_layouts = [] if draft is None else draft.layouts(None, config.page_size)
    num_pages = size_pool([*layouts, *draft_layouts], config, length, model.device)

    def cache(layouts: Sequence[KVLayout], device: torch.device) -> KVCache | None:
        """None for a model that keeps its own keys and values and so has no layouts."""
        return KVCache(layouts, num_pages, config.max_sequences, device) if layouts else None

    proposer: Proposer | None = None if controller is None else NgramProposer()
    if draft is not None:
        draft_cache = cache(draft_layouts, draft.device)
        proposer = DraftModelProposer(draft, draft_cache, config, num_pages=num_pages, vocab_size=model.vocab_size)
    return Engine(
        model,
        cache(layouts, model.device),
        config,
        num_pages=num_pages,
        tokenizer=tokenizer,
        proposer=proposer,
        controller=controller,
        identity=f"{identity} {model.dtype} {config.kv_cache}",
    )
