"""One GGUF file of a checkpoint: our codes carried over exactly, or the values of an ordinary model rounded to a type.

Tensors are written one at a time and every one is read back: bytes against their digest, and codes against the source.
Source: llama.cpp `convert_hf_to_gguf.py`; types of a whole file as in `llama-quantize`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from gguf import GGMLQuantizationType as Block
from gguf import LlamaFileType as FileType
from torch import Tensor

from quantkit.compress.convert.gguf_model import (
    ExportedTensor,
    find_gguf_model,
    interleave,
    list_tensors,
    long_range_factors,
    metadata_of,
)
from quantkit.compress.convert.source import Source
from quantkit.compress.convert.target import kv_cache_scheme, unfit
from quantkit.errors import AuditError, ModelError, SchemeError
from quantkit.formats._gguf_blocks import (
    PLAIN,
    block_values,
    dequantize_blocks,
    num_bytes,
    round_to_blocks,
)
from quantkit.formats._gguf_file import read_gguf, write_gguf_file
from quantkit.formats._kv_cache import CONFIG_KEY
from quantkit.formats.gguf import FORMAT

# ggml's number of a file whose layers are of one type, the type, and what takes over where its blocks do not fit.
TYPES: dict[str, tuple[FileType, Block, Block]] = {
    "f32": (FileType.ALL_F32, Block.F32, Block.F32),
    "f16": (FileType.MOSTLY_F16, Block.F16, Block.F16),
    "bf16": (FileType.MOSTLY_BF16, Block.BF16, Block.BF16),
    "q4_0": (FileType.MOSTLY_Q4_0, Block.Q4_0, Block.F16),
    "q4_1": (FileType.MOSTLY_Q4_1, Block.Q4_1, Block.F16),
    "q8_0": (FileType.MOSTLY_Q8_0, Block.Q8_0, Block.F16),
    "q4_k": (FileType.MOSTLY_Q4_K_S, Block.Q4_K, Block.Q5_0),
    "q6_k": (FileType.MOSTLY_Q6_K, Block.Q6_K, Block.Q8_0),
}
_FILE_TYPES = {block: number for number, block, _ in TYPES.values()} | {
    Block.Q5_0: FileType.MOSTLY_Q5_0,
    Block.MXFP4: FileType.MOSTLY_MXFP4_MOE,
}
_CHUNK_VALUES = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What is in the file: number of tensors and bytes by type, number of linears carried over, notes."""

    num_linears: int
    num_bytes: int
    stored: dict[str, int]
    notes: tuple[str, ...]


