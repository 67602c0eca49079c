"""An engine set up for evaluation: nobody waits for single answers, and short pages share more of a context."""

from typing import Any

from quantkit.checkpoints.source import resolve
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.cache_schemes import follows_checkpoint

MAX_SEQUENCES, TOKEN_BUDGET, PAGE_SIZE = 64, 1024, 16
UNQUANTIZED = ("auto", "bf16", "fp16", "fp32")


def load_llm(path: str | None = None, **settings: Any) -> LLM:
    """An `LLM` for evaluation.

    Args:
        path: directory or hub id; None = the demo model.
        settings: keywords of `LLM`; what is None or absent gets the default of evaluation.
    Raises:
        QuantkitError: as `LLM`.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    # Scales of quantized keys may be per page, so there the page is the one that serving uses.
    asked = given.get("kv_cache", "auto")
    # `auto` is whatever the checkpoint declares, which may be a quantized cache.
    quantized = asked not in UNQUANTIZED or (asked == "auto" and path is not None and follows_checkpoint(resolve(path)))
    pages = {} if quantized else {"page_size": PAGE_SIZE}
    defaults = {"max_sequences": MAX_SEQUENCES, "token_budget": TOKEN_BUDGET, **pages}
    return LLM(path, **{**defaults, **given})
