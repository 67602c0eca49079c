"""View a quantized checkpoint as an unquantized model of its dequantized values, with the original names and shapes.

A weight is dequantized when it is read; stacked experts are dequantized one by one. A caller that reads layer by layer
therefore holds the values of only one layer. The values equal those that the format's own library computes from codes
and scales, in the dtype of config.json. The view has no quantization_config, and no scales of inputs or of a KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoints.encoded_weight import EncodedInfo
from quantkit.checkpoints.folder import CONFIG_NAME, gguf_model
from quantkit.checkpoints.header import TensorInfo
from quantkit.checkpoints.kv_cache_entries import is_cache_scale
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import CheckpointError, located
from quantkit.formats import SECTIONS, is_gguf, recognise
from quantkit.formats.base import FLOAT_DTYPES, Format
from quantkit.formats.gguf import FORMAT as GGUF
from quantkit.models.config import NotNative
from quantkit.models.families import find
from quantkit.numerics.scheme import LinearScheme, Scheme
from quantkit.quantities import dtype_name

_SECTION = "quantization_config"
_TEXT = "text_config"


def open_dense(path: Path) -> CheckpointReader:
    """Open a checkpoint, quantized or not, as an unquantized model.

    Args:
        path: directory of the checkpoint, or a GGUF file.
    Raises:
        ModelError, CheckpointError: the directory holds no checkpoint, or the checkpoint is damaged or has an
            unsupported quantization method.
        SchemeError: quantkit knows the format, but cannot decode the variant that config.json describes.
    """
    reader = CheckpointReader(path)
    if is_gguf(reader.path):
        tensors = gguf_model(reader.path).tensors(codes=False)
        return reader.view(tensors, _without_section(reader.config), _note(GGUF, tensors, _value_dtype(reader.config)))
    described = recognise(_with_section(reader.config), str(reader.path / CONFIG_NAME))
    if described is None:
        return reader
    source = _Source(reader, *described, _value_dtype(reader.config), _transposed(reader.config))
    tensors = source.tensors()
    return reader.view(tensors, _without_section(reader.config), _note(source.format, tensors, source.dtype))


@dataclass(frozen=True, slots=True)
class _Source:
    """What the headers and the config.json of a quantized checkpoint say about its weights.

    Args:
        reader: reader of the checkpoint's files.
        format, scheme: format and scheme of the weights.
        dtype: dtype of the dequantized values.
        transposed: name suffixes of the linears whose weights the model keeps as (K, N).
    """

    reader: CheckpointReader
    format: Format
    scheme: Scheme
    dtype: torch.dtype
    transposed: tuple[str, ...]

    def tensors(self) -> dict[str, TensorInfo]:
        """Return the descriptions of all tensors of the unquantized model, keyed by name."""
        reader, weights = self.reader, self.format.stored_weights(self.reader.names)
        if not weights and self.scheme.default is not None:
            raise CheckpointError(
                f"{reader.path}: config.json says {self.format.name}, but no weight has tensors of that format; "
                "copy the config.json that belongs to these weights"
            )
        hidden = {name for parts in weights.values() for name in parts.values()}
        tensors = {name: reader.info(name) for name in reader.names if name not in hidden and not is_cache_scale(name)}
        for name, info in tensors.items():
            if name.endswith(".weight") and info.dtype not in FLOAT_DTYPES and len(info.shape) > 1:
                raise CheckpointError(
                    f"{reader.path}: {name} holds codes ({info.kind}) without {self.format.scale_name or 'scales'}; "
                    "download the checkpoint again, with its config.json"
                )
        return tensors | {name: self._encoded(name, parts) for name, parts in weights.items()}

    def _encoded(self, name: str, parts: Mapping[str, str]) -> EncodedInfo:
        module = name.removesuffix(".weight")
        where = f"{self.reader.path}: {module}"
        with located(where):
            infos = {local: self.reader.info(full) for local, full in parts.items()}
            # If the parts stack experts (E, ...), check those of the first expert.
            stack = () if name != module else (_stacked(infos),)
            matrix = {local: info.item(0) for local, info in infos.items()} if stack else infos
            scheme = self._scheme(module)
            shape = self._shape(matrix, parts, scheme)
        transposed = self.format.is_stacked or module.endswith(self.transposed)
        shape = (*stack, *(shape[::-1] if transposed else shape))
        first = next(iter(infos.values()))
        facts = {"where": where, "parts": infos, "scheme": scheme, "transposed": transposed}
        return EncodedInfo.of(first, shape, self.dtype, decoder=self.format.decode, **facts)

    def _scheme(self, module: str) -> LinearScheme:
        """Return the scheme of a module that is stored as codes."""
        linear = self.scheme.find(module)
        if linear is None:  # a multimodal wrapper's files may use other module names than its config.json
            known = {self.scheme.default, *(rule.linear for rule in self.scheme.rules)} - {None}
            if len(known) != 1:
                raise CheckpointError("is quantized, but config.json does not say how; copy the original config.json")
            (linear,) = known
        assert linear is not None
        return linear

    def _shape(
        self, infos: Mapping[str, TensorInfo], parts: Mapping[str, str], scheme: LinearScheme
    ) -> tuple[int, int]:
        if self.format.scale_name and self.format.scale_name not in infos:
            raise CheckpointError(
                f"has {', '.join(sorted(infos))}, but no {self.format.scale_name}; "
                "download the checkpoint again, with its config.json"
            )
        shapes = {local: info.shape for local, info in infos.items()}
        shape = self.format.shape(shapes, scheme, lambda local: self.reader.tensor(parts[local]))
        if shape is None:
            raise CheckpointError(
                f"tensors {', '.join(sorted(infos))} do not form a valid {self.format.name} weight; "
                "download the checkpoint again"
            )
        return shape


def _note(format_: Format, tensors: Mapping[str, TensorInfo], dtype: torch.dtype) -> str:
    """Return the note that tells the user how many weights are dequantized."""
    number = sum(isinstance(info, EncodedInfo) and len(info.shape) > 1 for info in tensors.values())
    name = dtype_name(dtype)
    return f"the source is quantized ({format_.name}): {number} weights are dequantized to {name} when they are read"


def _stacked(infos: Mapping[str, TensorInfo]) -> int:
    """Return the number of experts in a stack; all parts of the stack (codes, scales, ...) must have this number."""
    sizes = {local: info.shape[:1] for local, info in infos.items()}
    if len(set(sizes.values())) > 1 or () in sizes.values() or (0,) in sizes.values():
        listed = ", ".join(f"{local} {infos[local].shape}" for local in sorted(infos))
        raise CheckpointError(
            f"parts of one stack of experts differ in the number of experts: {listed}; download the checkpoint again"
        )
    return next(iter(sizes.values()))[0]


def _with_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with quantization_config at the top level; some multimodal models have it under text_config."""
    inner = config.get(_TEXT)
    if _SECTION in config or not isinstance(inner, Mapping) or _SECTION not in inner:
        return config
    return {**config, _SECTION: inner[_SECTION]}


def _without_section(config: Mapping[str, Any]) -> dict[str, Any]:
    inner = config.get(_TEXT)
    kept = {key: value for key, value in config.items() if key not in SECTIONS}
    if isinstance(inner, Mapping) and _SECTION in inner:
        kept[_TEXT] = {key: value for key, value in inner.items() if key != _SECTION}
    return kept


def _value_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype in config.json, to which libraries dequantize; bfloat16 if config.json names no dtype."""
    inner = config.get(_TEXT)
    known = {dtype_name(dtype): dtype for dtype in FLOAT_DTYPES}
    for entries in (config, inner if isinstance(inner, Mapping) else {}):
        if (name := entries.get("dtype") or entries.get("torch_dtype")) in known:
            return known[name]
    return torch.bfloat16


def _transposed(config: Mapping[str, Any]) -> tuple[str, ...]:
    try:
        return tuple(f".{name}" for name in find(dict(config)).transposed)
    except NotNative:
        return ()
