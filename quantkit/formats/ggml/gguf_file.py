"""GGUF files: read the header, metadata and tensor bytes with bounds checks, and write them as a stream.

The gguf package writes headers and names types, but quantkit does not read files with it: files may be malicious, and
the package's reader trusts every length (an array of 2**50 bytes keeps it busy forever) and maps the file into memory.

    | "GGUF" | version u32 | tensors u64 | entries u64 | entries | tensor infos | padding | tensor bytes |

A string is a u64 length and UTF-8 bytes. Dimensions start with the innermost. Offsets count from the end of the
padding. `blocks` defines blocks; `quantkit.compress.convert` defines the names and entries that a model needs.
Source: ggml `docs/gguf.md`.
"""

import hashlib
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Block

from quantkit.errors import CheckpointError
from quantkit.formats import GGUF_MAGIC
from quantkit.formats.ggml.blocks import PLAIN, block_values, num_bytes
from quantkit.safety.untrusted import opened, read_chunks, shorten

_ALIGNMENT = 32
_LARGEST = float(np.finfo(np.float32).max)
_INT32, _UINT32 = (-(2**31), 2**31 - 1), (0, 2**32 - 1)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]").search
# GGML_MAX_NAME, which counts C's final zero, and GGML_MAX_DIMS.
_MAX_NAME, _MAX_DIMS = 64, 4
# Far beyond published files; a list of Python numbers takes many times the bytes of the file.
_MAX_ITEMS, _MAX_TENSORS = 1 << 22, 1 << 17
_DAMAGED = "the file is damaged or not a GGUF file; download or copy it again"

# Struct code of each value type of fixed size, keyed by the type's number.
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFTensor:
    """Type, shape and position of one tensor in a file.

    Args:
        block: type of the tensor.
        shape: outermost dimension first, as in torch; the last dimension counts elements, not bytes.
        offset: position of the first byte in the file.
        num_bytes: length in bytes.
    """

    block: Block
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def is_quantized(self) -> bool:
        """Whether the tensor holds codes with scales."""
        return self.block not in PLAIN


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFFile:
    """Header of one file.

    Args:
        path: path of the file.
        metadata: entries, keyed by name; arrays are lists.
        tensors: tensors, keyed by name, in file order.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of one tensor, a few MiB at a time.

        Raises:
            CheckpointError: the file has no such tensor or cannot be read.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        return read_chunks(self.path, self.tensors[name].offset, self.tensors[name].num_bytes)


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a file; a length that exceeds the rest of the file is refused before memory is allocated.

    Args:
        path: path of the file.
    Raises:
        CheckpointError: the file is missing, not GGUF, truncated or inconsistent; the message gives the byte offset.
    """
    with opened(path) as file:
        return _read(_Cursor(path, file))


def _fits(value: Any) -> bool:
    """Whether `write_gguf_file` accepts this value: its type is supported and the number is in range."""
    items = value if isinstance(value, list) else [value]
    if len(set(map(type, items))) != 1 or not isinstance(items[0], bool | int | float | str):
        return False
    if isinstance(items[0], str):
        return not any(map(_LONE_SURROGATE, items))
    least, most = (-_LARGEST, _LARGEST) if isinstance(items[0], float) else _INT32 if items is value else _UINT32
    return all(least <= item <= most for item in items)


def write_gguf_file(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[Block, Sequence[int]]],
    contents: Iterable[Iterable[bytes | memoryview]],
) -> dict[str, str]:
    """Write one file as a stream.

    The gguf package writes only the header, because it accepts a tensor only as one array. This function writes a
    tensor in chunks, because embeddings can be gigabytes large.

    Args:
        path: path of the file; an existing file is replaced.
        metadata: entries, keyed by name: bool, int (u32), float (f32), str, or a non-empty list of one of these types
            (ints become i32); general.architecture is required.
        tensors: type and shape (outermost first), keyed by name.
        contents: bytes of each tensor, in the order of `tensors`.
    Returns:
        SHA-256 of each tensor's bytes, keyed by name.
    Raises:
        CheckpointError: a name, shape or number exceeds the limits of the format.
    """
    entries, digests = dict(metadata), dict[str, str]()
    # Removed from the entries: the writer adds it, and logs a warning if it is added twice.
    writer = gguf.GGUFWriter(path, str(entries.pop("general.architecture")))
    for key, value in entries.items():
        if not _fits(value):
            raise CheckpointError(
                f"{key}: {shorten(value)} cannot be stored in a GGUF file (numbers need 32 bits, text must be valid "
                "UTF-8, and lists one type); correct the model's files"
            )
        kind = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)
    for name, (block, shape) in tensors.items():
        if len(name.encode()) >= _MAX_NAME or len(shape) > _MAX_DIMS:
            raise CheckpointError(
                f"tensor {name!r} of shape {tuple(shape)} cannot be stored in a GGUF file, which allows names of "
                f"{_MAX_NAME - 1} bytes and {_MAX_DIMS} dimensions"
            )
        # Not uint8, for which the writer would take the shape to be in bytes; the type itself is `raw_dtype`.
        writer.add_tensor_info(name, shape, np.dtype(np.float32), num_bytes(block, shape), raw_dtype=block)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        file = (writer.fout or [])[0]
        writer.write_padding(file, file.tell())
        for (name, (block, shape)), chunks in zip(tensors.items(), contents, strict=True):
            digest, written, size = hashlib.sha256(), 0, num_bytes(block, shape)
            for chunk in chunks:
                digest.update(chunk)
                written += file.write(chunk)
            assert written == size, f"{name} has {written} bytes, its header says {size}"
            writer.write_padding(file, size)
            digests[name] = digest.hexdigest()
    finally:
        writer.close()
    return digests


