"""The safetensors file layout: length, JSON header, tensor bytes. Tensors themselves are read by `reader`.

    | length: u64 LE | header: JSON, padded with spaces to 8 bytes | tensor bytes, without gaps |

Source: safetensors `README.md`, section "Format"; the order of tensors is that of its own writer.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import torch

from quantkit.errors import CheckpointError
from quantkit.quantities import byte_size

MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_DAMAGED = "the file is damaged; download or copy it again"

# In the order in which the safetensors library writes them: wide types first, which keeps every tensor aligned.
_NAMES = {
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "F32": "float32",
    "U32": "uint32",
    "I32": "int32",
    "BF16": "bfloat16",
    "F16": "float16",
    "U16": "uint16",
    "I16": "int16",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
# float8_e8m0fnu exists from torch 2.7 on.
_DTYPES: dict[str, torch.dtype] = {key: getattr(torch, name) for key, name in _NAMES.items() if hasattr(torch, name)}
_KEYS = {dtype: key for key, dtype in _DTYPES.items()}
_RANKS = {dtype: rank for rank, dtype in enumerate(_KEYS)}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """Where one tensor lies.

    Args:
        dtype: of its elements.
        shape: empty for a single number.
        file: the safetensors file that holds it.
        offset: of its first byte from the start of the file.
        num_bytes: its length.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Tensors of one safetensors file, checked against each other and against the size of the file.

    Args:
        path: of the file.
    Raises:
        CheckpointError: missing or unreadable, not safetensors, truncated, or inconsistent; names tensor and values.
    """
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            header = _parse(path, _header_bytes(path, file, file_bytes))
            data_start = file.tell()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; check that it exists and is readable") from error
    header.pop("__metadata__", None)
    tensors = {name: _tensor_info(path, name, entry, data_start) for name, entry in header.items()}
    _check_layout(path, tensors, data_start, file_bytes)
    return tensors


def build_header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[str]]:
    """The bytes in front of the tensors of a new file.

    Args:
        tensors: dtype and shape by name.
        metadata: strings to keep beside them; transformers wants {"format": "pt"}.
    Returns:
        header: length field included.
        order: names in the order in which their bytes must follow.
    Raises:
        CheckpointError: a dtype that safetensors cannot hold.
    """
    for name, (dtype, _) in tensors.items():
        if dtype not in _KEYS:
            raise CheckpointError(f"tensor {name!r} has dtype {dtype}, which safetensors cannot hold; cast it first")
    order = sorted(tensors, key=lambda name: (_RANKS[tensors[name][0]], name))
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for name in order:
        dtype, shape = tensors[name]
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _KEYS[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, order


def _header_bytes(path: Path, file: BinaryIO, file_bytes: int) -> bytes:
    """The JSON text of the header, `file` then standing at the first tensor byte."""
    start = file.read(_LENGTH_BYTES)
    if start == b"version ":
        raise CheckpointError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
    length = int.from_bytes(start, "little")
    if len(start) < _LENGTH_BYTES:
        raise CheckpointError(f"{path} is truncated: it has {file_bytes} bytes; download or copy it again")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} says its header has {length} bytes, over the limit of {MAX_HEADER_BYTES}; "
            "it is not a safetensors file or it is damaged: download or copy it again"
        )
    if _LENGTH_BYTES + length > file_bytes:
        raise CheckpointError(
            f"{path} is truncated: its header ends at byte {_LENGTH_BYTES + length} "
            f"and the file has {file_bytes}; download or copy it again"
        )
    return file.read(length)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a header that is not JSON ({error}); {_DAMAGED}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a header that is not a JSON object; {_DAMAGED}")
    return header


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    """One entry of the header, its offsets made absolute."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: the entry of tensor {name!r} is not a JSON object; {_DAMAGED}")
    key, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(key, str) or key not in _DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name!r} has dtype {key!r}, which is not supported; supported: {', '.join(_DTYPES)}"
        )
    if not _is_sizes(shape):
        raise CheckpointError(f"{path}: tensor {name!r} has shape {shape!r}; {_DAMAGED}")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: tensor {name!r} has data_offsets {offsets!r}; {_DAMAGED}")
    dtype = _DTYPES[key]
    num_bytes = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != num_bytes:
        raise CheckpointError(
            f"{path}: tensor {name!r} has data_offsets {offsets}, {offsets[1] - offsets[0]} bytes, "
            f"but shape {shape} of {key} takes {num_bytes}; {_DAMAGED}"
        )
    return TensorInfo(dtype=dtype, shape=tuple(shape), file=path, offset=data_start + offsets[0], num_bytes=num_bytes)


def _is_sizes(values: Any) -> TypeGuard[list[int]]:
    """Whether this is a list of whole numbers >= 0; JSON's true is none."""
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_layout(path: Path, tensors: Mapping[str, TensorInfo], data_start: int, file_bytes: int) -> None:
    """Tensors lie one behind the other, without gap or overlap, up to the end of the file."""
    end, previous = data_start, "the header"
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if info.offset != end:
            kind = "overlaps" if info.offset < end else "leaves a gap behind"
            raise CheckpointError(
                f"{path}: tensor {name!r} starts at byte {info.offset} and {kind} {previous}, "
                f"which ends at {end}; {_DAMAGED}"
            )
        end, previous = end + info.num_bytes, f"tensor {name!r}"
    if file_bytes < end:
        raise CheckpointError(
            f"{path} is truncated: its tensors take {end} bytes ({byte_size(end)}), "
            f"the file has {file_bytes} ({byte_size(file_bytes)}); download or copy it again"
        )
    if file_bytes > end:
        raise CheckpointError(f"{path} has {file_bytes} bytes but its tensors end at byte {end}; {_DAMAGED}")
