"""Read single tensors of a checkpoint from disk.

Files are not memory-mapped: the pages of an open mapped file count as resident memory, and a run must hold only one
layer in memory. Every call opens the file, reads bytes into new memory, and closes the file.
"""

import copy
import hashlib
import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoints.encoded_weight import BlocksInfo, EncodedInfo
from quantkit.checkpoints.folder import CONFIG_NAME, check_folder, find_tensors, gguf_model, read_config_file
from quantkit.checkpoints.header import TensorInfo, checked_dtypes, read_header
from quantkit.errors import CheckpointError, suggestion
from quantkit.formats import is_gguf
from quantkit.machine.system import available_cores
from quantkit.numerics.scheme import LinearScheme
from quantkit.safety.untrusted import CHUNK_BYTES, file_stamp, opened, read_chunks

if sys.byteorder != "little":
    raise ImportError("quantkit.checkpoints needs a little-endian machine: safetensors stores little-endian numbers")


class CheckpointReader:
    """Reader of the tensors and files of one model directory, or of a GGUF file, which it presents as a directory.

    A worked example, for a (5, 2) tensor "w":

        reader.tensor("w")                              all of it, (5, 2)
        reader.rows("w", 1, 3)                          rows 1 and 2, (2, 2)
        reader.gather_rows("w", torch.tensor([4, 4]))   row 4 twice, (2, 2)

    Args:
        path: directory with config.json and safetensors files, or a GGUF file.
    Raises:
        ModelError: the directory does not exist, or has no valid config.json or no safetensors weights.
        CheckpointError: a weight file or the index is missing, truncated or inconsistent.
    Attributes:
        notes: remarks for the user, one sentence each.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, path: Path | str) -> None:
        self.path: Path = check_folder(Path(path))
        self.config: dict[str, Any] = read_config_file(self.path)
        tensors, self.files, self._index = find_tensors(self.path)
        self._tensors = dict(checked_dtypes(tensors))
        self.names: tuple[str, ...] = tuple(sorted(self._tensors))
        if is_gguf(self.path) and (note := gguf_model(self.path).note):
            self.notes = (note,)
        self._stamps = {path: file_stamp(path) for path in self._sources()}
        self._digests: dict[str, str] = {}  # shared with views

    def _share(self, reader: "CheckpointReader") -> None:
        """Take over all attributes of another reader, so that its headers need not be read and checked again."""
        self.__dict__ |= reader.__dict__

    @classmethod
    def of_file(cls, file: Path) -> "CheckpointReader":
        """Return a reader of one safetensors file of a checkpoint."""
        reader = cls.__new__(cls)
        reader.path, reader.config, reader.files = file.parent, {}, (file,)
        reader._index, reader._stamps, reader._digests = None, {}, {}
        reader._tensors = read_header(file)
        reader.names = tuple(sorted(reader._tensors))
        return reader

    def view(self, tensors: Mapping[str, TensorInfo], config: dict[str, Any], note: str) -> "CheckpointReader":
        """Return a reader that presents the same files as if they held a different model.

        Args:
            tensors: descriptions of that model's tensors, which refer to the same files, keyed by name.
            config: contents of that model's config.json.
            note: remark for the user, which the view adds to its `notes`.
        """
        view = copy.copy(self)
        view._tensors, view.names, view.config = dict(tensors), tuple(sorted(tensors)), config
        view.notes = (*self.notes, note)
        return view

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(info.num_bytes for info in self._tensors.values())

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape and position of a tensor.

        Raises:
            CheckpointError: there is no such tensor; the message suggests the most similar name.
        """
        if name not in self._tensors:
            raise CheckpointError(
                f"{self.path} has no tensor {name!r}{suggestion(name, self.names)}; see `reader.names`"
            )
        return self._tensors[name]

    def stored_scheme(self, name: str) -> LinearScheme | None:
        """Return the scheme of a weight's codes; None if the weight is not quantized or its codes cannot be read."""
        info = self._tensors.get(name)
        return info.scheme if isinstance(info, EncodedInfo) else None

    def check_shape(self, name: str, shape: tuple[int, ...], *, required: bool = True) -> None:
        """Check that a tensor has the shape that follows from config.json, and that it exists if required.

        Raises:
            CheckpointError: the tensor is missing or has a different shape.
        """
        if name in self._tensors and (stored := self._tensors[name].shape) != shape:
            raise CheckpointError(
                f"{self.path}: tensor {name} has shape {stored}, but config.json says {shape}; download the checkpoint "
                "again, with its config.json"
            )
        if required and name not in self._tensors:
            raise CheckpointError(
                f"{self.path}: tensor {name} {shape} is missing; download the checkpoint again, with its config.json"
            )

    def tensor(self, name: str) -> Tensor:
        """Read a tensor into new memory.

        Raises:
            CheckpointError: there is no such tensor, or its file cannot be read.
        """
        return self._read_tensor(self.info(name))

    def _read_tensor(self, info: TensorInfo) -> Tensor:
        if isinstance(info, EncodedInfo):
            return info.values(self._read_tensor)
        with opened(info.file) as file:
            return _read(file, info, 0, info.num_bytes).view(info.dtype).view(info.shape)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows [start, stop) of the first dimension, and only the bytes of these rows.

        A quantized weight in a format other than GGUF is read and dequantized whole.

        Args:
            name: name of a tensor (N, ...).
            start, stop: 0 <= start <= stop <= N.
        Returns:
            (stop - start, ...) in new memory.
        Raises:
            CheckpointError: there is no such tensor or rows, or the file cannot be read.
        """
        info = self.info(name)
        if not info.shape or not 0 <= start <= stop <= info.shape[0]:
            raise _no_such_rows(name, info, start, stop - 1)
        if isinstance(info, EncodedInfo):
            return self._gather(info, torch.arange(start, stop))
        width = _row_bytes(info)
        with opened(info.file) as file:
            data = _read(file, info, start * width, (stop - start) * width)
        return data.view(info.dtype).view(stop - start, *info.shape[1:])

    def gather_rows(self, name: str, indices: Tensor) -> Tensor:
        """Read rows by index, e.g. the embeddings of some tokens, and only the bytes of these rows, in file order.

        Besides the result, this needs a few MiB of memory and a few bytes per index. A quantized weight in a format
        other than GGUF is read and dequantized whole.

        Args:
            name: name of a tensor (N, ...).
            indices: whole numbers in [0, N), any shape; may repeat.
        Returns:
            (*indices.shape, ...) in new memory.
        Raises:
            CheckpointError: there is no such tensor or row, or the file cannot be read.
        """
        info = self.info(name)
        rows = indices.detach().reshape(-1).to("cpu", torch.int64)
        if rows.numel() and not (info.shape and int(rows.min()) >= 0 and int(rows.max()) < info.shape[0]):
            raise _no_such_rows(name, info, int(rows.min()), int(rows.max()))
        return self._gather(info, rows).view(*indices.shape, *info.shape[1:])

    def _gather(self, info: TensorInfo, rows: Tensor) -> Tensor:
        """Return the rows of a tensor at the given row indices.

        Args:
            info: description of the tensor (N, ...).
            rows: (T,) int64.
        Returns:
            (T, ...) in new memory.
        """
        if isinstance(info, BlocksInfo) and not info.transposed:
            return info.dequantize(self._gather(info.stored, info.order(rows)))
        if isinstance(info, EncodedInfo):
            return self._read_tensor(info)[rows]
        width = _row_bytes(info)
        # As bytes: torch cannot index every 8-bit float type.
        result = torch.empty(len(rows), width, dtype=torch.uint8)
        limit = max(1, CHUNK_BYTES // max(1, width))
        with opened(info.file) as file:
            for first, last, positions in _runs(rows, limit):
                block = _read(file, info, first * width, (last - first) * width).view(last - first, width)
                result[positions] = block[rows[positions] - first]
        return result.view(-1).view(info.dtype).view(len(rows), *info.shape[1:])

    def chunks(self, name: str, size: int = CHUNK_BYTES) -> Iterator[bytes | memoryview]:
        """Yield the bytes of a tensor as stored, at most `size` at a time; of a quantized weight, those of its values.

        Raises:
            CheckpointError: there is no such tensor, or its file cannot be read.
        """
        info = self.info(name)
        if isinstance(info, EncodedInfo):
            return value_chunks(self._read_tensor(info), size)
        return read_chunks(info.file, info.offset, info.num_bytes, size)

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of all files that determine a compression (config, index, weights, tokenizer), keyed by file name.

        The first access computes them, several files in parallel; later accesses use the cached result.

        Raises:
            CheckpointError: a file cannot be read.
        """
        if not self._digests:
            paths = self._sources()
            with ThreadPoolExecutor(available_cores()) as pool:
                self._digests |= zip((path.name for path in paths), pool.map(file_digest, paths), strict=True)
        return self._digests

    def _sources(self) -> list[Path]:
        names = (self.path / CONFIG_NAME, self.path / "tokenizer.json", self._index, *self.files)
        return sorted(path for path in names if path is not None and path.is_file())

    def check_unchanged(self) -> None:
        """Check that no file has changed since this reader was created; otherwise tensors may be from two models.

        Raises:
            CheckpointError: a file has changed; the message names it.
        """
        for path, stamp in self._stamps.items():
            if file_stamp(path) != stamp:
                raise CheckpointError(
                    f"{path} changed while it was read; run the command again (if it was `quantize`, add --no-resume)"
                )