def copy_with_entries(source: Path, target: Path, entries: Mapping[str, Any]) -> None:
    """Copy a file that `write_gguf_file` made, with further metadata.

    Args:
        source: the file.
        target: path of the copy; an existing file is replaced.
        entries: metadata to add or to replace, see `write_gguf_file`.
    Raises:
        CheckpointError: the file cannot be read, or an entry cannot be stored.
    """
    file = read_gguf(source)
    tensors = {name: (info.block, info.shape) for name, info in file.tensors.items()}
    write_gguf_file(target, {**file.metadata, **entries}, tensors, map(file.chunks, file.tensors))


class _Cursor:
    """Forward reader of a file that tracks how many bytes are left."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file, self.size = path, file, os.fstat(file.fileno()).st_size

    @property
    def position(self) -> int:
        return self._file.tell()

    @property
    def left(self) -> int:
        return self.size - self.position

    def take(self, count: int, what: str) -> bytes:
        if count > self.left:
            raise self.error(f"{what} takes {count} bytes, but only {self.left} are left")
        return self._file.read(count)

    def unpack(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def string(self, what: str) -> str:
        data = self.take(self.unpack("Q", what), what)
        # Tokens of byte-level vocabularies need not be valid on their own.
        return data.decode("utf-8", errors="replace")

    def count(self, what: str, least_bytes: int, most: int = _MAX_ITEMS) -> int:
        """Read a count of items and check that this many items of at least `least_bytes` each fit into the file."""
        value = int(self.unpack("Q", what))
        if value * least_bytes > self.left:
            raise self.error(f"{what} is {value}, more than fit into the {self.left} bytes left")
        if value > most:
            raise self.error(f"{what} is {value}, over the limit of {most}")
        return value

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: at byte {self.position}: {text}; {_DAMAGED}")


def _read(cursor: _Cursor) -> GGUFFile:
    if cursor.take(4, "the magic") != GGUF_MAGIC:
        raise cursor.error("the file does not begin with GGUF")
    version = cursor.unpack("I", "the version")
    # Version 1 has 32-bit counts; later versions have 64-bit counts.
    if version not in (2, 3):
        raise cursor.error(f"GGUF version {version} is not supported; supported: 2, 3")
    # Fewest bytes of a tensor: length of the name, dimensions, type, offset. Of an entry: length, type and one byte.
    num_tensors = cursor.count("the number of tensors", 24, _MAX_TENSORS)
    num_entries = cursor.count("the number of entries", 13)
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.string("a key")
        metadata[key] = _read_value(cursor, cursor.unpack("I", f"the type of {key!r}"), key)
    infos = [_read_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise cursor.error(f"general.alignment is {alignment!r}, which is not supported")
    start = cursor.position + -cursor.position % alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, info in infos:
        end = start + info.offset + info.num_bytes
        if end > cursor.size:
            raise cursor.error(f"tensor {name!r} ends at byte {end}, but the truncated file has {cursor.size} bytes")
        if name in tensors:
            raise cursor.error(f"two tensors have the name {name!r}")
        tensors[name] = replace(info, offset=start + info.offset)
    return GGUFFile(path=cursor.path, metadata=metadata, tensors=tensors)


def _read_value(cursor: _Cursor, kind: int, key: str) -> Any:
    if kind in _CODES:
        return cursor.unpack(_CODES[kind], repr(key))
    if kind == _STRING:
        return cursor.string(repr(key))
    if kind != _ARRAY:
        raise cursor.error(f"{key!r} has the unknown type {kind}")
    inner = cursor.unpack("I", f"the type inside {key!r}")
    if inner == _STRING:
        return [cursor.string(repr(key)) for _ in range(cursor.count(f"the length of {key!r}", 8))]
    if inner not in _CODES:
        raise cursor.error(f"{key!r} is an array of the unknown type {inner}")
    width = struct.calcsize(f"<{_CODES[inner]}")
    length = cursor.count(f"the length of {key!r}", width)
    return list(struct.unpack(f"<{length}{_CODES[inner]}", cursor.take(length * width, repr(key))))


def _read_info(cursor: _Cursor) -> tuple[str, GGUFTensor]:
    """Read the name, type, shape and offset of a tensor; the offset counts from the end of the padding."""
    name = cursor.string("the name of a tensor")
    num_dims = cursor.unpack("I", f"the dimensions of {name!r}")
    if num_dims > _MAX_DIMS:
        raise cursor.error(f"tensor {name!r} has {num_dims} dimensions, over the limit of {_MAX_DIMS}")
    shape = tuple(cursor.unpack("Q", f"a dimension of {name!r}") for _ in range(num_dims))[::-1]
    number = cursor.unpack("I", f"the type of {name!r}")
    if number not in iter(Block):
        raise cursor.error(f"tensor {name!r} has the unknown type {number}")
    block = Block(number)
    # 2^60 elements of 8 bytes are the end of signed 64-bit offsets.
    if math.prod(shape) > 1 << 60:
        raise cursor.error(f"tensor {name!r} has shape {shape}, which is too large")
    if shape and shape[-1] % block_values(block):
        raise cursor.error(
            f"tensor {name!r} has shape {shape}, whose last dimension is not a multiple of the {block_values(block)} "
            f"values in a {block.name} block"
        )
    offset = cursor.unpack("Q", f"the offset of {name!r}")
    return name, GGUFTensor(block=block, shape=shape, offset=offset, num_bytes=num_bytes(block, shape))
