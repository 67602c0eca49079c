"""What can be known before a model is loaded, from config.json and headers: how many tokens a sequence may have."""

from __future__ import annotations

from pathlib import Path

import torch

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import RequestError
from quantkit.kernels.layouts import KVLayout, kv_dtype
from quantkit.models.config import NotNative
from quantkit.runtime.cache.sizing import size_pool
from quantkit.runtime.engine.capacity import Room
from quantkit.runtime.model.cache_schemes import StoredCache, read_stored_cache
from quantkit.runtime.model.config import ModelConfig, read_config
from quantkit.runtime.model.loader import find_format, find_native, pick_dtype
from quantkit.runtime.model.model import config_layouts


def find_room(
    path: Path,
    draft: Path | None,
    *,
    dtype: str | torch.dtype,
    device: torch.device,
    kv_cache: str,
    max_length: int | None,
    num_pages: int | None,
    memory: int | None,
    page_size: int,
    max_sequences: int,
) -> Room | None:
    """Tokens of one sequence, as the engine will find them; only headers are read.

    Args:
        path: model directory.
        draft: directory of the draft model, whose cache shares the memory; None = there is none.
        dtype, device, kv_cache, max_length, num_pages, memory, page_size, max_sequences: as for `LLM`.
    Returns:
        None for a model that only transformers can tell about.
    Raises:
        RequestError: see `context.size_pool`; or the context or the vocabularies do not allow what was asked for.
        ModelError, CheckpointError: there is no such model.
    """
    found = _read(path, dtype, device)
    if found is None:
        return None
    config, computed, stored = found
    if max_length is not None and max_length > config.max_length:
        raise RequestError(f"max_length is {max_length}, but the model's context is {config.max_length} tokens")
    layouts = config_layouts(config, stored.choose(kv_cache), page_size, kv_dtype(kv_cache, computed))
    layouts += _draft_layouts(draft, config, dtype, device, page_size)
    length = max_length or config.max_length
    pages = size_pool(
        layouts,
        page_size=page_size,
        max_sequences=max_sequences,
        max_length=length,
        asked_length=max_length,
        num_pages=num_pages,
        memory=memory,
        device=device,
    )
    return Room(capacity=min(length, pages * page_size), max_length=length)


def _draft_layouts(
    draft: Path | None, config: ModelConfig, dtype: str | torch.dtype, device: torch.device, page_size: int
) -> list[KVLayout]:
    found = None if draft is None else _read(draft, dtype, device)
    if found is None:
        return []
    if found[0].vocab_size != config.vocab_size:
        raise RequestError(
            f"the draft model {draft} knows {found[0].vocab_size} tokens, the model {config.vocab_size}; "
            "a draft needs the same vocabulary"
        )
    return config_layouts(found[0], None, page_size, found[1])


def _read(
    path: Path, dtype: str | torch.dtype, device: torch.device
) -> tuple[ModelConfig, torch.dtype, StoredCache] | None:
    """Config, dtype of the computation and what is said of the KV cache; None when the model does not run natively."""
    reader = CheckpointReader(path)
    try:
        config = read_config(reader.config, find_native(reader))
        find_format(reader)
    except NotNative:
        return None
    return config, pick_dtype(dtype, reader, config, device)[0], read_stored_cache(reader, config)
