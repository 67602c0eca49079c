"""Execution of scheduled steps: as a captured CUDA graph or one native call if possible, otherwise kernel by kernel.

`decode_program` makes the native call on CPUs; this module makes the graphs. There is one graph for each pair of batch
size and pages per sequence, captured at first use. A decode step of a large model has several hundred kernels of a few
microseconds each, more than the host can launch in time; a graph is a single launch. The host writes all inputs of a
step into one buffer and copies it to a fixed device address, so captured launches stay valid. Batches are padded to the
next size with empty sequences: kernels skip them, and their slots of -1 store nothing. Batches with prompts or drafts
run kernel by kernel. `NativeModel.compute` defines what a step computes.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import first_line
from quantkit.kernels import gpu
from quantkit.kernels.transfer import aligned
from quantkit.kernels.types import ForwardBatch
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine.batch_builder import BatchBuilder, ScheduledChunk, is_decode_step, table_width
from quantkit.runtime.engine.decode_program import DecodeProgram, Unsupported
from quantkit.runtime.model.model import Model, NativeModel


class Runner:
    """Computes the steps of a model on its cache.

    On a CUDA device, decode steps are captured as graphs where possible; `QUANTKIT_CUDA_GRAPHS=0` disables this, and
    `QUANTKIT_CUDA_GRAPHS=experts` also captures mixtures of experts. On a CPU, decode steps run as one native call
    where possible; `QUANTKIT_DECODE_PROGRAM=0` disables this.

    Args:
        model: model to run.
        cache: KV cache; None if the model keeps its own keys and values.
        config: settings of the engine.
        max_pages: maximum number of pages of one sequence.
        max_length: maximum number of tokens of one sequence; None = as many as `max_pages` hold.
    Attributes:
        builder: builds the batches.
        hidden: hidden states (T, H) of all rows of the last step, after the final norm, valid until the next step; None
            if the model has no MTP head that reads them.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache | None,
        config: EngineConfig,
        *,
        max_pages: int,
        max_length: int | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        rows, size = config.max_sequences, config.page_size
        self.hidden: Tensor | None = None
        self.builder = BatchBuilder(max_sequences=rows, max_pages=max_pages, page_size=size, device=model.device)
        self._graphs: DecodeGraphs | None = None
        self._no_graphs: str | None = None
        self._program: DecodeProgram | None = None
        self._no_program: str | None = None
        if model.device.type == "cpu" and isinstance(model, NativeModel) and cache is not None:
            self._record(model, cache)
        if model.device.type != "cuda" or not isinstance(model, NativeModel) or cache is None:
            return
        off = os.environ.get("QUANTKIT_CUDA_GRAPHS", "1") == "0"
        length = max_length or max_pages * size
        self._no_graphs = "QUANTKIT_CUDA_GRAPHS=0" if off else why_not(model, cache, length)
        if self._no_graphs is None:
            self._graphs = DecodeGraphs(
                model, cache, self.builder, max_sequences=rows, max_pages=max_pages, max_length=length
            )

    def _record(self, model: NativeModel, cache: KVCache) -> None:
        if os.environ.get("QUANTKIT_DECODE_PROGRAM", "1") == "0":
            self._no_program = "QUANTKIT_DECODE_PROGRAM=0"
            return
        try:
            self._program = DecodeProgram(model, cache, self.builder, max_sequences=cache.max_sequences)
        except Unsupported as error:
            self._no_program = str(error)

    @property
    def program_status(self) -> str | None:
        """Describe for users whether decode steps run as one native call; None on a GPU or in transformers."""
        if self._program is not None:
            mixed = len(self.model.adapters.by_name) > 0
            return "one native call" + "; layer by layer where requests of a step have different adapters" * mixed
        return None if self._no_program is None else f"layer by layer: {self._no_program}"

    @property
    def graph_status(self) -> str | None:
        """Describe for users whether decode steps run as CUDA graphs; None on a CPU or in transformers."""
        if self._graphs is None:
            return None if self._no_graphs is None else f"no: {self._no_graphs}"
        if self._graphs.failure is not None:
            return f"no: {self._graphs.failure}"
        return "yes" + "; not if a request of the step has an adapter" * (len(self.model.adapters.by_name) > 0)

    @contextmanager
    def layer_by_layer(self) -> Iterator[None]:
        """Run every step layer by layer inside the block.

        Use this while parts of the model are replaced: graphs and programs would still run the parts that they
        recorded.
        """
        kept = self._graphs, self._program
        self._graphs = self._program = None
        try:
            yield
        finally:
            self._graphs, self._program = kept

    def step(self, chunks: Sequence[ScheduledChunk], tokens: Tensor | None = None) -> Tensor:
        """Return the logits, chunk by chunk. Call this in inference mode.

        Args:
            chunks: chunks of the batch.
            tokens: (T,) int64 on the device, the new tokens if the host does not know them yet; None = use the chunks'
                tokens.
        Returns:
            Logits, valid until the next call.
        """
        fixed = self._graphs or self._program
        if self._graphs is not None and any(chunk.holder.adapter is not None for chunk in chunks):
            fixed = None  # graphs hold the base model alone
        if fixed is not None and (logits := fixed.run(chunks, tokens)) is not None:
            self.hidden = None if fixed.hidden is None else fixed.hidden[: len(logits)]
            return logits
        batch = self.builder.build(chunks)
        if tokens is not None:
            batch = replace(batch, token_ids=tokens)
        if not isinstance(self.model, NativeModel):
            return self.model.forward(batch, self.cache)
        logits, self.hidden = self.model.compute(batch, self.cache)
        return logits


