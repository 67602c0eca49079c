"""`LLM`: a model directory to texts. Loads model and tokenizer, sizes the KV pool, and drives the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from quantkit.checkpoints.source import resolve
from quantkit.demo import DEMO_MODEL
from quantkit.devices import pick_device
from quantkit.errors import RequestError, first_line
from quantkit.kernels import cpu
from quantkit.kernels.layouts import kv_scheme, page_bytes
from quantkit.runtime.cache.sizing import check_settings, parse_bytes
from quantkit.runtime.engine import scoring
from quantkit.runtime.engine.assembly import make_engine
from quantkit.runtime.engine.capacity import Room
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.engine.preflight import find_room
from quantkit.runtime.engine.prompts import Prompt, checked_text, load_tokenizer, several
from quantkit.runtime.engine.scheduler import SchedulerOptions
from quantkit.runtime.engine.speculation_controller import Governor
from quantkit.runtime.engine.threads import find_threads
from quantkit.runtime.model.cache_schemes import cache_type
from quantkit.runtime.model.loader import load_model
from quantkit.runtime.model.model import Model
from quantkit.runtime.types import Completion, SamplingParams, StepOutput

Messages = Many[dict[str, Any]]


class LLM:
    """A model that generates.

        llm = LLM("demo-awq-int4", kv_cache="int8")
        llm.generate(["Once upon a time"], SamplingParams(max_tokens=40))[0].text

    It belongs to one thread. Several `stream`s may be read in turns; their requests are computed together.

    Args:
        path: model directory or hub id; None = the demo model that comes with quantkit.
        dtype: to compute in: auto, float32, bfloat16, float16.
        device: auto, cpu, cuda or cuda:<i>.
        kv_cache: auto (what the checkpoint says, else the model's dtype), bf16, fp16, fp32, fp8, int8 or int4.
        max_length: tokens of a sequence at most; None = what the model can.
        memory: of the KV pool, bytes or a text such as "4GiB"; None = enough for max_sequences of max_length, as far
            as memory is free.
        num_pages: of the KV pool; wins over memory.
        page_size: tokens per page.
        max_sequences: that are computed at the same time.
        token_budget: new tokens per step.
        chunked: False computes every prompt in one piece.
        prefix_cache: whether common beginnings are computed once.
        speculate: "ngram", or the directory of a draft model; None = no speculation.
        max_drafts: guessed tokens per step at most.
        force_speculation: True keeps speculating where measured times say that it loses.
        threads: of the CPU, for all of torch; None = measured.
        head_dtype: int8 or int4 rounds the output head at load.
        backend: auto, native or transformers.
        seed: of requests that bring none.
        lazy: True reads the weights when they are first needed, so that a request that can never fit is refused before.
    Raises:
        QuantkitError: see `quantkit.errors`; what config and headers can tell is refused before the weights are read.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        kv_cache: str = "auto",
        max_length: int | None = None,
        memory: int | str | None = None,
        num_pages: int | None = None,
        page_size: int = 64,
        max_sequences: int = 32,
        token_budget: int = 512,
        chunked: bool = True,
        prefix_cache: bool = True,
        speculate: str | Path | None = None,
        max_drafts: int = 4,
        force_speculation: bool = False,
        threads: int | None = None,
        head_dtype: str | None = None,
        backend: Literal["auto", "native", "transformers"] = "auto",
        seed: int = 0,
        lazy: bool = False,
    ) -> None:
        limits = SchedulerOptions(
            page_size=page_size, max_sequences=max_sequences, token_budget=token_budget, chunked=chunked
        )
        self.device, self.kv_cache = pick_device(device), kv_cache
        sizes: dict[str, Any] = {
            "kv_cache": kv_cache,
            "max_length": max_length,
            "num_pages": num_pages,
            "memory": None if memory is None else parse_bytes(memory),
        }
        governor = None if speculate is None else Governor(max_drafts, force=force_speculation)
        self.path = DEMO_MODEL if path is None else resolve(str(path))
        draft = None if speculate in (None, "ngram") else resolve(str(speculate))
        self.tokenizer, self._no_tokenizer = load_tokenizer(self.path)
        self._room = _find_room(self.path, draft, backend, limits, dtype=dtype, device=self.device, **sizes)

        def load() -> Engine:
            self._threads = _set_threads(threads, self.device)
            model = load_model(self.path, dtype=dtype, device=self.device, head_dtype=head_dtype, backend=backend)
            _check_model_length(max_length, model)
            guesser = None if draft is None else load_model(draft, dtype=dtype, device=self.device)
            return make_engine(
                model,
                options=limits,
                draft=guesser,
                governor=governor,
                tokenizer=self.tokenizer,
                prefix_cache=prefix_cache,
                identity=str(self.path),
                seed=seed,
                **sizes,
            )

        self._load, self._engine = load, None if lazy else load()
        self._inboxes: dict[int, deque[StepOutput]] = {}

    @property
    def engine(self) -> Engine:
        """What computes; its weights are read now if they have not been."""
        if self._engine is None:
            self._engine = self._load()
        return self._engine

    @property
    def model(self) -> Model:
        """What is run."""
        return self.engine.model

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with what the tokenizer puts in front; an empty text becomes BOS.

        Raises:
            RequestError: the directory has no usable tokenizer, the text is not Unicode, or it is empty and there is
                no BOS.
        """
        tokenizer = self._need_tokenizer()
        # Not verbose: that a prompt is too long is for the engine to say.
        ids: list[int] = list(tokenizer(checked_text(text), verbose=False)["input_ids"])
        if ids:
            return ids
        if tokenizer.bos_token_id is None:
            raise RequestError("the prompt is empty and the tokenizer has no BOS token to begin with; give some text")
        return [tokenizer.bos_token_id]

    def encode_chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for the answer.

        Args:
            messages: [{"role": "user", "content": "..."}, ...].
        Raises:
            RequestError: there is no chat template, or it refuses the messages.
        """
        tokenizer = self._need_tokenizer()
        if not getattr(tokenizer, "chat_template", None):
            raise RequestError(f"{self.path} has no chat template; it is not a chat model: give a plain prompt")
        try:
            text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates are programs and fail in ways of their own
            raise RequestError(f"the chat template refuses these messages: {first_line(error)}") from error
        return list(tokenizer(checked_text(text), add_special_tokens=False, verbose=False)["input_ids"])

    def generate(
        self, prompts: Prompt | Many[Prompt], params: SamplingParams | Many[SamplingParams] | None = None
    ) -> list[Completion]:
        """Continue prompts, computed together.

        Args:
            prompts: a text, token ids, or several of either.
            params: for all, or one per prompt; None = greedy, 128 tokens.
        Returns:
            one completion per prompt, in order.
        Raises:
            RequestError: see `Engine.add`; nothing is computed then.
        """
        asked = [self._ids(prompt) for prompt in several(prompts)]
        each = [params or SamplingParams()] * len(asked) if not isinstance(params, Many) else list(params)
        if len(each) != len(asked):
            raise RequestError(f"{len(asked)} prompts with {len(each)} sampling parameters; give one for all or each")
        numbers: list[int] = []
        try:
            for ids, wish in zip(asked, each, strict=True):
                numbers.append(self._add(ids, wish))
            return [self._finish(number) for number in numbers]
        finally:
            self._drop(numbers)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StepOutput]:
        """Continue one prompt, piece by piece; the last piece has the completion. Closing it early cancels.

        Raises:
            RequestError: see `Engine.add`; raised here, not at the first piece.
        """
        stream = self._stream(self._add(self._ids(prompt), params or SamplingParams()))
        next(stream)  # begun: closing a generator that was never begun would cancel nothing
        return stream

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> Completion:
        """The answer to a conversation; see `encode_chat`."""
        return self.generate([self.encode_chat(messages)], params)[0]

    def score(self, sequences: Many[Many[int]], chunk_size: int | None = None) -> list[Tensor]:
        """Logits (T, V) float32 after every token, through the cache; see `runtime.scoring`."""
        return scoring.score(self.engine, sequences, chunk_size)

    @property
    def kv_type(self) -> str:
        """Number type of the cache: as asked for, or what the checkpoint says where that was `auto`."""
        cache = self.engine.runner.cache
        return self.kv_cache if cache is None else cache_type(cache.layouts, self.kv_cache)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values that one token takes, all layers; 0 when the model keeps its own."""
        cache = self.engine.runner.cache
        return 0.0 if cache is None else page_bytes(cache.layouts) / cache.page_size

    def stats(self) -> dict[str, Any]:
        """Sizes, and counts since the start."""
        engine, governor, cache = self.engine, self.engine.governor, self.engine.runner.cache
        return {
            "weight_bytes": self.model.num_bytes,
            "kv_bytes": 0 if cache is None else cache.num_bytes + cache.tail_bytes,
            "kv_tokens": engine.pool.num_pages * engine.options.page_size,
            "kv_pages": engine.pool.num_pages,
            "kv_free_pages": engine.pool.num_free,
            "kv_cache": self.kv_type,
            "prefix_hit_tokens": engine.prefix.num_hit_tokens,
            "prefix_asked_tokens": engine.prefix.num_asked_tokens,
            "preemptions": engine.scheduler.num_preemptions,
            "drafted_tokens": 0 if governor is None else governor.num_drafted,
            "accepted_tokens": 0 if governor is None else governor.num_accepted,
            "acceptance": None if governor is None else governor.acceptance,
        }

    def describe(self) -> dict[str, str]:
        """What a user should know about how it runs, by topic."""
        counts = self.stats()
        found = {"computed in": f"{str(self.model.dtype).removeprefix('torch.')} on {self.device}"}
        if self.device.type == "cpu":
            found["CPU kernels"] = cpu.status()
        if self._threads:
            found["threads"] = self._threads
        if (captured := self.engine.runner.graph_status) is not None:
            found["CUDA graphs"] = captured
        if counts["prefix_hit_tokens"]:
            found["prefix cache"] = f"{counts['prefix_hit_tokens']} of {counts['prefix_asked_tokens']} prompt tokens"
        if counts["preemptions"]:
            found["preemptions"] = str(counts["preemptions"])
        if self.engine.governor is not None:
            share = counts["acceptance"]
            found["speculation"] = "not used" if share is None else f"{share:.0%} of {counts['drafted_tokens']} drafts"
        if self.model.notes:
            found["notes"] = "; ".join(self.model.notes)
        return found

    def _ids(self, prompt: Prompt) -> list[int]:
        return self.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _add(self, ids: list[int], params: SamplingParams) -> int:
        if self._room is not None:
            self._room.check(len(ids), params.max_tokens)
        number = self.engine.add(ids, params)
        self._inboxes[number] = deque()
        return number

    def _next(self, number: int) -> StepOutput:
        """The next news of a request; that of others is kept for them."""
        inbox = self._inboxes[number]
        while not inbox:
            assert self.engine.has_work, f"request {number} is lost"
            for output in self.engine.step():
                if output.request_id in self._inboxes:
                    self._inboxes[output.request_id].append(output)
        return inbox.popleft()

    def _finish(self, number: int) -> Completion:
        while True:
            completion = self._next(number).completion
            if completion is not None:
                return completion

    def _stream(self, number: int) -> Iterator[StepOutput]:
        """News of a request, after one that is empty."""
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
        for number in numbers:
            self.engine.cancel(number)
            self._inboxes.pop(number, None)

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise RequestError(f"{self.path} has no usable tokenizer ({self._no_tokenizer}); give token ids")
        return self.tokenizer


def _set_threads(threads: int | None, device: torch.device) -> str:
    """Set the number of threads; what it is and why, for `describe`."""
    if device.type != "cpu" and threads is None:
        return ""
    choice = find_threads(threads)
    torch.set_num_threads(choice.threads)
    return f"{choice.threads} ({choice.reason})"


def _find_room(path: Path, draft: Path | None, backend: str, limits: SchedulerOptions, **settings: Any) -> Room | None:
    """Settings checked, and tokens that fit, before the weights are read; None where only loading can tell."""
    kv_scheme(settings["kv_cache"])  # refuses an unknown name
    check_settings(
        max_length=settings["max_length"],
        num_pages=settings["num_pages"],
        page_size=limits.page_size,
        max_sequences=limits.max_sequences,
        token_budget=limits.token_budget,
    )
    if backend == "transformers":
        return None
    return find_room(path, draft, page_size=limits.page_size, max_sequences=limits.max_sequences, **settings)


def _check_model_length(max_length: int | None, model: Model) -> None:
    if max_length is not None and max_length > model.max_length:
        raise RequestError(f"max_length is {max_length}, but the model's context is {model.max_length} tokens")
