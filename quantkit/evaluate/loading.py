"""Load a model for evaluation: in quantkit's engine with settings for throughput, or in vLLM."""

import filecmp
from functools import cache
from pathlib import Path
from typing import Any

from quantkit.checkpoints.folder import resolve
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.distributed import broadcast, world
from quantkit.errors import DataError
from quantkit.machine.devices import pick_device
from quantkit.models.config import NotNative
from quantkit.runtime.engine.threads import choose_threads
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.cache_schemes import follows_checkpoint
from quantkit.runtime.model.loader import read_headers
from quantkit.runtime.vllm_engine import VllmLLM
from quantkit.safety.untrusted import read_object

MAX_SEQUENCES, TOKEN_BUDGET, PAGE_SIZE = 64, 1024, 16
_LOGIT_BYTES, _LEAST_BUDGET = 64 << 20, 64  # limit of a step's float32 logits; tokens that keep a CPU busy
UNQUANTIZED = ("auto", "bf16", "fp16", "fp32")

Evaluated = LLM | VllmLLM
"""A loaded model that can be evaluated, in quantkit's engine or in vLLM."""


def load_llm(path: str | None = None, **settings: Any) -> LLM:
    """Load an `LLM` for evaluation.

    Args:
        path: directory or hub id; None = the demo model.
        settings: keywords of `LLM`. For keywords that are absent or None, evaluation has its own defaults.
    Raises:
        QuantkitError: `LLM` cannot load the model.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    on_cpu = pick_device(given.get("device", "auto")).type == "cpu"
    if on_cpu or world() > 1:
        given["threads"] = _threads(given.get("threads"))
    sequences = given.get("max_sequences", MAX_SEQUENCES)
    budget = _token_budget(resolve(path), sequences) if on_cpu else TOKEN_BUDGET
    # Quantized keys may have one scale per page, so a quantized cache keeps the page size of serving.
    asked = given.get("kv_cache", "auto")
    # `auto` is whatever the checkpoint declares, which may be a quantized cache.
    quantized = asked not in UNQUANTIZED or (asked == "auto" and path is not None and follows_checkpoint(resolve(path)))
    pages = {} if quantized else {"page_size": PAGE_SIZE}
    defaults = {"max_sequences": MAX_SEQUENCES, "token_budget": budget, **pages}
    return LLM(path, **{**defaults, **given})


def _token_budget(path: Path, sequences: int) -> int:
    """Choose the token budget of a step: smaller for a large vocabulary, because every token's logits are needed.

    Args:
        path: model directory.
        sequences: number of concurrent sequences, each of which needs at least one token.
    """
    try:
        config, _, _ = read_headers(CheckpointReader(path))
    except NotNative:  # only transformers knows the number of logits of such a model
        return TOKEN_BUDGET
    fitting = _LOGIT_BYTES // (4 * config.vocab_size) // 64 * 64
    return max(_LEAST_BUDGET, sequences, min(TOKEN_BUDGET, fitting))


@cache
def _threads(requested: int | None) -> int:
    """Choose one number of threads for all models and ranks, because the last bits of sums depend on it."""
    return broadcast(choose_threads(requested, decodes=False).threads)


def check_same_language(model: str | None, baseline: str | None) -> None:
    """Refuse two models with different vocabularies, because their perplexities and answer lengths are not comparable.

    Args:
        model, baseline: directories or hub ids; None = the demo model.
    Raises:
        DataError: the vocabularies differ.
        ModelError: a model is neither a directory nor a hub id.
    """
    ours, theirs = map(resolve, (model, baseline))
    file, original = (folder / "tokenizer.json" for folder in (ours, theirs))
    if file.is_file() and original.is_file() and filecmp.cmp(file, original, shallow=False):
        return  # the usual case; reading a vocabulary of 262,144 tokens takes seconds and hundreds of megabytes
    one, other = _vocabulary(ours), _vocabulary(theirs)
    # The pair is accepted if a vocabulary cannot be read, because that does not show that the two differ.
    if one is None or other is None or one == other:
        return
    raise DataError(
        f"{theirs} and {ours} have different vocabularies ({len(other)} and {len(one)} tokens); compare a model with "
        "the original that it was made from"
    )


def other_arithmetic(name: str) -> str:
    """Return the dtype in which the original runs again, to measure noise: float32 after bfloat16, else bfloat16."""
    return "float32" if name == "bfloat16" else "bfloat16"


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Return the token ids in tokenizer.json, keyed by text; None if the file is missing or has an unknown form."""
    try:
        vocabulary: Any = read_object(folder / "tokenizer.json", DataError)["model"]["vocab"]
        if isinstance(vocabulary, list):  # unigram models: tokens with their scores, in order
            return {token: index for index, (token, *_) in enumerate(vocabulary)}
        return dict(vocabulary)
    except (DataError, ValueError, LookupError, TypeError):
        return None
