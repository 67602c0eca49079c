"""Write the files of a checkpoint, each one atomically; equal contents give equal bytes.

A file is written under a temporary name in the same folder, flushed to the disk, and renamed. Tensors are written in
chunks, one tensor at a time, so memory holds no second copy of a tensor. The caller decides the names of the tensors.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from quantkit.checkpoints.folder import INDEX_NAME
from quantkit.checkpoints.header import encode_header
from quantkit.checkpoints.reader import CheckpointReader, value_chunks
from quantkit.errors import OutputError, QuantkitError, ResourceError
from quantkit.machine.system import sync_folder
from quantkit.quantities import byte_size


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors to one safetensors file; an existing file is replaced.

    Args:
        path: path of the file; its folder must exist.
        tensors: tensors by name, on any device, contiguous or not; not modified.
    Returns:
        SHA-256 of the file, hexadecimal.
    Raises:
        ResourceError: the disk is full; the message says how much space is needed and free.
        OutputError: the file cannot be written.
        CheckpointError: safetensors cannot store the dtype of a tensor.
    """
    infos = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return _write_tensors(path, infos, lambda name: value_chunks(tensors[name]))


def copy_tensors(reader: CheckpointReader, names: Iterable[str], path: Path, stored: Callable[[str], str] = str) -> str:
    """Copy tensors from a checkpoint into one safetensors file, byte for byte, a few MiB at a time.

    Args:
        reader: reader of the source checkpoint.
        names: names of the tensors to copy, as in the source.
        path: path of the file; its folder must exist.
        stored: function that returns the name in the new file for a name in the source.
    Returns:
        SHA-256 of the file, hexadecimal.
    Raises:
        CheckpointError: the source cannot be read.
        ResourceError, OutputError: see `write_shard`.
    """
    sources = {stored(name): name for name in names}
    infos = {name: (reader.info(source).dtype, reader.info(source).shape) for name, source in sources.items()}
    return _write_tensors(path, infos, lambda name: reader.chunks(sources[name]))


def write_json(path: Path, value: Any) -> None:
    """Write JSON with an indent of two, keys in the given order, and a newline at the end.

    Args:
        path: path of the file; its folder must exist.
        value: a value that `json` can serialise.
    Raises:
        ResourceError, OutputError: see `write_shard`.
    """
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text.

    Args:
        path: path of the file; its folder must exist.
        text: contents of the file.
    Raises:
        ResourceError, OutputError: see `write_shard`.
    """
    content = text.encode()
    with _atomic(path, len(content)) as file:
        file.write(content)


def write_index(folder: Path, weight_map: Mapping[str, str], total_size: int) -> None:
    """Write model.safetensors.index.json, which says in which file each tensor is; tensors are sorted by name.

    Args:
        folder: folder of the checkpoint.
        weight_map: name of the file of each tensor, keyed by the name of the tensor.
        total_size: bytes of all tensors.
    Raises:
        ResourceError, OutputError: see `write_shard`.
    """
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / INDEX_NAME, index)


@contextlib.contextmanager
def writing(path: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn an OSError of the block into an error of quantkit with a one-line message.

    Args:
        path: path that the block writes.
        needed_bytes: final size of the file, if known.
    Raises:
        ResourceError: the disk or the quota is full.
        OutputError: any other OSError.
    """
    try:
        yield
    except OSError as error:
        raise _translated(error, path, needed_bytes) from error


def _translated(error: OSError, path: Path, needed_bytes: int | None) -> QuantkitError:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        reason = error.strerror or str(error)
        return OutputError(f"cannot write {path}: {reason}; choose another --output or change its folder's permissions")
    needed = "" if needed_bytes is None else f"it needs {byte_size(needed_bytes)}, and "
    limit = "the quota is used up" if error.errno == errno.EDQUOT else f"{byte_size(_free_bytes(path))} are free"
    return ResourceError(
        f"no space left while writing {path}: {needed}{limit}; "
        "delete files or choose another --output, then run the same command again to resume"
    )


def _write_tensors(
    path: Path,
    infos: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    chunks: Callable[[str], Iterable[bytes | memoryview]],
) -> str:
    header, order, num_bytes = encode_header(infos)
    # Hashed while writing, so that the file need not be read again.
    digest = hashlib.sha256(header)
    with _atomic(path, num_bytes) as file:
        file.write(header)
        for chunk in itertools.chain.from_iterable(map(chunks, order)):
            file.write(chunk)
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def _atomic(path: Path, num_bytes: int) -> Iterator[BinaryIO]:
    """Open a temporary file that is renamed to `path` when the block ends, and deleted if the block fails."""
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path, num_bytes):
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                # Without this, a crash after the rename could leave an empty file.
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
        except BaseException:
            # Also after an interrupt, no half-written file may remain.
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def _free_bytes(path: Path) -> int:
    """Return the free bytes on the file system of `path`, which need not exist."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    return shutil.disk_usage(folder).free
