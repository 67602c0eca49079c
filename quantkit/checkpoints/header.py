"""Read and write headers of safetensors files; `reader` reads the tensors.

Only functions that need a torch dtype import torch, so that `planning` reads headers without it.

    | length: u64 LE | header: JSON, padded with spaces to 8 bytes | tensor bytes, without gaps |

Source: safetensors `README.md`, section "Format"; the order of tensors is that of the library's writer.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeGuard

from quantkit.errors import CheckpointError
from quantkit.quantities import byte_size, dtype_name
from quantkit.safety.untrusted import opened, parse_object, shorten

if TYPE_CHECKING:
    import torch

# The limit in the safetensors library.
MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_MAX_DIMS = 64
_MAX_NAME = 1024  # characters; Python refuses to parse a number in a name if it has thousands of digits
_DAMAGED = "the file is damaged; download or copy it again"

# Kinds in the order in which the safetensors library writes them: wide types first, so every tensor is aligned.
# Other kinds (4 and 6 bits) pack several elements into a byte; quantkit can list but not read them.
_TORCH_NAMES = (
    {"U64": "uint64", "I64": "int64", "F64": "float64"}
    | {"F32": "float32", "U32": "uint32", "I32": "int32"}
    | {"BF16": "bfloat16", "F16": "float16", "U16": "uint16", "I16": "int16"}
    | {"F8_E8M0": "float8_e8m0fnu", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
    | {"I8": "int8", "U8": "uint8", "BOOL": "bool"}
)
_KINDS = {name: kind for kind, name in _TORCH_NAMES.items()}
_ITEM_BYTES = {kind: int((re.search(r"\d+", kind) or ["8"])[0]) // 8 for kind in _TORCH_NAMES}  # BOOL: 1
_RANKS = {kind: rank for rank, kind in enumerate(_TORCH_NAMES)}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """Type, shape and position of one tensor in a file.

    Args:
        kind: safetensors name of the element type, e.g. `BF16`.
        shape: shape; empty for a single number.
        file: safetensors file that holds the tensor.
        offset: position of the tensor's first byte in the file.
        num_bytes: length in bytes.
    """

    kind: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int

    @property
    def dtype_name(self) -> str | None:
        """Name of the torch dtype, such as `bfloat16`; None = torch has no dtype for this kind."""
        return _TORCH_NAMES.get(self.kind)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in torch; `checked_dtypes` must have accepted the tensor."""
        import torch

        dtype: torch.dtype = getattr(torch, _TORCH_NAMES[self.kind])
        return dtype

    def rows(self, start: int, stop: int) -> TensorInfo:
        """Return the description of rows [start, stop) of the first dimension; `stop` may be past the last row."""
        stop, num_bytes = min(stop, self.shape[0]), self.num_bytes // self.shape[0]
        shape = (stop - start, *self.shape[1:])
        return replace(self, shape=shape, offset=self.offset + start * num_bytes, num_bytes=(stop - start) * num_bytes)

    def item(self, index: int) -> TensorInfo:
        """Return the description of one entry of the first dimension, e.g. of one expert in a stack."""
        return replace(self.rows(index, index + 1), shape=self.shape[1:])


