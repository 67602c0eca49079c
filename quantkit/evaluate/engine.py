"""What is evaluated: our engine, set up so that nobody waits for single answers and short pages share more; or vLLM."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from quantkit.checkpoints.source import resolve
from quantkit.distributed import broadcast, world
from quantkit.runtime.engine.threads import choose_threads
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.cache_schemes import follows_checkpoint
from quantkit.runtime.types import Completion, PromptScores, SamplingParams, ScoredText

MAX_SEQUENCES, TOKEN_BUDGET, PAGE_SIZE = 64, 1024, 16
UNQUANTIZED = ("auto", "bf16", "fp16", "fp32")


class Evaluated(Protocol):
    """A model that can be asked: `LLM` and `VllmLLM`, where each of these is described."""

    path: Path
    tokenizer: Any
    scores_decode: bool

    @property
    def engine_name(self) -> str: ...
    @property
    def capacity(self) -> int: ...
    @property
    def arithmetic(self) -> str: ...
    @property
    def kv_type(self) -> str: ...
    def generate(
        self, prompts: Any, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]: ...
    def score_tokens(
        self,
        texts: Sequence[ScoredText],
        *,
        chunk_size: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[PromptScores]: ...


def load_llm(path: str | None = None, **settings: Any) -> LLM:
    """An `LLM` for evaluation.

    Args:
        path: directory or hub id; None = the demo model.
        settings: keywords of `LLM`; what is None or absent gets the default of evaluation.
    Raises:
        QuantkitError: as `LLM`.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    if world() > 1:  # measured by each for itself they would differ, and with them the last bits
        given["threads"] = broadcast(choose_threads(given.get("threads")).threads)
    # Scales of quantized keys may be per page, so there the page is the one that serving uses.
    asked = given.get("kv_cache", "auto")
    # `auto` is whatever the checkpoint declares, which may be a quantized cache.
    quantized = asked not in UNQUANTIZED or (asked == "auto" and path is not None and follows_checkpoint(resolve(path)))
    pages = {} if quantized else {"page_size": PAGE_SIZE}
    defaults = {"max_sequences": MAX_SEQUENCES, "token_budget": TOKEN_BUDGET, **pages}
    return LLM(path, **{**defaults, **given})
