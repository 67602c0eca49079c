"""What can be known before a model is loaded, from config.json and headers: how many tokens a sequence may have."""

from __future__ import annotations

from pathlib import Path

import torch

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import RequestError
from quantkit.kernels.layouts import kv_dtype, kv_scheme
from quantkit.models.config import NotNative
from quantkit.runtime.cache.sizing import size_pool
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine.capacity import Capacity, context_length
from quantkit.runtime.model.cache_schemes import StoredCache, read_stored_cache
from quantkit.runtime.model.config import ModelConfig, read_config
from quantkit.runtime.model.loader import find_format, find_native, pick_dtype
from quantkit.runtime.model.model import config_layouts


def predict_capacity(path: Path, draft: Path | None, config: EngineConfig, device: torch.device) -> Capacity | None:
    """Tokens of one sequence, as the engine will have them; only headers are read.

    Args:
        path: model directory.
        draft: directory of the draft model, whose cache shares the memory; None = there is none.
        config: settings.
        device: that they name.
    Returns:
        None for a model that only transformers can tell about.
    Raises:
        SchemeError: an unknown KV type.
        RequestError: the pool, the context or the vocabularies do not allow what was asked for.
        ModelError, CheckpointError: there is no such model.
    """
    kv_scheme(config.kv_cache)  # refuses an unknown name, whatever runs the model
    described = None if config.backend == "transformers" else _read(path, config, device)
    if described is None:
        return None
    model, dtype, stored = described
    caches = stored.choose(config.kv_cache)
    layouts = config_layouts(model, caches, config.page_size, kv_dtype(config.kv_cache, dtype))
    drafting = None if draft is None else _read(draft, config, device)
    if drafting is not None:
        if drafting[0].vocab_size != model.vocab_size:
            raise RequestError(
                f"the draft model {draft} knows {drafting[0].vocab_size} tokens, the model {model.vocab_size}; "
                "a draft needs the same vocabulary"
            )
        layouts += config_layouts(drafting[0], None, config.page_size, drafting[1])
    num_pages = size_pool(layouts, config, context_length(config, model.max_length), device)
    return Capacity.of(config, model.max_length, num_pages)


def _read(
    path: Path, config: EngineConfig, device: torch.device
) -> tuple[ModelConfig, torch.dtype, StoredCache] | None:
    """Config, dtype of the computation and what is said of the KV cache; None when the model does not run natively."""
    reader = CheckpointReader(path)
    try:
        model = read_config(reader.config, find_native(reader))
        find_format(reader)
    except NotNative:
        return None
    return model, pick_dtype(config.dtype, reader, model, device)[0], read_stored_cache(reader, model)
