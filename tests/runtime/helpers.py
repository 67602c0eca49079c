"""Running a model without an engine: pages in shuffled order, chunks of any size."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.kernels.types import ForwardBatch
from quantkit.runtime.cache.kv_cache import KVCache
from tests.helpers import tiny_config

PAGE_SIZE = 16


def make_loud_model(folder: Path, family: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A random model in which every weight, bias and norm matters, and attention is far from uniform."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config(family, **{"max_position_embeddings": 512, **changes}))
    make_loud(model).to(dtype).save_pretrained(folder)
    return folder


def make_loud(model: Any) -> Any:
    """The model itself, with weights as in `make_loud_model`."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or name.endswith(("bias", "sinks")):
                parameter.add_(0.4 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            else:
                loud = any(part in name for part in ("q_proj", "k_proj", "qkv", "query_key_value", "gate.weight"))
                parameter.copy_(noise * (2.5 if loud else 1.0) / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            if "tid2eid" in name:  # two different experts of four
                first = torch.randint(0, 4, (len(buffer), 1), generator=generator)
                buffer.copy_((first + torch.arange(buffer.shape[1])) % 4)
    return model


def reference_logits(folder: Path, sequences: list[list[int]]) -> list[Tensor]:
    """Logits (length, V) at every position, by transformers in float32 with its plain attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([sequence])).logits[0].float() for sequence in sequences]


def prompts(*lengths: int, vocab_size: int = 260) -> list[list[int]]:
    """Random token ids of these lengths."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def difference(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference of logits, relative to the largest logit of the same sequence."""
    pairs = zip(actual, expected, strict=True)
    return max(((one - other).abs().max() / other.abs().max()).item() for one, other in pairs)


def make_batch(
    tokens: list[list[int]],
    pasts: list[int],
    pages: list[list[int]],
    *,
    page_size: int = PAGE_SIZE,
    ids: list[int] | None = None,
    rows: list[int] | None = None,
) -> ForwardBatch:
    """One step: new tokens of each sequence after `pasts` tokens cached in `pages`; logits of all by default."""
    positions = [list(range(past, past + len(new))) for new, past in zip(tokens, pasts, strict=True)]
    slots = [
        pages[i][position // page_size] * page_size + position % page_size
        for i, own in enumerate(positions)
        for position in own
    ]
    width = max(len(item) for item in pages)
    flat = [token for new in tokens for token in new]
    starts = [0]
    for new in tokens:
        starts.append(starts[-1] + len(new))
    ids = ids or list(range(len(tokens)))
    return ForwardBatch(
        token_ids=torch.tensor(flat),
        positions=torch.tensor([position for own in positions for position in own]),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        page_table=torch.tensor([item + [-1] * (width - len(item)) for item in pages], dtype=torch.int32),
        slots=torch.tensor(slots),
        residual_rows=torch.tensor(ids),
        logit_rows=torch.arange(len(flat)) if rows is None else torch.tensor(rows, dtype=torch.int64),
        query_lengths=tuple(len(new) for new in tokens),
        context_lengths=tuple(past + len(new) for new, past in zip(tokens, pasts, strict=True)),
        sequence_ids=tuple(ids),
    )


def run(
    model,
    sequences: list[list[int]],
    chunk: int | None = None,
    kv=None,
    page_size: int = PAGE_SIZE,
    adapters: Sequence[str | None] = (),
) -> list[Tensor]:
    """Logits (length, V) at every position of each sequence, fed in chunks; shorter sequences finish earlier."""
    counts = [-(-len(sequence) // page_size) for sequence in sequences]
    numbers = list(range(sum(counts)))
    random.Random(0).shuffle(numbers)
    pages = [[numbers.pop() for _ in range(count)] for count in counts]
    cache = KVCache(model.layouts(kv, page_size), sum(counts), len(sequences)) if model.paged else None
    logits_of: list[list[Tensor]] = [[] for _ in sequences]
    past = 0
    while running := [i for i, sequence in enumerate(sequences) if len(sequence) > past]:
        stop = past + (chunk or max(map(len, sequences)))
        new = [sequences[i][past:stop] for i in running]
        batch = make_batch(new, [past] * len(new), [pages[i] for i in running], page_size=page_size, ids=running)
        batch = replace(batch, adapters=tuple(adapters[i] for i in running) if adapters else ())
        logits = model.forward(batch, cache)
        for i, rows in zip(running, logits.split([len(item) for item in new]), strict=True):
            logits_of[i].append(rows)
        past = stop
    return [torch.cat(parts) for parts in logits_of]
