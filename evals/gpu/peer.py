"""transformers' own generate on the same 8B shape in bf16.

Time per token comes from two lengths, so that prefill and set-up cancel.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from timing import dtype_on, open_results, parse

# isort: split
import torch
import transformers
from random_model import settings

BATCHES = (1, 32, 8)


def main() -> None:
    """Write peer.json."""
    arguments = parse(45)
    results = open_results("peer", arguments, row_seconds=90, share=1.0)
    results.meta["transformers"] = str(transformers.__version__)
    shape, device = "tiny" if arguments.tiny else "8B", arguments.device
    model = cache(partial(_model, shape, device))
    prompt, short, long = (8, 1, 3) if arguments.tiny else (1024, 4, 36)
    for batch in (2,) if arguments.tiny else BATCHES:
        ids = torch.randint(3, settings(shape)["vocab_size"], (batch, prompt), device=device)
        work = partial(_per_token, lambda count, ids=ids: _generate(model(), ids, count), ids, short, long)
        results.attempt(work, kind="transformers generate", weights="bf16", batch=batch, context=prompt)
    results.finish()


def _model(shape: str, device: str) -> Any:
    """The model with random weights of ordinary size, drawn on the device."""
    config = transformers.LlamaConfig(**settings(shape))
    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype_on(device))
    try:
        with torch.device(device):
            model = transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(old)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model


def _generate(model: Any, ids: torch.Tensor, count: int) -> None:
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )


def _per_token(run: Callable[[int], None], ids: torch.Tensor, short: int, long: int) -> dict[str, float]:
    """Milliseconds of a token of the batch, the first of three runs left out."""
    times = []
    for count in (short, short, long):
        if ids.is_cuda:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        run(count)
        if ids.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    step = max(times[2] - times[1], 1e-9) / (long - short)
    return {"step_ms": step * 1e3, "tokens_per_s": len(ids) / step}


if __name__ == "__main__":
    main()
