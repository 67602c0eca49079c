"""Write a checkpoint as one GGUF file: copy codes exactly, or round the weights of an unquantized model to a GGUF type.

Tensors are written one at a time. Every tensor is read back and compared with the digest of what was written. Blocks
that are made from codes are also decoded and compared with the source.
Source: llama.cpp `convert_hf_to_gguf.py`; file types as in `llama-quantize`.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Block
from gguf import LlamaFileType as FileType
from torch import Tensor

from quantkit.checkpoints.kv_cache_entries import CONFIG_KEY
from quantkit.compress.convert.gguf_contents import (
    ExportedTensor,
    find_gguf_model,
    interleave,
    list_tensors,
    long_range_factors,
    metadata_of,
)
from quantkit.compress.convert.source import Source
from quantkit.compress.convert.target import kv_cache_scheme, refuse_reordered, unfit
from quantkit.errors import AuditError, ModelError, SchemeError, located
from quantkit.formats.ggml.blocks import PLAIN, block_values, dequantize_blocks, num_bytes, round_to_blocks
from quantkit.formats.ggml.gguf_file import read_gguf, write_gguf_file
from quantkit.formats.gguf import FORMAT, MATRIX_BLOCKS, matrix_block
from quantkit.numerics.tensor import QuantizedTensor

# ggml's type of the whole file, keyed by the block type that most matrices have.
_FILE_TYPES = {"f32": FileType.ALL_F32, "mxfp4": FileType.MOSTLY_MXFP4_MOE}
for _name in ("f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k_s", "q4_k_s", "q5_k_s", "q6_k"):
    _FILE_TYPES[_name.removesuffix("_s")] = FileType[f"MOSTLY_{_name.upper()}"]
_CHUNK_VALUES = 1 << 22


Typed = list[tuple[ExportedTensor, Block]]
"""Tensors to write, each with its GGUF type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """Summary of a written output; see the same fields of `Conversion`."""

    num_linears: int
    output_bytes: int
    stored: dict[str, int]
    notes: tuple[str, ...] = ()


def write_gguf(
    source: Source,
    path: Path,
    *,
    type_name: str | None,
    embedding: str | None = None,
    entries: Mapping[str, Any] | None = None,
    progress: Callable[[int, int, str], None],
) -> Written:
    """Write one GGUF file and read it back.

    Args:
        source: the checkpoint. Codes are copied. Norms, biases and other vectors become float32. Unquantized matrices
            keep their dtype, unless `type_name` or `embedding` gives a type to which they are rounded.
        path: path of the file; an existing file is replaced. The caller moves the file to its final path.
        type_name: GGUF type to which the matrices of an unquantized model are rounded, a key of `MATRIX_BLOCKS`.
        embedding: GGUF type to which the embedding and the head are rounded, also a key of `MATRIX_BLOCKS`. None = use
            `type_name`, but round the head to q6_k if `type_name` is a smaller K type.
        entries: further metadata, see `write_gguf_file`.
        progress: called twice for each tensor: before its type is chosen and before it is written. It gets the number
            of earlier calls, the total number of calls, and the name of the tensor's module.
    Raises:
        SchemeError: no block type can store the codes exactly, or the requested types do not suit the checkpoint.
        ModelError: GGUF does not support the family or the tokenizer.
    """
    _check_source(source, type_name, embedding)
    model = find_gguf_model(source)
    exported = list_tensors(source, model)
    has_head = any(tensor.name == "output.weight" for tensor in exported)
    # Choose all types first: the header, which lists them, is written before any tensor.
    asked = (_type_of(tensor, type_name, embedding, has_head=has_head) for tensor in exported)
    plan: Typed = []
    for number, (tensor, own) in enumerate(zip(exported, asked, strict=True)):
        progress(number, 2 * len(exported), tensor.module)
        plan.append((tensor, _block(source, tensor, own)))
    metadata = metadata_of(source, model, int(_FILE_TYPES[type_name] if type_name else _file_type(plan)))
    metadata |= entries or {}
    factors = long_range_factors(model)
    tensors: dict[str, tuple[Block, tuple[int, ...]]] = {tensor.name: (block, tensor.shape) for tensor, block in plan}
    if factors is not None:
        tensors["rope_freqs.weight"] = (Block.F32, tuple(factors.shape))

    def contents() -> Iterator[Iterator[memoryview]]:
        for number, (tensor, block) in enumerate(plan):
            progress(len(plan) + number, 2 * len(plan), tensor.module)
            yield _bytes(source, tensor, block, model.family.norm_offset)
        if factors is not None:
            yield iter([factors.numpy().data])
        progress(2 * len(plan), 2 * len(plan), "done")

    digests = write_gguf_file(path, metadata, tensors, contents())
    _read_back(path, tensors, digests)
    return Written(
        num_linears=sum(tensor.is_quantized for tensor in exported),
        output_bytes=path.stat().st_size,
        stored=dict(Counter(block.name for tensor, block in plan if len(tensor.shape) == 2)),
        notes=(*_notes(source, plan), *_fallbacks(plan, type_name)),
    )


