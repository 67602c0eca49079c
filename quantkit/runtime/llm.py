"""`LLM`: loads a model directory and its tokenizer, and generates text with the engine; see `runtime.engine`."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoints.folder import resolve
from quantkit.errors import RequestError
from quantkit.kernels import cpu, gpu
from quantkit.kernels.layouts import page_bytes
from quantkit.machine.devices import pick_device
from quantkit.native import watch_neighbours
from quantkit.quantities import dtype_name
from quantkit.runtime.cache import policies
from quantkit.runtime.config import TOKEN_BUDGET, EngineConfig, adapter_folders
from quantkit.runtime.engine.assembly import build_engine, fit_pages, predict_capacity
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.engine.kernel_check import check_kernels, describe_kernels
from quantkit.runtime.engine.scoring import scoring_inputs
from quantkit.runtime.engine.speculation import SpeculationController
from quantkit.runtime.engine.threads import choose_threads, guard_forks
from quantkit.runtime.model.cache_schemes import cache_type
from quantkit.runtime.model.loader import load_model
from quantkit.runtime.model.model import Model
from quantkit.runtime.prompts import Messages, Prompts
from quantkit.runtime.types import Completion, PromptScores, PromptScoring, SamplingParams, ScoredText, StepOutput

Prompt = str | Many[int]


class LLM(Prompts):
    """A model that generates text.

        llm = LLM("demo-awq-int4", kv_cache="int8")
        llm.generate(["Once upon a time"], SamplingParams(max_tokens=40))[0].text

    Several threads may use one `LLM`; at any time, one of these threads computes the requests of all. Several `stream`s
    may be read in turn; their requests and concurrent scoring requests are computed together. In a forked process,
    an `LLM` computes with one thread.

    Args:
        path: model directory or hub id; None = the demo model included in quantkit.
        lazy: True = read the weights at first use. A request that can never fit is then refused without reading them.
        settings: fields of `EngineConfig`, which describes them.
    Raises:
        QuantkitError: see `quantkit.errors`; errors in config and headers are reported before any weight is read.
    """

    engine_name = "quantkit"
    scores_decode = True  # can score token by token, reading earlier tokens from the cache

    def __init__(self, path: str | Path | None = None, *, lazy: bool = False, **settings: Any) -> None:
        self.device = pick_device(settings.get("device", "auto"))
        config = EngineConfig(**{"token_budget": TOKEN_BUDGET[self.device.type], **settings})
        self._controller = None
        if config.speculate is not None:
            self._controller = SpeculationController(config.max_drafts, force=config.force_speculation)
        super().__init__(resolve(path))
        self._draft = None if config.speculate in (None, "ngram", "mtp") else resolve(str(config.speculate))
        self.config = config = fit_pages(self.path, config)
        self._capacity = predict_capacity(self.path, self._draft, config, self.device)
        self._threads = ""  # how many threads, and why
        self._engine = None if lazy else self._load()
        self._inboxes: dict[int, deque[StepOutput]] = {}

    def _load(self) -> Engine:
        config = self.config
        if self.device.type == "cpu" or config.threads is not None:
            choice = choose_threads(config.threads)
            torch.set_num_threads(choice.threads)
            watch_neighbours(choice.threads)
            guard_forks()
            self._threads = f"{choice.threads} ({choice.reason})"
        check_kernels(self.device)
        load = partial(load_model, dtype=config.dtype, device=self.device)
        return build_engine(
            load(
                self.path,
                head_dtype=config.head_dtype,
                backend=config.backend,
                adapters=adapter_folders(config.adapters),
                merge=config.merge,
                mtp=config.speculate == "mtp",
            ),
            config,
            draft=None if self._draft is None else load(self._draft),
            controller=self._controller,
            tokenizer=self.tokenizer,
            identity=str(self.path),
        )

    @property
    def engine(self) -> Engine:
        """The engine; reads the weights if they have not been read."""
        with self._lock:
            if self._engine is None:
                self._engine = self._load()
            return self._engine

    def exchange(self, engine: Engine) -> Engine:
        """Use another engine for the same model from now on, and return the previous one; no request may be running."""
        with self._lock:
            assert not self._inboxes, "requests are running"
            before, self._engine = self.engine, engine
            return before

    @property
    def model(self) -> Model:
        """The loaded model."""
        return self.engine.model

    def generate(
        self, prompts: Prompt | Many[Prompt], params: SamplingParams | Many[SamplingParams] | None = None
    ) -> list[Completion]:
        """Generate completions of one or several prompts, computed together.

        Args:
            prompts: a text, token ids, or a list of either.
            params: one `SamplingParams` for all prompts, or one per prompt; None = greedy, 128 tokens.
        Returns:
            One completion per prompt, in order.
        Raises:
            RequestError: see `Engine.add`; nothing has been computed in this case.
        """
        asked = [self._ids(prompt) for prompt in _several(prompts)]
        each = [params or SamplingParams()] * len(asked) if not isinstance(params, Many) else list(params)
        if len(each) != len(asked):
            raise RequestError(
                f"there are {len(asked)} prompts but {len(each)} SamplingParams; give one SamplingParams for all "
                "prompts, or one per prompt"
            )
        return list(self._run(zip(asked, each, strict=True)))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StepOutput]:
        """Generate a completion step by step; the last output has the whole completion.

        Closing the iterator cancels the request.

        Raises:
            RequestError: see `Engine.add`; this call raises it, not the iterator.
        """
        stream = self._stream(self._add(self._ids(prompt), params or SamplingParams()))
        next(stream)  # starts it: closing a generator that never started would cancel nothing
        return stream

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> Completion:
        """Return the answer to a conversation; see `encode_chat`."""
        return self.generate([self.encode_chat(messages)], params)[0]

    def score(self, sequences: Many[Many[int]], chunk_size: int | None = None) -> list[Tensor]:
        """Return the logits after every token of every sequence, computed through the cache.

        Args:
            sequences: token ids.
            chunk_size: maximum number of tokens of a sequence per step; 1 uses the decode path, which reads all earlier
                tokens from the cache and so shows the error of a quantized cache. None = as many as a step takes.
        Returns:
            (T, V) float32 on the CPU for each sequence; row t predicts token t + 1.
        Raises:
            RequestError: a sequence is empty, too long, or has unknown tokens.
        """
        logits = [torch.empty(len(ids), self.vocab_size) for ids in sequences]
        filled = [0] * len(logits)
        for index, rows in self.score_rows(sequences, chunk_size):
            start = filled[index]
            filled[index] += len(rows)
            logits[index][start : filled[index]] = rows
        return logits

    def score_rows(self, sequences: Many[Many[int]], chunk_size: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield the logits of `score` as they are computed, so that they need not all be in memory.

        Args:
            sequences, chunk_size: see `score`.
        Returns:
            Pairs of the index of a sequence and its next rows, (t, V) float32 on the CPU.
        Raises:
            RequestError: see `score`.
        """
        computed: deque[tuple[int, Tensor]] = deque()  # also filled by steps of other threads
        counts = [0] * len(sequences)
        numbers: list[int] = []

        def collect(index: int, first: int, rows: Tensor) -> None:
            rows = rows[counts[index] - first :]  # a preempted sequence is computed again from its beginning
            counts[index] += len(rows)
            computed.append((index, torch.empty(rows.shape).copy_(rows)))  # the next step may overwrite `rows`

        try:
            for index, ids in enumerate(sequences):
                scoring = PromptScoring(read_logits=partial(collect, index), chunk_size=chunk_size)
                numbers.append(self._add(list(ids), SamplingParams(max_tokens=0, scoring=scoring)))
            done = False
            while not done:
                with self._lock:  # otherwise another thread could compute the last step after this check
                    done = all(self._inboxes[number] for number in numbers)
                    if not done:
                        self._step()
                while computed:
                    yield computed.popleft()
            assert counts == list(map(len, sequences)), "scoring ended early"
        finally:
            self._drop(numbers)

    def score_tokens(
        self, texts: Many[ScoredText], *, chunk_size: int | None = None, progress: Callable[[int], None] | None = None
    ) -> list[PromptScores]:
        """Return log-probabilities of given continuations, as needed for multiple choice and perplexity.

        Args:
            texts: texts, each at most one token longer than the context: the last token of a text is scored, but the
                model does not compute it.
            chunk_size: see `score`.
            progress: called with the number of texts scored since the last call.
        Returns:
            One `PromptScores` per text, in order: the log-probabilities of its scored tokens.
        Raises:
            RequestError: a text is too short, too long, or has unknown tokens.
        """
        inputs = scoring_inputs(texts)
        scores: dict[int, PromptScores] = {}
        done = self._run((list(item.ids), item.params(chunk_size)) for item in inputs)
        for item, completion in zip(inputs, done, strict=True):
            assert completion.scores is not None, f"scoring ended with {completion.finish_reason}"
            scores.update(item.split(completion.scores))
            if progress is not None:
                progress(len(item.texts))
        return [scores[number] for number in range(len(texts))]

    @property
    def capacity(self) -> int:
        """The maximum number of tokens of one sequence."""
        return self.engine.capacity

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.model.vocab_size

    @property
    def arithmetic(self) -> str:
        """Dtype of the computation."""
        return dtype_name(self.model.dtype)

    @property
    def adapter(self) -> str:
        """Name and digest of the adapter for requests that name no adapter; empty = the base model."""
        name = self.config.adapter
        return "" if name is None else f"{name} (SHA-256 {self.model.adapters.digests[name]})"

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for reports on how the model ran."""
        return tuple(self.model.notes)

    @property
    def kv_type(self) -> str:
        """Number type of the KV cache: `kv_cache`, or if this is `auto`, the checkpoint's quantized type if any."""
        cache, asked = self.engine.runner.cache, self.config.kv_cache
        return asked if cache is None else cache_type(cache.layouts, asked)

    @property
    def kv_bytes_per_token(self) -> float:
        """KV cache bytes per token in all layers; 0 when the model keeps its own keys and values."""
        cache = self.engine.runner.cache
        return 0.0 if cache is None else page_bytes(cache.layouts) / cache.page_size

    def stats(self) -> dict[str, Any]:
        """Return sizes of weights and cache, and counters since the engine was loaded, keyed by name."""
        engine = self.engine
        controller, cache = engine.controller, engine.runner.cache
        return {
            "weight_bytes": engine.model.num_bytes,
            "kv_bytes": 0 if cache is None else cache.num_bytes + cache.residual_bytes,
            "kv_tokens": engine.pool.num_pages * engine.config.page_size,
            "kv_pages": engine.pool.num_pages,
            "kv_free_pages": engine.pool.num_free,
            "kv_cache": self.kv_type,
            "kv_budget": None if engine.eviction is None else engine.eviction.budget.tokens,
            "kv_evicted_pages": 0 if engine.eviction is None else engine.eviction.num_evicted_pages,
            "prefix_hit_tokens": engine.prefix.num_hit_tokens,
            "prefix_asked_tokens": engine.prefix.num_asked_tokens,
            "preemptions": engine.scheduler.num_preemptions,
            "drafted_tokens": 0 if controller is None else controller.num_drafted,
            "accepted_tokens": 0 if controller is None else controller.num_accepted,
            "acceptance": None if controller is None else controller.acceptance,
            "acceptance_by_position": [] if controller is None else list(controller.acceptance_at),
        }

    def describe(self) -> dict[str, str]:
        """Return one line of text on each topic of how the model runs, such as threads and kernels, keyed by topic."""
        engine, counts, model = self.engine, self.stats(), self.model
        topics = {
            "computed in": f"{dtype_name(model.dtype)} on {model.device}",
            "CPU kernels": cpu.status() if model.device.type == "cpu" else None,
            "GPU kernels": describe_kernels(model.device) if gpu.is_used(model.device) else None,
            "threads": self._threads,
            "CUDA graphs": engine.runner.graph_status,
            "decode steps": engine.runner.program_status,
        }
        if (eviction := engine.eviction) is not None:
            policy, evicted = engine.config.kv_policy or policies.DEFAULT, counts["kv_evicted_pages"]
            topics["KV budget"] = f"{eviction.budget.tokens} tokens per sequence, {policy}; {evicted} pages evicted"
        if counts["prefix_hit_tokens"]:
            topics["prefix cache"] = (
                f"held {counts['prefix_hit_tokens']} of {counts['prefix_asked_tokens']} prompt tokens"
            )
        if counts["preemptions"]:
            topics["preemptions"] = str(counts["preemptions"])
        if engine.controller is not None:
            share = counts["acceptance"]
            by_position = ", ".join(f"{rate:.0%}" for rate in counts["acceptance_by_position"])
            topics["speculation"] = (
                "not used"
                if share is None
                else f"{share:.0%} of {counts['drafted_tokens']} drafts accepted (by position: {by_position})"
            )
        topics["notes"] = "; ".join(model.notes)
        return {topic: text for topic, text in topics.items() if text}

    def _ids(self, prompt: Prompt) -> list[int]:
        return self.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _add(self, ids: list[int], params: SamplingParams) -> int:
        if self._capacity is not None:
            self._capacity.check(len(ids), params.max_tokens)
        with self._lock:
            number = self.engine.add(ids, params)
            self._inboxes[number] = deque()
            return number

    def _run(self, requests: Iterable[tuple[list[int], SamplingParams]]) -> Iterator[Completion]:
        """Yield the completions of requests in order; queue all requests before computing the first."""
        numbers: list[int] = []
        try:
            for ids, params in requests:
                numbers.append(self._add(ids, params))
            for number in numbers:
                completion = None
                while completion is None:
                    completion = self._next(number).completion
                yield completion
        finally:
            # Also reached when the caller stops half-way: requests that nobody reads must not be computed any further.
            self._drop(numbers)

    def _next(self, number: int) -> StepOutput:
        """Return the next output of a request; store outputs of other requests for their readers."""
        with self._lock:
            inbox = self._inboxes[number]
            while not inbox:
                self._step()
            return inbox.popleft()

    def _step(self) -> None:
        """Compute a step, and store each output for its reader."""
        with self._lock:
            assert self.engine.has_work, "a request is lost"
            for output in self.engine.step():
                if output.request_id in self._inboxes:
                    self._inboxes[output.request_id].append(output)

    def _stream(self, number: int) -> Iterator[StepOutput]:
        """Yield an empty output, then the outputs of a request."""
        try:
            yield StepOutput(request_id=number, token_ids=(), text="")
            while True:
                output = self._next(number)
                yield output
                if output.completion is not None:
                    return
        finally:
            self._drop([number])

    def _drop(self, numbers: list[int]) -> None:
        with self._lock:
            for number in numbers:
                self.engine.cancel(number)
                self._inboxes.pop(number, None)


def _several(prompts: Prompt | Many[Prompt]) -> list[Prompt]:
    """Return one prompt or several prompts as a list."""
    if isinstance(prompts, str):
        return [prompts]
    # An empty list means no prompts, not one prompt without tokens.
    if all(isinstance(item, int) for item in prompts) and len(prompts):
        return [prompts]  # type: ignore[list-item]  # token ids of one prompt
    return list(prompts)  # type: ignore[arg-type]