def kind_of(dtype: torch.dtype) -> str:
    """Return the safetensors name of a dtype; "" = safetensors has no such type."""
    return _KINDS.get(dtype_name(dtype), "")


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read the header of a safetensors file, and check that its tensors fill the file without gaps or overlaps.

    Args:
        path: path of the file.
    Raises:
        CheckpointError: the file is missing, unreadable, not safetensors, truncated or inconsistent.
    """
    with opened(path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        header = parse_object(_read_text(path, file, file_bytes), f"the header of {path}", CheckpointError, _DAMAGED)
        data_start = file.tell()
    header.pop("__metadata__", None)
    tensors = {name: _tensor_info(path, name, entry, data_start) for name, entry in header.items()}
    _check_layout(path, tensors, data_start, file_bytes)
    return tensors


def checked_dtypes(tensors: Mapping[str, TensorInfo]) -> Mapping[str, TensorInfo]:
    """Return `tensors` after checking that torch supports all their dtypes.

    Raises:
        CheckpointError: a dtype is not supported; the message names the tensor and the supported dtypes.
    """
    import torch

    # float8_e8m0fnu exists from torch 2.7 on.
    known = [kind for kind, name in _TORCH_NAMES.items() if hasattr(torch, name)]
    for name, info in tensors.items():
        if info.kind not in known:
            raise CheckpointError(
                f"{info.file}: tensor {name!r} has dtype {info.kind!r}, which is not supported; "
                f"supported: {', '.join(known)}"
            )
    return tensors


def encode_header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, list[str], int]:
    """Encode the header of a new safetensors file.

    Args:
        tensors: dtype and shape, keyed by name.
    Returns:
        header: bytes of the header, with the length field.
        order: names in the order in which the tensors must be written.
        num_bytes: size of the whole file.
    Raises:
        CheckpointError: safetensors cannot store a dtype.
    """
    kinds = {name: kind_of(dtype) for name, (dtype, _) in tensors.items()}
    for name, kind in kinds.items():
        if not kind:
            raise CheckpointError(
                f"tensor {name!r} has dtype {tensors[name][0]}, which safetensors cannot store; cast it first"
            )
    order = sorted(tensors, key=lambda name: (_RANKS[kinds[name]], name))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
    offset = 0
    for name in order:
        dtype, shape = tensors[name]
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": kinds[name], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, order, _LENGTH_BYTES + len(text) + offset


def _read_text(path: Path, file: BinaryIO, file_bytes: int) -> bytes:
    """Read the JSON text of the header, and leave `file` at the first byte of the tensors."""
    start = file.read(_LENGTH_BYTES)
    if start == b"version ":
        raise CheckpointError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
    length = int.from_bytes(start, "little")
    if len(start) < _LENGTH_BYTES:
        raise CheckpointError(f"{path} is truncated: it has {file_bytes} bytes; download or copy it again")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: the header length is {length} bytes, over the limit of {MAX_HEADER_BYTES}; "
            "the file is damaged or not a safetensors file; download or copy it again"
        )
    if _LENGTH_BYTES + length > file_bytes:
        raise CheckpointError(
            f"{path} is truncated: its header ends at byte {_LENGTH_BYTES + length}, "
            f"but the file has {file_bytes} bytes; download or copy it again"
        )
    return file.read(length)


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    """Parse one entry of the header, and convert its offsets to positions in the file."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: the header entry of tensor {name!r} is not a JSON object; {_DAMAGED}")
    if len(name) > _MAX_NAME:
        raise CheckpointError(f"{path}: tensor {shorten(name)} has a name of {len(name)} characters; {_DAMAGED}")
    kind, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(kind, str):
        raise CheckpointError(f"{path}: tensor {name!r} has dtype {shorten(kind)}, which is not a name; {_DAMAGED}")
    if not _is_sizes(shape):
        raise CheckpointError(f"{path}: tensor {name!r} has shape {shorten(shape)}, which is not valid; {_DAMAGED}")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{path}: tensor {name!r} has data_offsets {shorten(offsets)}, which are not valid; {_DAMAGED}"
        )
    num_bytes = offsets[1] - offsets[0]
    expected = math.prod(shape) * _ITEM_BYTES.get(kind, 0)
    if num_bytes < 0 or (kind in _ITEM_BYTES and num_bytes != expected):
        raise CheckpointError(
            f"{path}: tensor {name!r} has {num_bytes} bytes (data_offsets {offsets}), "
            f"but its shape {shape} and dtype {kind} need {expected} bytes; {_DAMAGED}"
        )
    return TensorInfo(kind=kind, shape=tuple(shape), file=path, offset=data_start + offsets[0], num_bytes=num_bytes)


def _is_sizes(values: Any) -> TypeGuard[list[int]]:
    """Whether a value is a short list of whole numbers >= 0; booleans do not count as numbers."""
    is_short = isinstance(values, list) and len(values) <= _MAX_DIMS  # callers multiply the values
    return is_short and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _check_layout(path: Path, tensors: Mapping[str, TensorInfo], data_start: int, file_bytes: int) -> None:
    """Check that the tensors fill the file up to its end, without gaps or overlaps."""
    end, previous = data_start, "the header"
    # An empty tensor sorts before the tensor that begins at the same byte.
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if info.offset != end:
            kind = "overlaps" if info.offset < end else "leaves a gap after"
            raise CheckpointError(
                f"{path}: tensor {name!r} starts at byte {info.offset} and {kind} {previous}, "
                f"which ends at {end}; {_DAMAGED}"
            )
        end, previous = end + info.num_bytes, f"tensor {name!r}"
    if file_bytes < end:
        raise CheckpointError(
            f"{path} is truncated: its header and tensors take {end} bytes ({byte_size(end)}), "
            f"but the file has {file_bytes} ({byte_size(file_bytes)}); download or copy it again"
        )
    if file_bytes > end:
        raise CheckpointError(f"{path} has {file_bytes} bytes, but its tensors end at byte {end}; {_DAMAGED}")