def write_gguf(
    source: Source,
    path: Path,
    *,
    type_name: str | None = None,
    importance: Mapping[str, Tensor] | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> Written:
    """Write one GGUF file and read it back.

    Args:
        source: the checkpoint; codes are carried over, everything else keeps its dtype.
        path: of the file, replaced if it is there; the caller gives it its final name.
        type_name: for an ordinary model, one of TYPES: what matrices of layers are rounded to.
        importance: mean square of each input (K,) by full module name, for Q4_K and Q6_K.
        progress: called before each layer.
    Raises:
        SchemeError: codes that no block holds exactly.
        ModelError: the family or the tokenizer has no place in a GGUF file.
    """
    plan = _plan(source, type_name)
    file_type = int(TYPES[type_name][0] if type_name else _file_type(plan))
    gguf = find_gguf_model(source.reader.config, str(source.reader.path))
    metadata = metadata_of(source, gguf, file_type)
    factors = long_range_factors(gguf.model)
    tensors: dict[str, tuple[Block, tuple[int, ...]]] = {p.name: (block, p.shape) for p, block in plan}
    if factors is not None:
        tensors["rope_freqs.weight"] = (Block.F32, tuple(factors.shape))

    def contents() -> Iterator[Iterator[memoryview]]:
        for number, (piece, block) in enumerate(plan):
            progress(number, len(plan), piece.module)
            yield _bytes(source, piece, block, gguf.model.family.norm_offset, importance or {})
        if factors is not None:
            yield iter([factors.numpy().data])
        progress(len(plan), len(plan), "done")

    digests = write_gguf_file(path, metadata, tensors, contents())
    _read_back(path, tensors, digests)
    stored = Counter(block.name for piece, block in plan if len(piece.shape) == 2)
    carried = sum(piece.local == "weight" and piece.module in source.linears for piece, _ in plan)
    return Written(num_linears=carried, num_bytes=path.stat().st_size, stored=dict(stored), notes=_notes(source, plan))


def _notes(source: Source, plan: list[tuple[ExportedTensor, Block]]) -> tuple[str, ...]:
    """What the file does not say of the checkpoint, and what it says with more bytes."""
    notes = []
    if source.reader.config.get(CONFIG_KEY) is not None or kv_cache_scheme(source) is not None:
        notes.append(
            "What the checkpoint says of its KV cache has no place in a GGUF file: choose the types when running, in "
            "llama.cpp with --cache-type-k and --cache-type-v"
        )
    carried = [(piece, block) for piece, block in plan if piece.local == "weight" and piece.module in source.linears]
    after = sum(num_bytes(block, piece.shape) for piece, block in carried)
    names = {name for piece, _ in carried for name in (f"{piece.module}.{n}" for n in source.modules[piece.module])}
    before = sum(source.reader.info(name).num_bytes for name in names if not name.endswith(".bias"))
    if after > 1.01 * before > 0:
        types = Counter(block for _, block in carried)
        listed = ", ".join(f"{block.name} ({8 * num_bytes(block, (256,)) / 256:g} bits per weight)" for block in types)
        zeros = "; zero points that Q4_1 cannot hold take Q5_0" if Block.Q5_0 in types else ""
        notes.append(
            f"The quantized linears grow by {100 * (after / before - 1):.0f} %, to {listed}: each block of "
            f"{block_values(carried[0][1])} has a scale of its own{zeros}"
        )
    return tuple(notes)


def check_model(source: Source, type_name: str | None = None) -> None:
    """Everything that can be refused before a tensor is read.

    Raises:
        SchemeError, ModelError: as `write_gguf`.
    """
    gguf = find_gguf_model(source.reader.config, str(source.reader.path))
    metadata_of(source, gguf, 0)
    list_tensors(source, gguf)
    if type_name is None:
        _check_codes(source)


def _plan(source: Source, type_name: str | None) -> list[tuple[ExportedTensor, Block]]:
    """Every tensor with its type."""
    if type_name is not None and type_name not in TYPES:
        raise SchemeError(f"unknown GGUF type {type_name!r}; there are: {', '.join(TYPES)}")
    if type_name is not None and source.linears:
        raise SchemeError(
            f"{source.reader.path} is quantized; its codes are carried over as they are, so leave out --type "
            f"{type_name}, or give the original model"
        )
    _check_codes(source)
    gguf = find_gguf_model(source.reader.config, str(source.reader.path))
    pieces = list_tensors(source, gguf)
    has_head = any(piece.name == "output.weight" for piece in pieces)
    return [(piece, _block(source, piece, type_name, has_head=has_head)) for piece in pieces]


def _check_codes(source: Source) -> None:
    for module, scheme in source.linears.items():
        shape = source.shape(module)
        try:
            if shape is not None:
                FORMAT.check(scheme, shape)
            if source.is_reordered(module):
                raise SchemeError("its groups are in activation order, which gguf cannot store")
        except SchemeError as error:
            raise unfit(source, FORMAT, SchemeError(f"{module}: {error}")) from None


def _block(source: Source, piece: ExportedTensor, type_name: str | None, *, has_head: bool) -> Block:
    if piece.local == "weight" and piece.module in source.linears:
        scheme = source.linears[piece.module]
        if scheme.weight.symmetric:
            return Block[FORMAT.symmetric_block(scheme.weight)]
        return _encode(source, piece)[0]  # whether Q4_1 holds it depends on the numbers
    if len(piece.shape) < 2 or piece.is_norm or piece.name == "position_embd.weight":
        return Block.F32  # llama.cpp adds and multiplies by these in float32
    if type_name is None:
        return _plain_block(source, piece)
    _, wanted, fallback = TYPES[type_name]
    is_head = piece.name == "output.weight" or (piece.name == "token_embd.weight" and not has_head)
    if is_head and wanted == Block.Q4_K:
        wanted, fallback = Block.Q6_K, Block.Q8_0  # as llama-quantize does: the head is worth more bits
    fits = [block for block in (wanted, fallback, Block.F16) if piece.shape[-1] % block_values(block) == 0]
    return fits[0]


def _plain_block(source: Source, piece: ExportedTensor) -> Block:
    dtype = source.reader.info(f"{piece.module}.{piece.local}").dtype
    for block in (Block.F32, Block.F16, Block.BF16):
        if PLAIN[block] == dtype:
            return block
    raise ModelError(f"{source.reader.path}: {piece.module}.{piece.local} is {dtype}, which has no place in GGUF")


def _bytes(
    source: Source, piece: ExportedTensor, block: Block, norm_offset: float, importance: Mapping[str, Tensor]
) -> Iterator[memoryview]:
    """The bytes of one tensor, a few MiB at a time where it is large."""
    if piece.local == "weight" and piece.module in source.linears:
        yield _encode(source, piece)[1].view(-1).numpy().data
        return
    name = f"{piece.module}.{piece.local}"
    whole = piece.transposed or piece.interleave or len(piece.shape) < 2
    step = piece.shape[0] if whole else max(1, _CHUNK_VALUES // max(1, piece.shape[-1]))
    for row in range(0, piece.shape[0], step):
        if whole:
            values = source.reader.tensor(name)
            values = interleave(values.t().contiguous() if piece.transposed else values, piece.interleave)
        else:
            values = source.reader.rows(name, row, min(row + step, piece.shape[0]))
        if piece.is_norm:
            values = values.float() + norm_offset
        yield round_to_blocks(values, block, importance.get(piece.module)).view(-1).numpy().data


def _encode(source: Source, piece: ExportedTensor) -> tuple[Block, Tensor]:
    """Blocks of a quantized linear, checked to hold the very same codes, or values where zero points are merged."""
    weight = source.weight(piece.module)
    rows = interleave(torch.arange(piece.shape[0]), piece.interleave)
    weight = dataclasses.replace(
        weight,
        codes=weight.codes[rows],
        scale=weight.scale[rows],
        zero_point=None if weight.zero_point is None else weight.zero_point[rows],
    )
    try:
        block, data = FORMAT.blocks(weight)
    except SchemeError as error:
        raise SchemeError(f"{piece.module}: {error}") from None
    # Read by the gguf package, which had no part in making them.
    if not torch.equal(dequantize_blocks(block, data, weight.shape), weight.dequantize(torch.float32)):
        raise AuditError(f"{piece.module}: {block.name} blocks hold other values than the source")
    return block, data


def _read_back(path: Path, tensors: Mapping[str, tuple[Block, tuple[int, ...]]], digests: Mapping[str, str]) -> None:
    written = read_gguf(path)
    if {name: (info.block, info.shape) for name, info in written.tensors.items()} != dict(tensors):
        raise AuditError(f"{path.name}: its header reads back differently from how it was written")
    for name, expected in digests.items():
        digest = hashlib.sha256()
        for chunk in written.chunks(name):
            digest.update(chunk)
        if digest.hexdigest() != expected:
            raise AuditError(f"{path.name}: tensor {name} differs from what was written")


def _file_type(plan: list[tuple[ExportedTensor, Block]]) -> FileType:
    """ggml's number of the type that most matrices of layers have."""
    common = Counter(block for piece, block in plan if piece.is_layer and len(piece.shape) == 2).most_common(1)
    return _FILE_TYPES.get(common[0][0], FileType.ALL_F32) if common else FileType.ALL_F32
