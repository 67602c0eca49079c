"""Runs a model on what is scheduled: as a captured graph where it can be, else launch by launch."""

import os
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine.batch_builder import BatchBuilder, ScheduledChunk
from quantkit.runtime.engine.decode_graphs import DecodeGraphs, why_not
from quantkit.runtime.model.model import Model, NativeModel


class Runner:
    """A model, its cache, and the buffers of its batches.

    On a CUDA device decode steps are captured as graphs if they can be; `QUANTKIT_CUDA_GRAPHS=0` switches that off.

    Args:
        model: to run.
        cache: its keys and values; None when the model keeps its own.
        config: settings of the engine.
        max_pages: of one sequence.
        max_length: tokens of its text; None = as many as its pages hold.
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
        self._builder = BatchBuilder(max_sequences=rows, max_pages=max_pages, page_size=size, device=model.device)
        self._graphs: DecodeGraphs | None = None
        self._no_graphs: str | None = None
        if model.device.type != "cuda" or not isinstance(model, NativeModel) or cache is None:
            return
        off = os.environ.get("QUANTKIT_CUDA_GRAPHS", "1") == "0"
        length = max_length or max_pages * size
        self._no_graphs = "QUANTKIT_CUDA_GRAPHS=0" if off else why_not(model, cache, length)
        if self._no_graphs is None:
            self._graphs = DecodeGraphs(
                model, cache, self._builder, max_sequences=rows, max_pages=max_pages, max_length=length
            )

    @property
    def graph_status(self) -> str | None:
        """Whether decode steps are CUDA graphs, for users; None where that is no question."""
        if self._graphs is None:
            return None if self._no_graphs is None else f"no: {self._no_graphs}"
        return "yes" if self._graphs.failure is None else f"no: {self._graphs.failure}"

    def step(self, chunks: Sequence[ScheduledChunk], tokens: Tensor | None = None) -> Tensor:
        """Logits, the rows of each chunk in order. For callers in inference mode.

        Args:
            chunks: of the batch.
            tokens: (T,) int64 on the device, the new tokens if the host does not know them yet; None = in the chunks.
        Returns:
            logits, valid until the next call.
        """
        if self._graphs is not None:
            logits = self._graphs.run(chunks, tokens)
            if logits is not None:
                return logits
        batch = self._builder.build(chunks)
        if tokens is not None:
            batch = replace(batch, token_ids=tokens)
        return self.model.forward(batch, self.cache)
