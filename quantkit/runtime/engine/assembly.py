"""Assembly of an engine from a loaded model; before loading, a prediction of how many tokens will fit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import RequestError
from quantkit.kernels.layouts import EntryLayout, KVLayout, Layout, kv_scheme
from quantkit.models.config import NotNative
from quantkit.models.kv_budget import KVBudget, fitting_page_size
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.cache.sizing import Capacity, kv_budget, size_pool
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine.draft_model import DraftModelProposer, check_draft
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.engine.speculation import (
    MTPProposer,
    NgramProposer,
    Proposer,
    SpeculationController,
    check_states,
)
from quantkit.runtime.model.cache_schemes import read_stored_cache
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.loader import pick_dtype, read_headers
from quantkit.runtime.model.model import Model, NativeModel, config_layouts
from quantkit.runtime.model.mtp import find_draft_head


def fit_pages(path: Path, config: EngineConfig) -> EngineConfig:
    """Return the settings with a page size small enough for the KV budget. This reads only the model's headers.

    Args:
        path: model directory.
        config: requested settings.
    """
    if config.kv_budget is None or config.num_pages is not None or config.backend == "transformers":
        return config
    try:
        model, _, _ = read_headers(CheckpointReader(path))
    except NotNative:
        return config
    tokens = config.budget_tokens(config.context_length(model.max_length))
    if tokens is None:
        return config
    return replace(config, page_size=fitting_page_size(tokens, config.page_size, _widest_window(model)))


def predict_capacity(path: Path, draft: Path | None, config: EngineConfig, device: torch.device) -> Capacity | None:
    """Predict the engine's token limits for a sequence. This reads only the models' headers.

    Args:
        path: model directory.
        draft: directory of the draft model, whose cache shares the memory; None = no draft model.
        config: settings.
        device: device to run on.
    Returns:
        The limits; None if transformers runs the model.
    Raises:
        SchemeError: the KV type is unknown.
        RequestError: the pool is too small, max_length exceeds the model's context, the draft model cannot be used, or
            tokens of the model cannot be evicted although there is a KV budget.
        ModelError, CheckpointError: the path holds no model, or an invalid one.
    """
    kv_scheme(config.kv_cache)  # refuses an unknown name, whatever runs the model
    mtp = config.speculate == "mtp"
    if config.backend == "transformers" or (read := _read(path, config.kv_cache, config, device, mtp=mtp)) is None:
        if mtp:
            raise RequestError(
                f"{path}: transformers runs this model, without its MTP head; use speculate=ngram (--speculate ngram), "
                "or leave speculate out"
            )
        return None
    model, layouts = read
    drafting = None if draft is None else _read(draft, None, config, device)
    if config.speculate is not None:
        check_states(model.is_recurrent, drafting is not None and drafting[0].is_recurrent)
    if drafting is not None:
        check_draft(drafting[0].vocab_size, model.vocab_size)
    drafts = None if draft is None else drafting[1] if drafting else []
    num_pages, budget = _plan_pool(config, layouts, drafts, model.max_length, _widest_window(model), device)
    return Capacity.of(config, model.max_length, num_pages, budget)


def _plan_pool(
    config: EngineConfig,
    layouts: Sequence[Layout],
    drafts: Sequence[Layout] | None,
    max_length: int,
    window: int,
    device: torch.device,
) -> tuple[int, KVBudget | None]:
    """Return the number of pages in the pool, and the KV budget per sequence or None if no sequence can exceed it.

    Args:
        config: settings.
        layouts: layouts of the model's layers; empty if the model keeps its own keys and values.
        drafts: layouts of the draft model's layers; None = no draft model.
        max_length: the maximum number of tokens per sequence that the model supports.
        window: size of the widest sliding window; 0 = no layer has one.
        device: device of the pool.
    """
    if config.kv_budget is not None:
        _check_eviction(layouts, has_draft=drafts is not None or config.speculate == "mtp")
    # Both caches share one memory budget and get the same number of pages: the draft model follows the same sequences.
    num_pages = size_pool([*layouts, *(drafts or ())], config, max_length, device)
    return num_pages, kv_budget(config, max_length, num_pages, window)


def _read(
    path: Path, kv_cache: str | None, config: EngineConfig, device: torch.device, *, mtp: bool = False
) -> tuple[ModelConfig, list[Layout]] | None:
    """Return a model's config and the KV layouts of its layers; None if only transformers can run the model.

    With `mtp`, the layouts include the layer of the model's MTP head.
    """
    reader = CheckpointReader(path)
    try:
        model, _, _ = read_headers(reader)
    except NotNative:
        return None
    dtype, _ = pick_dtype(config.dtype, reader, device)
    head = find_draft_head(model, reader) if mtp else None
    return model, config_layouts(model, read_stored_cache(reader, model), kv_cache, config.page_size, dtype, head)


def build_engine(
    model: Model,
    config: EngineConfig,
    *,
    draft: Model | None = None,
    controller: SpeculationController | None = None,
    tokenizer: Any = None,
    identity: str = "",
) -> Engine:
    """Build an engine with its caches.

    Args:
        model: model to run.
        config: settings.
        draft: separate model that proposes draft tokens. None = no draft model; with a controller, the model's own MTP
            head or n-grams propose them, as the settings say.
        controller: chooses the number of draft tokens; None = no speculation.
        tokenizer: see `Engine`.
        identity: identity of the model, for the prefix cache.
    Raises:
        SchemeError: the KV type is unknown.
        RequestError: the pool is too small for the settings, the draft model has a different vocabulary, or the
            settings give a KV type although the model keeps its own keys and values.
        ResourceError: memory is too small.
    """
    if not model.paged and config.kv_cache != "auto":
        raise RequestError(
            f"kv_cache is {config.kv_cache!r}, but transformers runs this model and keeps its keys and values; leave "
            "kv_cache out"
        )
    if controller is not None:
        check_states(model.is_recurrent, draft is not None and draft.is_recurrent)
    layouts = model.layouts(config.kv_cache, config.page_size)
    drafts = None if draft is None else draft.layouts(None, config.page_size)
    window = _widest_window(model.config) if isinstance(model, NativeModel) else 0
    num_pages, budget = _plan_pool(config, layouts, drafts, model.max_length, window, model.device)

    def cache(layouts: Sequence[Layout], device: torch.device) -> KVCache | None:
        """Return the KV cache; None for a model without layouts, which keeps its own keys and values."""
        return KVCache(layouts, num_pages, config.max_sequences, device) if layouts else None

    proposer: Proposer | None = None if controller is None else NgramProposer()
    if config.speculate == "mtp":
        assert isinstance(model, NativeModel) and model.mtp is not None, "`predict_capacity` refuses other models"
        proposer = MTPProposer(model, config.page_size)
    if draft is not None:
        draft_cache = cache(drafts or (), draft.device)
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
        budget=budget,
    )


def _check_eviction(layouts: Sequence[Layout], *, has_draft: bool) -> None:
    """Refuse a KV budget if eviction would free nothing: the model, the draft model or the MTP head keeps everything.

    Raises:
        RequestError: eviction would free nothing; the message says why.
    """
    if not any(isinstance(layout, KVLayout) for layout in layouts):
        kept = "a state of fixed size per sequence" if layouts else "its own keys and values"
        if any(isinstance(layout, EntryLayout) for layout in layouts):
            kept = "a window and entries that each stand for several tokens"
        raise RequestError(
            f"kv_budget does not work with this model: it keeps {kept}, which cannot be evicted; leave kv_budget out"
        )
    if has_draft:
        raise RequestError(
            "kv_budget does not work with a draft model or an MTP head, which keep all keys and values of a sequence; "
            "use speculate=ngram (--speculate ngram), or leave kv_budget out"
        )


def _widest_window(model: ModelConfig) -> int:
    return max((window or 0 for window in model.windows), default=0)
