"""transformers' own generate on the same shape in bf16: milliseconds per token, by batch."""

from __future__ import annotations

import time
from typing import Any

import torch
from random_model import settings
from timing import Results, parse


def main() -> None:
    """Write peer.json."""
    arguments = parse(45)
    results = Results("peer", arguments)
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        results.add(peer="transformers", error=f"peer not present: {error}")
        return
    config = LlamaConfig(**settings("tiny" if arguments.tiny else "8B"))
    old = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(arguments.device):
            model = _without_init(LlamaForCausalLM, config)
    finally:
        torch.set_default_dtype(old)
    prompt, short, long = (32, 2, 6) if arguments.tiny else (1024, 4, 36)
    for batch in (1, 2) if arguments.tiny else (1, 8, 32):
        ids = torch.randint(3, config.vocab_size, (batch, prompt), device=arguments.device)
        results.attempt(
            lambda ids=ids, batch=batch: _rate(model, ids, short, long),
            peer="transformers generate",
            batch=batch,
            context=prompt,
            version=_version(),
        )
    results.save()


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def _without_init(kind: Any, config: Any) -> Any:
    """The model with random weights of ordinary size, drawn on the device."""
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model


def _rate(model: Any, ids: torch.Tensor, short: int, long: int) -> dict[str, float]:
    """Time per token from two lengths, so that prefill and set-up cancel."""
    times = []
    for count in (short, short, long):
        if ids.is_cuda:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        if ids.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    step = (times[2] - times[1]) / (long - short)
    return {"step_ms": step * 1e3, "tokens_per_s": len(ids) / step}


main()