def value_chunks(value: Tensor, size: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in memory, at most `size` at a time."""
    # Flattened first: a single number has no last dimension to view as bytes.
    data = value.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data
    for start in range(0, len(data), size):
        yield data[start : start + size]


def _no_such_rows(name: str, info: TensorInfo, first: int, last: int) -> CheckpointError:
    count = info.shape[0] if info.shape else "no"
    return CheckpointError(f"tensor {name!r} has {count} rows; rows {first} to {last} were requested")


def _row_bytes(info: TensorInfo) -> int:
    return math.prod(info.shape[1:]) * info.dtype.itemsize


def _runs(asked: Tensor, limit: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield runs of consecutive rows among `asked`, in ascending order, with at most `limit` positions each.

    For asked = [7, 3, 8, 3] and a large limit: (3, 4, [1, 3]) and (7, 9, [0, 2]).

    Args:
        asked: (T,) int64 row indices.
        limit: maximum number of positions, > 0.
    Yields:
        first, last: rows [first, last) to read.
        positions: the positions in `asked` that request these rows.
    """
    order = torch.argsort(asked, stable=True)
    rows = asked[order]
    # A step of more than one row starts a new run.
    breaks = (rows.diff() > 1).nonzero().view(-1) + 1
    for start, stop in itertools.pairwise([0, *breaks.tolist(), len(rows)]):
        for begin in range(start, stop, limit):
            end = min(begin + limit, stop)
            yield int(rows[begin]), int(rows[end - 1]) + 1, order[begin:end]


def _read(file: BufferedReader, info: TensorInfo, start: int, num_bytes: int) -> Tensor:
    """Read bytes [start, start + num_bytes) of a tensor as uint8."""
    data = torch.empty(num_bytes, dtype=torch.uint8)
    file.seek(info.offset + start)
    # Read into the tensor's memory: `read` would return a second copy.
    done = file.readinto(data.numpy().data)
    if done < num_bytes:
        raise CheckpointError(
            f"{info.file} ended {num_bytes - done} bytes early: it changed while it was read; run the command again"
        )
    return data


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal.

    Raises:
        CheckpointError: the file cannot be read.
    """
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
