"""Present a GGUF file as the checkpoint folder that it was made from: config.json, tensors and tokenizer files.

Tensors have the names, row order and shapes of the Hugging Face checkpoint. A linear stored in a GGUF type of the Q, K
or MXFP4 series (not IQ or TQ) becomes one tensor of bytes, such as `weight_q4_k` (N, bytes of a row), which
`formats.gguf` decodes. Other quantized tensors, and the embedding if it is quantized, are dequantized to the model's
dtype when they are read. Opening the file reads only headers, metadata and rotary factors.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Block

from quantkit.checkpoints.encoded_weight import BlocksInfo, LatentInfo
from quantkit.checkpoints.gguf_config import Lookup, build_config
from quantkit.checkpoints.gguf_tokenizer import tokenizer_files
from quantkit.checkpoints.header import TensorInfo, kind_of
from quantkit.errors import CheckpointError
from quantkit.formats.base import FLOAT_DTYPES
from quantkit.formats.ggml.blocks import PLAIN
from quantkit.formats.ggml.codes import SCHEMES
from quantkit.formats.ggml.gguf_file import GGUFFile, GGUFTensor, read_gguf
from quantkit.formats.gguf import FORMAT
from quantkit.models.description import describe
from quantkit.models.gguf_names import EXPERTS, interleaved_heads, layer_names, norm_modules, outer_names, vector_names
from quantkit.models.layer_tensors import model_tensors
from quantkit.models.linear_sets import at
from quantkit.safety.untrusted import CHUNK_BYTES, file_stamp, read_chunks, shorten

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(.+)")
_DAMAGED = "download the file again, or all its parts if it is split"
_KEYS, _VALUES = "attn_k_b.weight", "attn_v_b.weight"
_ROTARY = re.compile(r"(blk\.\d+\.)?rope_(freqs|factors_long|factors_short)\.weight")


@dataclass(frozen=True, slots=True)
class _Stored:
    """A stored tensor, and the file that holds it."""

    file: Path
    name: str
    info: GGUFTensor

    @property
    def where(self) -> str:
        return f"{self.file}: {self.name}"

    def rows(self) -> TensorInfo:
        """Describe the tensor as rows of bytes, or as rows of elements if it is not quantized."""
        info, dtype = self.info, PLAIN.get(self.info.block, torch.uint8)
        shape = info.shape
        if info.is_quantized:
            shape = (*shape[:-1], info.num_bytes * shape[-1] // max(1, torch.Size(shape).numel()))
        return TensorInfo(
            kind=kind_of(dtype), shape=shape, file=self.file, offset=info.offset, num_bytes=info.num_bytes
        )


class GGUFModel:
    """A model in one GGUF file, or in several parts of a split file.

    Args:
        path: the file, or the first part of a split file.
    Raises:
        CheckpointError: a file is damaged or missing, or tensors are missing, unknown, or have wrong shapes.
        ModelError: the architecture is not supported.
    Attributes:
        files: paths of all files of the model.
        config: contents of config.json, with a `quantization_config` that lists the quantized linears by GGUF type.
    """

    def __init__(self, path: Path) -> None:
        self._path, parts = path, _open(path)
        self.files = tuple(part.path for part in parts)
        self._stored = {name: _Stored(part.path, name, info) for part in parts for name, info in part.tensors.items()}
        shapes = {name: stored.info.shape for name, stored in self._stored.items()}
        metadata = parts[0].metadata
        family, config = build_config(metadata, Lookup(str(path), shapes, self._vector))
        self.config = {**config, "dtype": str(self._dtype()).removeprefix("torch.")}
        self._model = describe(self.config, family, str(path))
        self._texts = functools.partial(tokenizer_files, metadata, str(path), shapes["token_embd.weight"][0])
        self._sources = dict(self._find_sources())
        self._check_shapes()
        types: dict[str, list[str]] = {}
        for name, (stored, _) in self._sources.items():
            if self._has_codes(name, stored):
                types.setdefault(stored.info.block.name, []).append(name.removesuffix(".weight"))
        if types:
            self.config["quantization_config"] = {"quant_method": FORMAT.name, "types": types}

    @property
    def note(self) -> str:
        """A note for the user about linears that are read as values instead of codes; "" = there are none."""
        others = sorted(
            {
                stored.info.block.name
                for name, (stored, _) in self._sources.items()
                if stored.info.is_quantized and not self._has_codes(name, stored) and name != self._embedding
            }
        )
        return f"linears of GGUF types {', '.join(others)} are decoded to {self.config['dtype']}" if others else ""

    def tensors(self, *, codes: bool) -> dict[str, TensorInfo]:
        """Return the descriptions of all tensors, keyed by name.

        Args:
            codes: True = linears appear as the bytes of their blocks if their GGUF type is one of `SCHEMES`; False =
                all linears appear as values.
        """
        return dict(self._tensor(name, *source, codes=codes) for name, source in self._sources.items())

    def text_files(self) -> dict[str, dict[str, Any]]:
        """Return the contents of the tokenizer's files and of config.json, keyed by file name.

        config.json is returned without its `quantization_config`.

        Raises:
            CheckpointError, ModelError: the tokenizer is damaged or not supported.
        """
        config = {key: value for key, value in self.config.items() if key != "quantization_config"}
        return {"config.json": config, **self._texts()}

    @property
    def _embedding(self) -> str:
        return f"{self._model.family.embedding}.weight"

    def _dtype(self) -> torch.dtype:
        """Return the dtype of most bytes of unquantized matrices; bfloat16 if there are no unquantized matrices."""
        sizes = dict.fromkeys(FLOAT_DTYPES, 0)
        for stored in self._stored.values():
            if len(stored.info.shape) > 1 and PLAIN.get(stored.info.block) in sizes and "_inp" not in stored.name:
                sizes[PLAIN[stored.info.block]] += stored.info.num_bytes
        return max(sizes, key=lambda dtype: sizes[dtype]) if any(sizes.values()) else torch.bfloat16

    def _vector(self, name: str) -> list[float] | None:
        """Read a short float32 vector, such as rotary factors; None if the file has no tensor of this name."""
        stored = self._stored.get(name)
        if stored is None:
            return None
        if stored.info.block != Block.F32 or len(stored.info.shape) != 1 or stored.info.num_bytes > CHUNK_BYTES:
            raise CheckpointError(
                f"{stored.where} has type {stored.info.block.name} and shape {stored.info.shape}; expected a short F32 "
                f"vector; {_DAMAGED}"
            )
        data = b"".join(read_chunks(stored.file, stored.info.offset, stored.info.num_bytes))
        return torch.frombuffer(bytearray(data), dtype=torch.float32).tolist() if data else []

    def _find_sources(self) -> Iterator[tuple[str, tuple[_Stored, int | None]]]:
        """Find the stored tensor that holds each tensor of the model.

        Yields:
            name: name of the model's tensor.
            source: the stored tensor, and the index of the expert in it; None = the stored tensor stacks no experts.
        """
        model, left = self._model, dict(self._stored)
        outer = {name: module for module, name in outer_names(model.family).items()}
        inner = {name: module for module, name in layer_names(model).items()}
        vectors = {name: own for own, name in vector_names(model).items()}
        for name, stored in left.items():
            match = _LAYER.fullmatch(name)
            module, _, local = (match[2] if match else name).rpartition(".")
            if _ROTARY.fullmatch(name):
                continue
            full = (inner if match else outer).get(module)
            prefix = f"{model.family.layers}.{match[1]}." if match else ""
            if match and model.latent is not None and match[2] in (_KEYS, _VALUES):
                if match[2] == _KEYS:
                    yield f"{prefix}self_attn.kv_b_proj.weight", (stored, None)
            elif match and match[2] in vectors:
                yield prefix + vectors[match[2]], (stored, None)
            elif full is None or local not in ("weight", "bias"):
                raise CheckpointError(
                    f"{stored.where} {stored.info.shape} does not belong to a model of this architecture; {_DAMAGED}"
                )
            elif module.endswith(EXPERTS):
                for expert in range(stored.info.shape[0] if len(stored.info.shape) > 1 else 0):
                    yield f"{prefix}{at(full, expert)}.{local}", (stored, expert)
            else:
                yield f"{prefix}{full}.{local}", (stored, None)

    def _check_shapes(self) -> None:
        """Check that the file has all tensors of the model and no others, in the right shapes."""
        linears, others = model_tensors(self._model)
        expected = others | {f"{name}.weight": shape for name, shape in linears.items()}
        optional = {f"{name}.bias": shape[:1] for name, shape in linears.items()}
        for name, (stored, expert) in self._sources.items():
            shape = stored.info.shape if expert is None else stored.info.shape[1:]
            if stored.name.endswith(_KEYS):
                shape = self._latent_shape(stored)
            if stored.info.is_quantized and len(shape) < 2:
                raise CheckpointError(
                    f"{stored.where} is a vector of type {stored.info.block.name}, but only matrices can be quantized; "
                    f"{_DAMAGED}"
                )
            required = expected.pop(name, None) or optional.get(name)
            # The gate of a shared expert, a matrix with one row, is stored as a vector.
            if shape != required and (required is None or (1, *shape) != required):
                wrong = f"has shape {shape}, but the metadata requires {required}"
                if required is None:
                    wrong = "does not belong to a model with this metadata"
                raise CheckpointError(f"{stored.where} {wrong}; {_DAMAGED}")
        missing = [name for name in expected if not name.endswith(".bias")]
        if missing:
            raise CheckpointError(
                f"{self._path}: {len(missing)} tensors are missing, for example the one for {missing[0]}; {_DAMAGED}"
            )

    def _latent_shape(self, keys: _Stored) -> tuple[int, ...]:
        """Check the two tensors that store `kv_b_proj`, one for keys and one for values; return its shape."""
        sizes, heads = self._model.latent, self._model.num_heads
        values = self._stored.get(keys.name.replace(_KEYS, _VALUES))
        assert sizes is not None
        required = (heads, sizes.rank, sizes.plain_dim), (heads, sizes.value_dim, sizes.rank)
        if values is None or (keys.info.shape, values.info.shape) != required:
            raise CheckpointError(
                f"{keys.where} and {_VALUES} must have the shapes {required[0]} and {required[1]}; {_DAMAGED}"
            )
        return heads * (sizes.plain_dim + sizes.value_dim), sizes.rank

    def _has_codes(self, name: str, stored: _Stored) -> bool:
        if stored.name.endswith(_KEYS):
            return False
        return stored.info.block.name in SCHEMES and name.endswith(".weight") and name != self._embedding

    def _tensor(self, name: str, stored: _Stored, expert: int | None, *, codes: bool) -> tuple[str, TensorInfo]:
        """Return the name and the description of one tensor."""
        model, block, rows = self._model, stored.info.block, stored.rows()
        shape = stored.info.shape
        if expert is not None:
            rows, shape = rows.item(expert), shape[1:]
        if stored.name.endswith(_KEYS):
            values = self._stored[stored.name.replace(_KEYS, _VALUES)]
            key, value = (
                self._blocks(part, part.rows(), part.info.shape, part.info.block) for part in (stored, values)
            )
            facts = {"where": stored.where, "parts": key.parts, "key": key, "value": value}
            return name, LatentInfo.of(key, self._latent_shape(stored), key.dtype, **facts)
        relative = re.sub(rf"{re.escape(model.family.layers)}\.\d+\.", "", name, count=1)
        module = relative.rpartition(".")[0]
        heads = interleaved_heads(model).get(module, 0)
        added = model.family.norm_offset if module in norm_modules(model) and relative.endswith(".weight") else 0.0
        local = f"weight_{block.name.lower()}"
        if codes and self._has_codes(name, stored):
            name = f"{name.removesuffix('weight')}{local}"
            if not heads:
                return name, rows
            return name, self._blocks(stored, rows, rows.shape, None, heads=heads)
        if model.family.experts is not None and module == model.family.experts.shared_gate and len(shape) == 1:
            rows, shape = replace(rows, shape=(1, *rows.shape)), (1, *shape)
        transposed = module in model.family.transposed and len(shape) == 2
        if not (stored.info.is_quantized or heads or added or transposed):
            return name, rows
        return name, self._blocks(stored, rows, shape, block, heads=heads, added=added, transposed=transposed)

    def _blocks(
        self, stored: _Stored, rows: TensorInfo, shape: tuple[int, ...], block: Block | None, **facts: Any
    ) -> BlocksInfo:
        # GGUF types with minimums get no scheme: output formats store zero points as whole numbers.
        scheme = SCHEMES.get(block.name) if block is not None else None
        scheme = scheme if scheme is not None and scheme.weight.symmetric else None
        dtype = torch.uint8 if block is None else getattr(torch, self.config["dtype"])
        if block in PLAIN:
            dtype = PLAIN[block]
        shape = shape[::-1] if facts.get("transposed") else shape
        parts = {f"weight_{'' if block is None else block.name.lower()}": rows}
        facts |= {"where": stored.where, "parts": parts, "scheme": scheme, "block": block}
        return BlocksInfo.of(rows, shape, dtype, decoder=FORMAT.decode, **facts)


def open_gguf(path: Path) -> GGUFModel:
    """Read the headers of a GGUF model; the last two models are cached until their files change.

    Raises:
        CheckpointError, ModelError: see `GGUFModel`.
    """
    return _opened(path, tuple(map(file_stamp, _parts(path))))


@functools.lru_cache(maxsize=2)
def _opened(path: Path, _stamps: tuple[tuple[int, int], ...]) -> GGUFModel:
    return GGUFModel(path)


def _parts(path: Path) -> list[Path]:
    """Return the paths of all parts of a split file, given its first part; for any other file, only its own path."""
    match = _SPLIT.fullmatch(path.name)
    if match is None or int(match[2]) != 1:
        return [path]
    return [path.with_name(f"{match[1]}-{part:05d}-of-{match[3]}.gguf") for part in range(1, int(match[3]) + 1)]


def _open(path: Path) -> list[GGUFFile]:
    """Read the headers of a file, or of all parts of a split file."""
    first = read_gguf(path)
    count, number = (first.metadata.get(f"split.{key}", default) for key, default in (("count", 1), ("no", 0)))
    if count == 1 and number == 0:
        return [first]
    paths = _parts(path)
    if number != 0 or len(paths) != count:
        raise CheckpointError(
            f"{path} is not the first part of a split file (split.no {shorten(number)}, split.count {shorten(count)}), "
            "or was renamed; give the first part under its published name, ...-00001-of-0000N.gguf, and keep all parts "
            "in its folder"
        )
    parts, seen = [first], set(first.tensors)
    for index, other in enumerate(paths[1:], 1):
        parts.append(read_gguf(other))
        if parts[-1].metadata.get("split.no") != index or parts[-1].metadata.get("split.count") != count:
            raise CheckpointError(f"{other} is not part {index + 1} of {path}; {_DAMAGED}")
        if twice := seen & parts[-1].tensors.keys():
            raise CheckpointError(f"{other}: tensor {min(twice)} is already in an earlier part; {_DAMAGED}")
        seen |= parts[-1].tensors.keys()
    total = first.metadata.get("split.tensors.count", len(seen))
    if total != len(seen):
        raise CheckpointError(
            f"{path}: the parts have {len(seen)} tensors, but split.tensors.count is {shorten(total)}; {_DAMAGED}"
        )
    return parts
