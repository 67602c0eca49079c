"""Settings of an engine, defined once for `LLM`, the scheduler, the caches and the command line.

This module imports no torch, so `--help` stays fast. Values that depend on a model or device are checked later, where
the model and the device are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from quantkit.errors import RequestError
from quantkit.models.kv_budget import kept_tokens
from quantkit.models.kv_sizes import DEFAULT_PAGE_SIZE, KV_TYPES
from quantkit.quantities import parse_budget, parse_bytes
from quantkit.runtime.cache import policies
from quantkit.settings import setting

if TYPE_CHECKING:
    import torch

HEAD_TYPES = ("int8", "int4")
DTYPES_BY_SHORT_NAME = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

TOKEN_BUDGET = {"cpu": 512, "cuda": 2048}
"""Default of `token_budget`, the number of new tokens per step, by device type.

A step has fixed costs, so with more tokens per step each token costs less. On a GPU the largest fixed cost is
dequantizing the packed weights: about 10 ms for an 8B model with INT4 weights on an H100. The matrix products of a step
take about 10 ms for 512 tokens, and about 40 ms for 2048. With more than 2048 tokens, sequences that decode in the
same step as a prompt would wait too long, and a step would need more memory. vLLM's servers also use 2048, and 8192
on an H100 or larger.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Settings of an engine: the keyword arguments of `LLM`. The text in each field's `setting` explains the field.

    Raises:
        InputError: `memory` is not a size.
        RequestError: a count is not positive, or settings contradict each other.
    """

    device: str | torch.device = setting("auto", "Where to compute.", flag="--device auto|cpu|cuda[:i]")
    dtype: str | torch.dtype = setting("auto", "Dtype to compute in.", flag="--dtype auto|bf16|fp16|fp32")
    kv_cache: str = setting("auto", "Number type of keys and values in the cache.", flag="--kv-cache", choices=KV_TYPES)
    memory: int | str | None = setting(
        None, "Memory for the KV cache, e.g. 4GiB.", flag="--kv-memory SIZE", shown="what the model can use"
    )
    kv_budget: int | float | str | None = setting(
        None,
        "Tokens that the KV cache keeps of each sequence: a number such as 2k, or a share of the context such as 25%.",
        flag="--kv-budget TOKENS|SHARE",
        shown="all",
    )
    kv_policy: str | None = setting(
        None,
        "Policy that chooses which tokens stay.",
        flag="--kv-policy",
        choices=tuple(policies.REGISTRY.names()),
        shown=policies.DEFAULT,
    )
    max_length: int | None = setting(
        None, "Maximum context length in tokens.", flag="--max-length", minimum=1, shown="the model's"
    )
    num_pages: int | None = setting(None, "Pages of the KV cache; overrides `memory`.")
    page_size: int = setting(DEFAULT_PAGE_SIZE, "Tokens per page of the KV cache; a small kv_budget may lower it.")
    max_sequences: int = setting(32, "Maximum number of requests that are computed at the same time.")
    token_budget: int = setting(
        TOKEN_BUDGET["cpu"], "New tokens per step, of all requests together; 2048 on CUDA devices if not given."
    )
    chunked: bool = setting(True, "Whether to compute long prompts in chunks; if not, each takes one step.")
    prefix_cache: bool = setting(True, "Whether requests with a common beginning share the pages of this beginning.")
    head_dtype: str | None = setting(
        None, "Number type of the output head; recipes leave the head unquantized.", flag="--head", choices=HEAD_TYPES
    )
    adapters: Mapping[str, str | Path] | Iterable[str] = setting(
        (),
        "LoRA adapter to compute with: a PEFT folder, with or without a name for it.",
        flag="--adapter [NAME=]DIR",
        shown="none",
    )
    adapter: str | None = setting(None, "Name of the adapter of requests that name none; None = the base model.")
    merge: str | Path | None = setting(
        None, "Folder of an adapter to merge into the weights of an unquantized model while it is loaded; None = none."
    )
    speculate: str | Path | None = setting(
        None,
        "Propose several tokens per step: by n-grams, the model's MTP head, or a draft model; the text stays the same "
        "up to rounding.",
        flag="--speculate ngram|mtp|MODEL",
    )
    max_drafts: int = setting(4, "Maximum number of proposed tokens per step.")
    force_speculation: bool = setting(False, "Whether to keep speculating when measured times show no gain.")
    threads: int | None = setting(None, "CPU threads to compute with.", flag="--threads", minimum=1, shown="measured")
    backend: Literal["auto", "native", "transformers"] = setting(
        "auto",
        "What runs the model: quantkit's own layers (native), transformers, or the first of the two that can (auto).",
    )
    overlap: bool | None = setting(
        None, "Whether to launch a decode step before the previous step's tokens are read; None = only on CUDA devices."
    )
    seed: int = setting(0, "Seed of requests that give no seed.")

    def __post_init__(self) -> None:
        for name in ("max_length", "num_pages", "page_size", "max_sequences", "token_budget"):
            value = getattr(self, name)
            # True is an int in Python and would pass for one page or one token.
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise RequestError(f"{name} is {value!r}; give an integer of at least 1")
        if self.token_budget < self.max_sequences:
            raise RequestError(
                f"token_budget is {self.token_budget}, but each of {self.max_sequences} sequences needs one token per "
                "step; give a larger token_budget or a smaller max_sequences"
            )
        if self.kv_budget is not None:
            parse_budget(self.kv_budget)  # refuses a value that is neither tokens nor a share
            policies.REGISTRY.find(self.kv_policy or policies.DEFAULT)  # refuses an unknown name
        elif self.kv_policy is not None:
            raise RequestError(f"kv_policy {self.kv_policy!r} needs a kv_budget; give one, or leave kv_policy out")
        if self.max_length is not None and self.num_pages is not None and self.kv_budget is None:
            held, pages = self.num_pages * self.page_size, self.pages_for(self.max_length)
            if pages > self.num_pages:
                raise RequestError(
                    f"{self.num_pages} pages of {self.page_size} tokens hold {held} tokens, too few for a sequence of "
                    f"max_length {self.max_length}; use {pages} pages or more, or a smaller max_length"
                )
        if isinstance(self.speculate, str) and self.speculate.lower() in {"ngram", "mtp"} - {self.speculate}:
            raise RequestError(f"speculate is {self.speculate!r}; write {self.speculate.lower()!r}")
        folders = adapter_folders(self.adapters)  # refuses names that are empty or given twice
        if self.adapter is not None and self.adapter not in folders:
            raise RequestError(_unknown_adapter(self.adapter, folders))
        if self.memory is not None:
            parse_bytes(self.memory)  # refuses a value that is not a size

    def context_length(self, model_length: int) -> int:
        """Return the maximum number of tokens per sequence, ignoring memory: the requested length, or else the model's
        limit.

        Raises:
            RequestError: the requested length exceeds the model's.
        """
        if self.max_length is not None and self.max_length > model_length:
            raise RequestError(
                f"max_length is {self.max_length}, but the model's context is {model_length} tokens; give "
                f"{model_length} or less"
            )
        return self.max_length or model_length

    def budget_tokens(self, length: int) -> int | None:
        """Return the KV budget per sequence in tokens; None if there is no budget or it is not below `length`.

        Args:
            length: the maximum number of tokens that a sequence can have.
        """
        budget = None if self.kv_budget is None else parse_budget(self.kv_budget)
        kept = kept_tokens(budget, length)
        return kept if kept < length else None

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)


def _unknown_adapter(name: str, folders: Mapping[str, Path]) -> str:
    if folders:
        return f"adapter is {name!r}, which is not among the adapters; choose one of {', '.join(folders)}"
    short = Path(name).name or "NAME"
    return (
        f"adapter is {name!r}, but must be a name in adapters; give, for example, adapters={{{short!r}: {name!r}}}, "
        f"adapter={short!r}"
    )


def adapter_folders(adapters: Mapping[str, str | Path] | Iterable[str]) -> dict[str, Path]:
    """Return the folders of adapters, keyed by name.

    Args:
        adapters: folders keyed by name, or texts `NAME=DIR`; a plain `DIR` is named after the folder.
    Raises:
        RequestError: a name is empty or given twice.
    """
    if isinstance(adapters, Mapping):
        pairs = [(name, str(folder)) for name, folder in adapters.items()]
    else:
        pairs = [_named(text) for text in adapters]
    folders: dict[str, Path] = {}
    for name, folder in pairs:
        if not name or not folder:
            raise RequestError(f"adapter '{name}={folder}' has no {'folder' if name else 'name'}; give NAME=DIR")
        if name in folders:
            raise RequestError(f"two adapters are named {name!r}; give each a different name, as NAME=DIR")
        folders[name] = Path(folder)
    return folders


def _named(text: str) -> tuple[str, str]:
    """Split `NAME=DIR`; a plain `DIR` is named after the folder."""
    name, equals, folder = text.partition("=")
    # A slash before the sign means that the sign is part of a path.
    return (name, folder) if equals and "/" not in name else (Path(text).resolve().name if text else "", text)
