"""Source checkpoint of a conversion: its quantized linears, their schemes and their weights.

Headers are read first. Tensors are read later, one linear at a time. Shapes: N outputs, K inputs, G scales per row.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from quantkit.checkpoints.dense_source import open_dense
from quantkit.checkpoints.folder import CONFIG_NAME
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import CheckpointError, SchemeError, located
from quantkit.formats import is_gguf, recognise
from quantkit.formats.base import Format, by_module, stores_codes
from quantkit.formats.dense import FORMAT as DENSE
from quantkit.numerics.scheme import LinearScheme
from quantkit.numerics.tensor import QuantizedTensor

_LAYER = re.compile(r"(?:.*?\.)?(?:layers|h|blocks|layer)\.(\d+)\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A checkpoint directory or GGUF file whose headers have been read.

    Args:
        reader: reader of the checkpoint's files.
        format: format of the quantized linears; the dense format for an unquantized model.
        linears: scheme of each quantized linear, keyed by full module name.
        modules: names of each module's tensors relative to the module, keyed by full module name, in layer order.
        dense: for a GGUF file, reader of the dequantized values, because other formats cannot store the codes of GGUF
            types with minimums exactly; None for other checkpoints.
        weights: weights that replace those of the files, keyed by full module name.
        changed: other tensors that replace those of the files, keyed by full name.
    """

    reader: CheckpointReader
    format: Format
    linears: dict[str, LinearScheme]
    modules: dict[str, list[str]]
    dense: CheckpointReader | None = None
    weights: Mapping[str, QuantizedTensor] = field(default_factory=dict)
    changed: Mapping[str, Tensor] = field(default_factory=dict)

    def names(self, module: str) -> list[str]:
        """Return the full names of a module's tensors."""
        return [f"{module}.{local}" if module else local for local in self.modules[module]]

    def shape(self, module: str) -> tuple[int, int] | None:
        """Return the shape (N, K) of a quantized linear from its headers; None = the headers do not determine it."""
        shapes = {local: self.reader.info(f"{module}.{local}").shape for local in self.modules[module]}
        return self.format.shape(shapes, self.linears[module])

    def weight(self, module: str) -> QuantizedTensor:
        """Read and decode the weight of a quantized linear.

        Raises:
            QuantkitError: the weight cannot be decoded; the message starts with the path and the module's name.
        """
        if module in self.weights:
            return self.weights[module]
        tensors = {local: self.reader.tensor(f"{module}.{local}") for local in self.modules[module]}
        with located(f"{self.reader.path}: {module}"):
            return self.format.decode(tensors, self.linears[module])

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of this full name."""
        return self.changed[name] if name in self.changed else self.reader.tensor(name)

    def is_reordered(self, module: str) -> bool:
        """Whether the groups of a linear are in activation order; reads the linear's group index."""
        name = self.format.order_name
        # In input order, the group index never decreases.
        return name in self.modules[module] and bool((self.reader.tensor(f"{module}.{name}").diff() < 0).any())

    def layers(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the name and the modules of each decoder layer, then "" and all other modules. The modules of one item
        are converted together.
        """
        layers: dict[str, list[str]] = {}
        for module in self.modules:
            match = _LAYER.match(f"{module}.")
            layers.setdefault(match.group(0).rstrip(".") if match else "", []).append(module)
        rest = layers.pop("", [])  # embedding and head come last, as in `quantize`
        yield from layers.items()
        yield "", rest


def open_source(path: Path) -> Source:
    """Read the headers of a checkpoint.

    Args:
        path: directory of the checkpoint, or a GGUF file.
    Raises:
        ModelError, CheckpointError: the directory holds no checkpoint, or the checkpoint is damaged or has an unknown
            format.
        SchemeError: the format is known, but quantkit cannot decode this variant.
    """
    reader = CheckpointReader(path)
    modules = by_module(reader.names)
    described = recognise(reader.config, str(reader.path / CONFIG_NAME))
    if described is None:
        return Source(reader=reader, format=DENSE, linears={}, modules=modules)
    format_, scheme = described
    if format_.is_stacked:
        raise SchemeError(
            f"{reader.path}: stacked experts in {format_.name} cannot be converted; use `quantkit quantize`"
        )
    schemes = {module: scheme.find(module) for module, tensors in modules.items() if stores_codes(tensors)}
    linears = {module: linear for module, linear in schemes.items() if linear is not None}
    if not linears and scheme.default is None:
        raise CheckpointError(
            f"{reader.path}: only the KV cache is quantized, so there are no weights to convert; use it unchanged"
        )
    if not linears:
        raise CheckpointError(
            f"{reader.path}: config.json says {format_.name}, but no module has tensors of that format; "
            "copy the config.json that belongs to these weights"
        )
    dense = open_dense(path) if is_gguf(reader.path) else None
    return Source(reader=reader, format=format_, linears=linears, modules=modules, dense=dense)
