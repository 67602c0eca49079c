"""Store the hidden states that enter the current decoder layer, in memory or on disk, and save them after each layer.

States are stored in batches (B, T, D) of samples of equal length, or sample by sample together with the other tensors
that layers exchange (see `layer_call`). In memory mode they are also written to the state folder once per layer, so
that an interrupted run can resume. In disk mode they are only on disk. The processes of a job take batches in turns and
write them to one shared folder. So each process can read all batches, and a later job can resume with any number of
processes.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load
from torch import Tensor

from quantkit.checkpoints.header import read_header
from quantkit.checkpoints.reader import file_digest
from quantkit.distributed import gather, rank, world
from quantkit.errors import CheckpointError, ResumeError
from quantkit.huggingface.layer_call import Batch, LayerCall, states_of
from quantkit.output.writer import write_shard

Mode = Literal["ram", "disk"]


class ActivationStore:
    """Inputs (hidden states) of one layer; `advance` replaces them by the inputs of the next layer.

    Args:
        folder: folder in which states are saved, with one sub-folder per layer. None = save nothing (memory mode only).
        mode: "ram" or "disk".
        batches: inputs of the first layer, e.g. states (B, T, D); consumed one by one while they are stored.
    """

    def __init__(self, folder: Path | None, mode: Mode, batches: Iterator[Batch]) -> None:
        self._folder, self._mode, self._layer = folder, mode, 0
        self._memory: dict[int, Batch] = {}
        self.digests: list[str] = []
        own = ((number, batch) for number, batch in enumerate(batches) if number % world() == rank())
        self._keep(own, "the embedding", 0)

    @classmethod
    def restore(cls, folder: Path, mode: Mode, layer: int, digests: list[str]) -> "ActivationStore":
        """Open the states that an interrupted run saved as the inputs of the layer with number `layer`.

        Raises:
            ResumeError: a file is missing or has changed since it was written.
        """
        store = cls(folder, mode, iter(()))
        store._layer, store.digests = layer, digests
        for number in store.own:
            check_saved(store._path(layer, number), digests[number])
            if mode == "ram":
                store._memory[number] = store._load(number)
        return store

    @property
    def in_memory(self) -> bool:
        """Whether states are kept in memory instead of being read from disk each time."""
        return self._mode == "ram"

    @property
    def beside(self) -> Path | None:
        """Folder for data that is computed from the states and kept until the next layer; None = no data on disk."""
        return None if self._folder is None else self._folder / "beside"

    @property
    def own(self) -> range:
        """Indices of the batches that this process handles."""
        return range(rank(), len(self), world())

    def __len__(self) -> int:
        return len(self.digests) if self._folder is not None else len(self._memory)

    def __getitem__(self, number: int) -> Batch:
        return self._memory[number] if number in self._memory else self._load(number)

    def __iter__(self) -> Iterator[Batch]:
        return (self[number] for number in range(len(self)))

    def advance(self, forward: Callable[[int, Batch], Batch]) -> None:
        """Replace every batch by `forward(number, batch)`; the previous layer's files stay until `forget_previous`."""
        # Outputs go back to the CPU, so that the device holds one batch at a time.
        batches = ((number, forward(number, self[number]).to("cpu")) for number in self.own)
        self._keep(batches, f"layer {self._layer}", self._layer + 1)

    def forget_previous(self) -> None:
        """Delete the previous layer's files and the folder `beside`; call this after progress has been recorded."""
        for folder in (self._folder / str(self._layer - 1), self._folder / "beside") if self._folder else ():
            shutil.rmtree(folder, ignore_errors=True)

    def _keep(self, batches: Iterator[tuple[int, Batch]], source: str, layer: int) -> None:
        """Store the inputs of a layer, batch by batch. In memory, each batch replaces that of the previous layer."""
        digests: dict[int, str] = {}
        writing: dict[int, Future[str]] = {}  # at most one, because it keeps its batch in memory
        with ThreadPoolExecutor(1) as disk:  # a batch is flushed to the disk while the next one is computed
            for number, states in batches:
                require_finite(states_of(states), source)
                if self._mode == "ram":
                    self._memory[number] = states
                digests |= {earlier: written.result() for earlier, written in writing.items()}
                if self._folder is not None:
                    path = self._path(layer, number)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    tensors = {"hidden": states} if isinstance(states, Tensor) else states.tensors()
                    writing = {number: disk.submit(write_shard, path, tensors)}
            digests |= {last: written.result() for last, written in writing.items()}
        # After `gather`, the files of all processes exist.
        known = {number: digest for part in gather(digests) for number, digest in part.items()}
        self._layer, self.digests = layer, [known[number] for number in sorted(known)]

    def _load(self, number: int) -> Batch:
        saved: dict[str, Tensor] = load(self._path(self._layer, number).read_bytes())
        return saved["hidden"] if len(saved) == 1 else LayerCall.of_tensors(saved)

    def _path(self, layer: int, number: int) -> Path:
        assert self._folder is not None, "disk mode needs a folder"
        return self._folder / str(layer) / f"{number:05d}.safetensors"


def check_saved(path: Path, digest: str) -> None:
    """Raise ResumeError if a file of an interrupted run is missing or has changed since it was written."""
    with contextlib.suppress(CheckpointError):
        read_header(path)  # checks the size first, because a digest of a file that has grown could take very long
        if file_digest(path) == digest:
            return
    state = "has changed since it was written" if path.exists() else "is missing"
    raise ResumeError(f"{path} {state}; start over with --no-resume")


def require_finite(states: Tensor, source: str) -> Tensor:
    """Return hidden states after checking that all are finite.

    Args:
        states: hidden states of any shape.
        source: the part of the model that computed them, for the message.
    Raises:
        CheckpointError: a value is NaN or infinite.
    """
    # aminmax propagates NaN, and takes a twentieth of the time of `isfinite` of every number.
    if states.numel() and not all(torch.isfinite(end) for end in torch.aminmax(states)):
        raise CheckpointError(
            f"hidden states after {source} are not finite: the model's weights are broken, or float16 has overflowed"
        )
    return states