def check_model(source: Source) -> None:
    """Check that an unquantized model can be written as GGUF, before any tensor is read.

    Raises:
        ModelError: see `write_gguf`.
    """
    model = find_gguf_model(source)
    metadata_of(source, model, 0)
    list_tensors(source, model)


def _notes(source: Source, plan: Typed) -> tuple[str, ...]:
    """Return notes about settings of the checkpoint that the file omits, and about linears that become larger."""
    notes = []
    if source.reader.config.get(CONFIG_KEY) is not None or kv_cache_scheme(source) is not None:
        notes.append(
            "A GGUF file cannot store the KV cache settings of the checkpoint. Choose the cache types at run time; "
            "llama.cpp has --cache-type-k and --cache-type-v"
        )
    quantized = [(tensor, block) for tensor, block in plan if tensor.is_quantized]
    after = sum(num_bytes(block, tensor.shape) for tensor, block in quantized)
    names = {name for tensor, _ in quantized for name in source.names(tensor.module)}
    before = sum(source.reader.info(name).num_bytes for name in names if not name.endswith(".bias"))
    if after > 1.01 * before > 0:
        types = Counter(block for _, block in quantized)
        listed = ", ".join(f"{block.name} ({8 * num_bytes(block, (256,)) / 256:g} bits per weight)" for block in types)
        zeros = "; linears with zero points that Q4_1 cannot store use Q5_0" if Block.Q5_0 in types else ""
        notes.append(
            f"The quantized linears grow by {100 * (after / before - 1):.0f} %. They are stored as {listed}, in which "
            f"each block of {block_values(quantized[0][1])} weights has its own scale{zeros}"
        )
    return tuple(notes)


def _fallbacks(plan: Typed, type_name: str | None) -> Iterator[str]:
    """Yield a note about matrices that get a different type because their rows are not whole blocks of `type_name`."""
    size = block_values(Block[MATRIX_BLOCKS[type_name][0]]) if type_name else 1
    others: dict[Block, list[ExportedTensor]] = {}
    for tensor, block in plan:
        if block != Block.F32 and tensor.shape[-1] % size:  # norms are always float32
            others.setdefault(block, []).append(tensor)
    if others:
        total = sum(block != Block.F32 for _, block in plan)
        widths = ", ".join(map(str, sorted({tensor.shape[-1] for of in others.values() for tensor in of})))
        listed = ", ".join(f"{block.name} ({len(of)}, such as {of[0].name})" for block, of in others.items())
        yield (
            f"Rows of {widths} values are not whole blocks of {type_name} ({size} values each), so some of the {total} "
            f"matrices get a different type: {listed}"
        )


def _type_of(tensor: ExportedTensor, type_name: str | None, embedding: str | None, *, has_head: bool) -> str | None:
    """Return the GGUF type to which a tensor is rounded; None = the tensor keeps its dtype."""
    if tensor.name not in ("output.weight", "token_embd.weight"):
        return type_name
    # In a model without a head, the embedding serves as the head and gets the head's type.
    is_head = tensor.name == "output.weight" or not has_head
    if embedding is None and is_head and type_name in ("q2_k", "q3_k", "q4_k", "q5_k"):
        return "q6_k"  # as llama-quantize does, since the head is worth more bits
    return embedding or type_name


def _check_source(source: Source, type_name: str | None, embedding: str | None) -> None:
    for name in (type_name, embedding):
        if name is not None and name not in MATRIX_BLOCKS:
            raise SchemeError(f"GGUF type {name!r} is not supported; supported: {', '.join(MATRIX_BLOCKS)}")
    if source.dense is not None:
        raise SchemeError(f"{source.reader.path} is a GGUF file already; use it unchanged, or convert with --to dense")
    if type_name is not None and source.linears:
        raise SchemeError(
            f"{source.reader.path} is quantized, and its codes are copied unchanged; leave out --type {type_name}, "
            "or convert the original model instead"
        )
    for module, scheme in source.linears.items():
        shape = source.shape(module)
        try:
            with located(module):
                if shape is not None:
                    FORMAT.check(scheme, shape)
                refuse_reordered(source, module, FORMAT)
        except SchemeError as error:
            raise unfit(source, FORMAT, error) from None