# Smallest number of pages per sequence in a graph: smaller numbers would only add more graphs.
_LEAST_PAGES = 16
_ROWS = 5  # how many int64 numbers a step's inputs hold for each sequence

Outputs = tuple[Tensor, Tensor | None]  # of `NativeModel.compute`
Capture = Callable[[Callable[[], Outputs]], Callable[[], Outputs]]


def why_not(model: NativeModel, cache: KVCache, max_length: int) -> str | None:
    """Return why a model's decode steps cannot be captured as CUDA graphs, in words for users; None if they can.

    Args:
        model: model to run.
        cache: KV cache.
        max_length: maximum number of tokens of one sequence.
    """
    if not cache.is_capturable:
        return "torch computes attention over this KV cache, one sequence after another"
    reason = model.why_not_capturable(max_length)
    if reason is None and model.config.experts is not None and os.environ.get("QUANTKIT_CUDA_GRAPHS") != "experts":
        return "graphs of mixtures of experts are not tested on a GPU yet; QUANTKIT_CUDA_GRAPHS=experts turns them on"
    return reason


class DecodeGraphs:
    """Runs decode steps of a model as CUDA graphs, which it captures at first use.

    Args:
        model: model to run.
        cache: KV cache.
        builder: builder that holds the page table.
        max_sequences: maximum number of sequences in one batch.
        max_pages: maximum number of pages of one sequence.
        max_length: maximum number of tokens of one sequence, including evicted ones; None = as many as `max_pages`
            hold.
        capture: takes a function that runs a step, and returns a function that repeats this step; None = capture a CUDA
            graph.
    Attributes:
        hidden: hidden states of the last step, followed by unused rows; see `NativeModel.compute`.
    """

    def __init__(
        self,
        model: NativeModel,
        cache: KVCache,
        builder: BatchBuilder,
        *,
        max_sequences: int,
        max_pages: int,
        max_length: int | None = None,
        capture: Capture | None = None,
    ) -> None:
        self._model, self._cache, self._builder = model, cache, builder
        self._max_sequences, self._max_pages = max_sequences, max_pages
        self._max_length = max_length or max_pages * cache.page_size
        self._capture = capture or _CudaCapture(model.device)
        self._steps: dict[tuple[int, int], tuple[_Inputs, Callable[[], Outputs]]] = {}  # inputs, and what replays
        # Triton's own errors are not RuntimeErrors. After an error of either kind, decode steps run without graphs.
        self._refusals: tuple[type[Exception], ...] = (RuntimeError, *gpu.refusals())
        self.failure: str | None = None
        self.hidden: Tensor | None = None
        # Graphs keep the addresses of the rotary tables, which therefore must not grow once a graph is captured.
        model.reserve(self._max_length)

    def run(self, chunks: Sequence[ScheduledChunk], tokens: Tensor | None = None) -> Tensor | None:
        """Return the logits of a decode step without waiting for the device.

        Args:
            chunks: one new token each, with logits.
            tokens: (len(chunks),) int64, the input tokens if the host does not know them yet; None = use the chunks'
                tokens.
        Returns:
            Logits of each chunk, valid until the next call; None if this is not a decode step or capturing failed (see
            `failure`).
        """
        if self.failure is not None or not is_decode_step(chunks):
            return None
        count, size = len(chunks), self._cache.page_size
        longest = max(chunk.start - chunk.holder.num_evicted for chunk in chunks) // size + 1
        # Powers of two: every shape costs a capture and stays in memory, and less than half of a batch is filler.
        shape = (_bucket(count, 1, self._max_sequences), _bucket(longest, _LEAST_PAGES, self._max_pages))
        try:
            inputs, replay = self._steps.get(shape) or self._steps.setdefault(shape, self._captured(*shape))
        except self._refusals as error:
            self.failure = first_line(error)
            return None
        inputs.write(chunks, self._builder.table_of(chunks, min(longest, shape[1])), size)
        inputs.send()
        if tokens is not None:
            # After the copy from the host, which writes placeholders for tokens that only the device knows.
            inputs.batch.token_ids[:count].copy_(tokens)
        logits, self.hidden = replay()
        return logits[:count]

    def _captured(self, sequences: int, pages: int) -> tuple["_Inputs", Callable[[], Outputs]]:
        inputs = _Inputs(sequences, pages, self._cache.page_size, self._max_length, self._model.device)
        inputs.write((), np.zeros((0, 0), dtype=np.int32), self._cache.page_size)  # empty: trial runs store nothing
        inputs.send()
        return inputs, self._capture(lambda: self._model.compute(inputs.batch, self._cache))


