"""Importance matrices of llama.cpp: sums of each matrix's squared inputs, as a GGUF file or in the older `.dat` format.

A GGUF file has two float32 tensors for each matrix, `NAME.in_sum2` (E, K) and `NAME.counts` (E, 1); E is the number of
experts, or 1. quantkit reads the older format, but does not write it:

    | entries i32 | entry ... | chunks i32 | length i32 | name of the data set |
    entry: | length i32 | name | calls i32 | values i32 | values f32, each the mean times the calls |

Source: llama.cpp `tools/imatrix/imatrix.cpp`, `common/imatrix-loader.cpp`.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Block
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.formats import GGUF_MAGIC
from quantkit.formats.ggml.gguf_file import GGUFFile, read_gguf, write_gguf_file
from quantkit.safety.untrusted import opened, shorten

_SUM, _COUNT = ".in_sum2", ".counts"
# Far beyond the files of published models, which have a few MB.
_MAX_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportanceMatrix:
    """Mean squares of the inputs of matrices.

    Args:
        means: (E, K) float32, keyed by the matrix's name in GGUF files, such as `blk.0.attn_q.weight`; E experts, or 1.
        counts: number of tokens (E,) behind each mean, float32.
        data: name of the calibration text; "" = unknown.
        chunk: tokens per sequence; 0 = unknown.
    """

    means: Mapping[str, Tensor]
    counts: Mapping[str, Tensor]
    data: str = ""
    chunk: int = 0


def read_imatrix(path: Path) -> ImportanceMatrix:
    """Read an importance matrix from a GGUF file or a `.dat` file.

    Args:
        path: path of the file.
    Raises:
        CheckpointError: the file is missing, damaged, or not an importance matrix.
    """
    with opened(path) as file:
        magic = file.read(len(GGUF_MAGIC))
    matrix = _from_gguf(read_gguf(path)) if magic == GGUF_MAGIC else _read_legacy(path)
    for name, mean in matrix.means.items():
        if not bool(torch.isfinite(mean).all()) or bool((mean < 0).any()):
            raise CheckpointError(
                f"{path}: {shorten(name)} has a negative or non-finite value; compute the importance matrix again"
            )
    return matrix


def write_imatrix(path: Path, matrix: ImportanceMatrix) -> None:
    """Write an importance matrix as a GGUF file; an existing file is replaced.

    Args:
        path: path of the file.
        matrix: what to write.
    """
    tensors: dict[str, tuple[Block, tuple[int, ...]]] = {}
    contents: list[Tensor] = []
    for name, mean in sorted(matrix.means.items()):
        counts = matrix.counts[name].view(-1, 1)
        tensors |= {
            f"{name}{_SUM}": (Block.F32, tuple(mean.shape)),
            f"{name}{_COUNT}": (Block.F32, tuple(counts.shape)),
        }
        contents += [mean * counts, counts]
    chunk = matrix.chunk or 1
    metadata: dict[str, Any] = {
        "general.architecture": "imatrix",  # llama.cpp neither writes nor reads it
        "general.type": "imatrix",
        "imatrix.datasets": [matrix.data],
        "imatrix.chunk_count": int(max(float(counts.max()) for counts in matrix.counts.values())) // chunk,
        "imatrix.chunk_size": chunk,
    }
    write_gguf_file(path, metadata, tensors, ([part.float().contiguous().numpy().data] for part in contents))


def _from_gguf(file: GGUFFile) -> ImportanceMatrix:
    names = [name.removesuffix(_SUM) for name in file.tensors if name.endswith(_SUM)]
    if not names:
        raise CheckpointError(
            f"{file.path} has no tensor {'NAME' + _SUM!r}, so it is not an importance matrix; give llama-imatrix's file"
        )
    means, counts = {}, {}
    for name in names:
        total, count = (_matrix(file, f"{name}{suffix}") for suffix in (_SUM, _COUNT))
        if count.numel() not in (1, len(total)):
            raise CheckpointError(
                f"{file.path}: {shorten(name)} has {len(total)} rows of sums and {count.numel()} counts; "
                "compute the importance matrix again"
            )
        # An expert that no token reached has no statistics, so all its inputs get the same weight.
        count = count.reshape(-1, 1).expand(len(total), 1)
        means[name] = torch.where(count > 0, total / count.clamp(min=1), torch.ones_like(total))
        counts[name] = count.reshape(-1).contiguous()
    data, chunk = file.metadata.get("imatrix.datasets"), file.metadata.get("imatrix.chunk_size")
    return ImportanceMatrix(
        means=means,
        counts=counts,
        data=", ".join(map(str, data)) if isinstance(data, list) else "",
        chunk=chunk if isinstance(chunk, int) else 0,
    )


def _matrix(file: GGUFFile, name: str) -> Tensor:
    """Read a float32 tensor as a matrix: the last dimension stays, and all others become rows."""
    info = file.tensors.get(name)
    if info is None or info.block != Block.F32 or not info.num_bytes:
        raise CheckpointError(f"{file.path} has no float32 tensor {shorten(name)}; compute the importance matrix again")
    data = bytearray(b"".join(file.chunks(name)))
    return torch.frombuffer(data, dtype=torch.float32).view(-1, info.shape[-1] if info.shape else 1)


def _read_legacy(path: Path) -> ImportanceMatrix:
    with opened(path) as file:
        data = file.read(_MAX_BYTES)
    position = 0

    def take(size: int) -> bytes:
        nonlocal position
        if not 0 <= size <= len(data) - position:
            raise CheckpointError(
                f"{path} is not an importance matrix, or is truncated at byte {position}; copy or compute it again"
            )
        position += size
        return data[position - size : position]

    def number() -> int:
        return int(struct.unpack("<i", take(4))[0])

    means, counts = {}, {}
    for _ in range(number()):
        name = take(number()).rstrip(b"\0").decode("utf-8", "replace")
        calls, size = number(), number()
        values = torch.frombuffer(bytearray(take(4 * size)), dtype=torch.float32) if size > 0 else torch.empty(0)
        if calls < 1 or not len(values):
            raise CheckpointError(
                f"{path}: {shorten(name)} has {calls} calls and {size} values; compute the importance matrix again"
            )
        means[name], counts[name] = values.view(1, -1) / calls, torch.tensor([float(calls)])
    if not means:
        raise CheckpointError(f"{path} is not an importance matrix: it has no entries; compute it again")
    source = ""
    if position < len(data):
        number()  # chunks
        source = take(number()).rstrip(b"\0").decode("utf-8", "replace")
    return ImportanceMatrix(means=means, counts=counts, data=source)