def _block(source: Source, tensor: ExportedTensor, type_name: str | None) -> Block:
    if tensor.is_quantized:
        scheme = source.linears[tensor.module]
        if scheme.weight.symmetric or scheme.weight.dtype.block is not None:
            return Block[FORMAT.symmetric_block(scheme.weight)]
        return _encode(source, tensor)[1]  # the zero points decide whether Q4_1 can store the linear
    if len(tensor.shape) < 2 or tensor.is_norm or tensor.name == "position_embd.weight":
        return Block.F32  # llama.cpp adds these, or multiplies by them, in float32
    if type_name is None:
        dtype = source.reader.info(tensor.stored_name).dtype
        block = {PLAIN[block]: block for block in (Block.F32, Block.F16, Block.BF16)}.get(dtype)
        if block is None:
            raise ModelError(
                f"{source.reader.path}: {tensor.stored_name} is {dtype}, which GGUF cannot store; convert it to float32"
            )
        return block
    return Block[matrix_block(type_name, tensor.shape[-1])]


def _bytes(source: Source, tensor: ExportedTensor, block: Block, norm_offset: float) -> Iterator[memoryview]:
    """Yield the bytes of one tensor, a few MiB at a time."""
    if tensor.is_quantized:
        weight, block, data = _encode(source, tensor)
        # The gguf package decodes the blocks, so the check does not depend on the encoder.
        if weight is not None and not torch.equal(
            dequantize_blocks(block, data, weight.shape), weight.dequantize(torch.float32)
        ):
            raise AuditError(f"{tensor.module}: the {block.name} blocks to write do not decode to the source's values")
        yield data.view(-1).numpy().data
        return
    whole = tensor.transposed or tensor.interleave or len(tensor.shape) < 2
    # A matrix whose rows are reordered, or that is transposed, cannot be written in chunks.
    step = tensor.shape[0] if whole else max(1, _CHUNK_VALUES // max(1, tensor.shape[-1]))
    for row in range(0, tensor.shape[0], step):
        if whole:
            values = source.reader.tensor(tensor.stored_name)
            values = interleave(values.t().contiguous() if tensor.transposed else values, tensor.interleave)
        else:
            values = source.reader.rows(tensor.stored_name, row, min(row + step, tensor.shape[0]))
        # Models with an offset multiply by 1 + weight; llama.cpp multiplies by the stored weight.
        if tensor.is_norm:
            values = values.float() + norm_offset
        yield round_to_blocks(values, block).view(-1).numpy().data


def _encode(source: Source, tensor: ExportedTensor) -> tuple[QuantizedTensor | None, Block, Tensor]:
    """Return the weight of a quantized linear, its GGUF type and its blocks. If the source already stores the linear in
    blocks, these blocks are returned, and None for the weight.
    """
    rows = interleave(torch.arange(tensor.shape[0]), tensor.interleave)
    dtype = source.linears[tensor.module].weight.dtype
    if dtype.block is not None:  # blocks already
        stored = source.reader.tensor(f"{tensor.module}.weight_{dtype.name}")
        return None, Block[dtype.name.upper()], stored[rows]
    weight = source.weight(tensor.module).take_rows(rows)
    with located(tensor.module):
        return (weight, *FORMAT.blocks(weight))


def _read_back(path: Path, tensors: Mapping[str, tuple[Block, tuple[int, ...]]], digests: Mapping[str, str]) -> None:
    written = read_gguf(path)
    if {name: (info.block, info.shape) for name, info in written.tensors.items()} != dict(tensors):
        raise AuditError(f"the header of {path.name} reads back differently from what was written; run again")
    for name, expected in digests.items():
        digest = hashlib.sha256()
        for chunk in written.chunks(name):
            digest.update(chunk)
        if digest.hexdigest() != expected:
            raise AuditError(f"{path.name}: tensor {name} differs from what was written; check the disk and run again")


def _file_type(plan: Typed) -> FileType:
    """Return ggml's file type for the block type that most of the layers' matrices have."""
    common = Counter(
        block for tensor, block in plan if tensor.name.startswith("blk.") and len(tensor.shape) == 2
    ).most_common(1)
    return _FILE_TYPES.get(common[0][0].name.lower(), FileType.ALL_F32) if common else FileType.ALL_F32