class _Inputs:
    """A decode batch at fixed device addresses, and the host memory that fills it with one copy.

    Two host buffers alternate: the copy from the previous step's buffer may still be running.

    Args:
        sequences: B, sequences in the batch.
        pages: P, pages per sequence.
        page_size: tokens per page.
        max_length: maximum number of tokens of one sequence.
        device: device of the model.
    """

    def __init__(self, sequences: int, pages: int, page_size: int, max_length: int, device: torch.device) -> None:
        self._sequences, self._width = sequences, table_width(pages)
        # Arrays begin at multiples of 16 bytes, as those of eager steps do, so the kernels are compiled already.
        self._starts_at = _ROWS * aligned(8 * sequences)
        self._table_at = self._starts_at + aligned(4 * (sequences + 1))
        num_bytes = self._table_at + 4 * sequences * self._width
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        on_gpu = device.type == "cuda"
        self._hosts = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
        self._arrays = [[part.numpy() for part in self._split(host)] for host in self._hosts]
        self._copied = [torch.cuda.Event() for _ in range(2)] if on_gpu else []  # type: ignore[no-untyped-call]
        self._turn = 0
        numbers, query_starts, page_table = self._split(self._device)
        token_ids, positions, slots, residual_rows, text_positions = numbers
        self.batch = ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            residual_rows=residual_rows,
            query_starts=query_starts,
            page_table=page_table,
            logit_rows=torch.arange(sequences, device=device),
            query_lengths=(1,) * sequences,
            # Upper bounds: what the host sees while capturing must hold for every step that the graph replays.
            context_lengths=(pages * page_size,) * sequences,
            sequence_ids=tuple(range(sequences)),
            text_positions=text_positions,
            text_lengths=(max_length,) * sequences,
            is_fixed=True,
        )

    def _split(self, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of one block of memory.

        Returns:
            Five numbers per sequence (5, B) int64, the start of each sequence's tokens (B + 1,) int32, and the page
            table (B, columns) int32.
        """
        count = self._sequences
        numbers = memory[: self._starts_at].view(torch.int64).view(_ROWS, -1)[:, :count]
        starts = memory[self._starts_at : self._table_at].view(torch.int32)[: count + 1]
        return numbers, starts, memory[self._table_at :].view(torch.int32).view(count, self._width)

    def write(self, chunks: Sequence[ScheduledChunk], table: np.ndarray[Any, Any], page_size: int) -> None:
        """Write a batch into the next host buffer.

        Args:
            chunks: at most B chunks of one token each.
            table: (len(chunks), at most P) int32, page numbers of each sequence.
            page_size: tokens per page.
        """
        self._turn ^= 1
        if self._copied:
            # The copy out of this memory was begun two steps ago and may still be waiting for the device.
            self._copied[self._turn].synchronize()
        numbers, starts, pages = self._arrays[self._turn]
        count = len(chunks)
        for index, (holder, tokens, start, _) in enumerate(chunks):
            kept = start - holder.num_evicted
            slot = holder.pages[kept // page_size] * page_size + kept % page_size
            numbers[:, index] = tokens[0], kept, slot, holder.row, start
        numbers[:, count:] = 0
        numbers[2, count:] = -1
        # Sequences beyond the batch start where it ends, so they have no token.
        starts[:] = np.minimum(np.arange(len(starts)), count)
        pages[:count, : table.shape[1]] = table

    def send(self) -> None:
        """Copy the last written batch to the device."""
        self._device.copy_(self._hosts[self._turn], non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()


class _CudaCapture:
    """Captures CUDA graphs that share one memory pool, since only one graph runs at a time.

    Warm-up and capture use a separate stream. Split-K and split-KV kernels use counters of their stream (`gpu.splits`);
    a captured graph needs counters that already exist and that nothing else uses.

    Args:
        device: device to capture on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, step: Callable[[], Outputs]) -> Callable[[], Outputs]:
        """Capture a step as a CUDA graph and return a function that replays it.

        The step runs twice before the capture, to compile its kernels.
        """
        current = torch.cuda.current_stream(self._device)
        side = self._stream = self._stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            # Kernels are compiled and loaded here; that may synchronize, which CUDA refuses during a capture.
            for _ in range(2):
                step()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=side):
            outputs = step()
        self._pool = self._pool or graph.pool()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay


def _bucket(count: int, least: int, most: int) -> int:
    """Return the smallest power of two that is at least `count` and `least`, limited to `most`."""
    return min(max(least, 1 << (count - 1).bit_length()), most)
