"""transformers on the same 8B shape in bf16: its own generate, and its continuous batching over pages.

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
from results import Absent

BATCHES = (1, 32, 8)


def main() -> None:
    """Write peer.json."""
    arguments = parse(45, short="only generate")
    results = open_results("peer", arguments, row_seconds=90, share=1.0)
    results.meta["transformers"] = str(transformers.__version__)
    shape, device = "tiny" if arguments.tiny else "8B", arguments.device
    model = cache(partial(_model, shape, device))
    prompt, short, long = (8, 1, 3) if arguments.tiny else (1024, 4, 36)
    rates = {"transformers generate": _generate, "transformers continuous batching": _continuous}
    if arguments.short:
        del rates["transformers continuous batching"]
    for batch in (2,) if arguments.tiny else BATCHES:
        ids = torch.randint(3, settings(shape)["vocab_size"], (batch, prompt), device=device)
        for kind, rate in rates.items():
            work = partial(_per_token, lambda count, rate=rate, ids=ids: rate(model(), ids, count), ids, short, long)
            results.attempt(work, kind=kind, weights="bf16", batch=batch, context=prompt)
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


def _continuous(model: Any, ids: torch.Tensor, count: int) -> None:
    if not hasattr(model, "generate_batch"):
        raise Absent(f"transformers {transformers.__version__} has no generate_batch")
    if not ids.is_cuda:
        raise Absent("transformers' continuous batching is measured on a CUDA device only")
    config = transformers.GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
    done = model.generate_batch(inputs=ids.tolist(), generation_config=config)
    if len(done) != len(ids):
        raise RuntimeError(f"{len(done)} of {len(ids)} requests came back")


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
