"""Adapt fused groups of a quantized model (linears that engines run as one), so that they can replace those of the
original.

AWQ and SmoothQuant move scales between a linear and its source, so a quantized linear does not fit into the original.
This module scales its inputs and outputs back. If the source is a norm, the factors are exact, since both norms are on
disk; if it is another linear, they are fitted by least squares against the original weight.
Shapes: N outputs, K inputs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoints.dense_source import open_dense
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import ModelError
from quantkit.kernels.ops.linear import build_linear
from quantkit.kernels.types import Linear, WrappedLinear
from quantkit.models.linear_sets import LinearSet
from quantkit.numerics.tensor import QuantizedTensor
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.expected_tensors import local_names, stored_scheme
from quantkit.runtime.model.layers import MLP, SideBySide
from quantkit.runtime.model.loader import find_format
from quantkit.runtime.model.model import NativeModel


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FusedGroup:
    """One quantized fused group; compared by identity.

    Args:
        layer: number of its layer.
        name: name of the group, e.g. "q/k/v", "gate/up"; "experts" for a whole mixture.
        modules: full names of its linears.
        part: object and attribute that it replaces in the original.
        replacement: the quantized module for this attribute.
        quantized_bytes, stored_bytes, dense_bytes: bytes quantized, as stored by the original, and in 16 bits.
    """

    layer: int
    name: str
    modules: tuple[str, ...]
    part: tuple[Any, str]
    replacement: Any
    quantized_bytes: int
    stored_bytes: int
    dense_bytes: int


class Rescaled(WrappedLinear):
    """A linear whose inputs and outputs are multiplied by factors.

    Args:
        linear: the linear, (T, K) -> (T, N).
        inputs: (K,) factors of its input, or None.
        outputs: (N,) factors of its output, or None.
    """

    def __init__(self, linear: Linear, inputs: Tensor | None, outputs: Tensor | None) -> None:
        super().__init__(linear, lambda x: x if inputs is None else (x * inputs).to(x.dtype))
        self._outputs = outputs

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        y = super().__call__(x)
        return y if self._outputs is None else (y * self._outputs).to(x.dtype)


@contextmanager
def swapped(groups: list[FusedGroup]) -> Iterator[None]:
    """Replace these groups in the original by their quantized versions inside the block."""
    kept = [getattr(*group.part) for group in groups]
    try:
        for group in groups:
            setattr(*group.part, group.replacement)
        yield
    finally:
        # Also after an error: the same original serves every further measurement.
        for group, value in zip(groups, kept, strict=True):
            setattr(*group.part, value)


class _Slot:
    """One of the linears that `SideBySide` joins, as an attribute that can be replaced."""

    def __init__(self, joined: SideBySide, index: int) -> None:
        self._joined, self._index = joined, index

    @property
    def linear(self) -> Linear:
        """The linear."""
        return self._joined.linears[self._index]

    @linear.setter
    def linear(self, linear: Linear) -> None:
        before, after = self._joined.linears[: self._index], self._joined.linears[self._index + 1 :]
        self._joined.linears = (*before, linear, *after)


def find_fused_groups(llm: LLM, original: LLM, *, moved: bool | None = None, apart: bool = False) -> list[FusedGroup]:
    """Find all quantized fused groups of a model, in execution order.

    Args:
        llm: the quantized model.
        original: the original, loaded in the same dtype; the groups refer to its blocks.
        moved: whether a step of the recipe moved scales between modules; None = unknown.
        apart: give each linear a group of its own. The original then multiplies by its q, k and v one by one.
    Raises:
        ModelError: a model does not use the native backend, or the models differ in dtype or layers.
    """
    ours, theirs = llm.model, original.model
    if not (isinstance(ours, NativeModel) and isinstance(theirs, NativeModel)):
        raise ModelError(f"{llm.path}: a sensitivity map needs the native backend, but this model uses transformers")
    # In another dtype, a swapped group would add its own rounding to the KL.
    if ours.dtype != theirs.dtype or len(ours.blocks) != len(theirs.blocks):
        raise ModelError(f"{llm.path} and {original.path} differ in dtype or layers; load both in the same way")
    family = ours.config.family
    single = apart and family.recurrent is None and not family.parts.gated_query  # whose rows have another order
    sources = _Sources(CheckpointReader(llm.path), open_dense(original.path), family.layers, moved, single)
    return [group for index in range(len(ours.blocks)) for group in _layer_groups(sources, ours, theirs, index)]


def _layer_groups(sources: "_Sources", ours: NativeModel, theirs: NativeModel, index: int) -> Iterator[FusedGroup]:
    """Yield the fused groups of one layer."""
    family = ours.config.family
    parts, here, there = family.parts, ours.blocks[index], theirs.blocks[index]
    mixing, output, recurrent = parts.qkv, parts.output, family.recurrent
    if recurrent is not None and ours.config.recurrent[index]:
        mixing = tuple(map(recurrent.name, (*recurrent.inputs, *recurrent.gates)))
        output = recurrent.name("out_proj")
    # In a recurrent layer, `qkv` is a property that returns `inputs`, so the attribute to replace is `inputs`.
    first = "inputs" if mixing is not parts.qkv else "qkv"
    linears = [(mixing, "attention", first), ((output,), "attention", "output")]
    if isinstance(here.mlp, MLP):
        linears += [(parts.up, "mlp", "up"), ((parts.down,), "mlp", "down")]
    sets = family.sets_of_layer(partial(sources.has, index), sources.original.config)
    for names, side, attribute in linears:
        modules = tuple(f"{sources.layers}.{index}.{name}" for name in names)
        if sources.apart and len(names) > 1:
            yield from sources.split(index, names, (getattr(there, side), attribute), theirs, sets)
        elif any(sources.is_quantized(module) for module in modules):
            linear = sources.fit(getattr(getattr(here, side), attribute), names, index, sets)
            name = "/".join(name.rpartition(".")[2].removesuffix("_proj") for name in names)
            yield sources.group(index, name, modules, (getattr(there, side), attribute), linear)
    if not isinstance(here.mlp, MLP):
        prefix = f"{sources.layers}.{index}.mlp."
        experts = tuple(name for name in sources.modules if name.startswith(prefix) and sources.is_quantized(name))
        if experts:
            yield sources.group(index, "experts", experts, (there, "mlp"), here.mlp)


class _Sources:
    """Both checkpoints on disk.

    Args:
        quantized, original: readers of the checkpoints.
        layers: name of the list of decoder layers.
        moved, apart: see `find_fused_groups`.
    """

    def __init__(
        self, quantized: CheckpointReader, original: CheckpointReader, layers: str, moved: bool | None, apart: bool
    ) -> None:
        self.quantized, self.original, self.layers = quantized, original, layers
        self.modules = local_names(quantized)
        self._stored = find_format(quantized)
        self._moved, self.apart = moved, apart

    def is_quantized(self, module: str) -> bool:
        """Whether a linear is stored as codes."""
        return stored_scheme(module, self.modules.get(module, ()), self._stored[1]) is not None

    def has(self, layer: int, name: str) -> bool:
        """Whether a layer of the original has a linear or norm of this relative name."""
        return f"{self.layers}.{layer}.{name}.weight" in self.original

    def group(
        self, layer: int, name: str, modules: tuple[str, ...], part: tuple[Any, str], replacement: Any
    ) -> FusedGroup:
        """Create a group with its sizes."""
        dense = [self.original.info(f"{module}.weight") for module in modules if f"{module}.weight" in self.original]
        return FusedGroup(
            layer=layer,
            name=name,
            modules=modules,
            part=part,
            replacement=replacement,
            quantized_bytes=sum(
                self.quantized.info(f"{module}.{local}").num_bytes
                for module in modules
                for local in self.modules[module]
            ),
            stored_bytes=sum(info.num_bytes for info in dense),
            dense_bytes=sum(2 * info.num_bytes // info.dtype.itemsize for info in dense),
        )

    def split(
        self,
        index: int,
        names: tuple[str, ...],
        part: tuple[Any, str],
        model: NativeModel,
        sets: tuple[LinearSet, ...],
    ) -> Iterator[FusedGroup]:
        """Yield a group for each of several linears that read the same input; part the original's own first.

        Args:
            index: number of the layer.
            names: names of the linears in the layer.
            part: where the original has them.
            model: the original.
            sets: see `fit`.
        """
        modules = [f"{self.layers}.{index}.{name}" for name in names]
        joined = getattr(*part)
        if not isinstance(joined, SideBySide):
            joined = SideBySide([self._linear(self.original, module, model) for module in modules])
            setattr(*part, joined)
        for number, (name, module) in enumerate(zip(names, modules, strict=True)):
            if self.is_quantized(module):
                linear = self.fit(self._linear(self.quantized, module, model), (name,), index, sets)
                short = name.rpartition(".")[2].removesuffix("_proj")
                yield self.group(index, short, (module,), (_Slot(joined, number), "linear"), linear)

    def _linear(self, reader: CheckpointReader, module: str, model: NativeModel) -> Linear:
        """Build a linear of one of the two checkpoints."""
        weight: Tensor | QuantizedTensor
        weight = reader.tensor(f"{module}.weight") if reader is self.original else self._decoded(module)
        bias = reader.tensor(f"{module}.bias").to(model.device, model.dtype) if f"{module}.bias" in reader else None
        return build_linear(weight, bias=bias, dtype=model.dtype, device=model.device)

    def _decoded(self, module: str) -> QuantizedTensor:
        """Read a quantized weight."""
        format_, scheme = self._stored
        linear = None if scheme is None else scheme.find(module)
        assert format_ is not None and linear is not None, module
        tensors = {name: self.quantized.tensor(f"{module}.{name}") for name in self.modules[module] if name != "bias"}
        return format_.decode(tensors, linear)

    def fit(self, linear: Linear, names: tuple[str, ...], index: int, sets: tuple[LinearSet, ...]) -> Linear:
        """Scale the linear's inputs and outputs to fit the original's modules before and after it."""
        prefix = f"{self.layers}.{index}."
        home = next((group for group in sets if set(names) & set(group.linears)), None)
        # If no scales were moved, the quantized linear fits unchanged.
        if home is None or self._moved is False:
            return linear
        inputs = None if home.source is None else self._norm_ratio(prefix + home.source)
        if self._moved is None and inputs is None:
            return linear  # there is no sign that scales were moved
        feeds = {group.source for group in sets}
        source = f"{prefix}{home.source}.weight"
        # A norm stores a vector, a linear a matrix: the shape tells which of them feeds this one.
        is_linear = home.source is not None and source in self.original and len(self.original.info(source).shape) > 1
        if inputs is None and is_linear and len(names) == 1:
            inputs = _ratio(*self._pair(prefix + names[0]), dim=0)
        outputs = None
        # A linear that feeds a smoothed one carries the inverse factors on its own rows.
        if feeds & set(names):
            outputs = torch.cat([self._row_ratio(prefix + name, inputs, name in feeds) for name in names])
        if inputs is None and outputs is None:
            return linear
        return Rescaled(linear, inputs, outputs)

    def _norm_ratio(self, norm: str) -> Tensor | None:
        """Return the factors (K,) between the two norms; None if the source is a linear or the norms are equal."""
        name = f"{norm}.weight"
        if name not in self.original or name not in self.quantized or len(self.original.info(name).shape) != 1:
            return None
        before, after = self.original.tensor(name).float(), self.quantized.tensor(name).float()
        if torch.equal(before, after):
            return None
        # A channel that the norm switches off is zero in the original, whatever its factor.
        return torch.where(before == 0, torch.ones_like(before), after / before)

    def _row_ratio(self, module: str, inputs: Tensor | None, scaled: bool) -> Tensor:
        """Return the factors (N,) of the outputs."""
        # Of fused linears, some may feed no other linear, e.g. q and k of q/k/v; they keep their scale.
        if not scaled:
            return torch.ones(self.original.info(f"{module}.weight").shape[0])
        weight, target = self._pair(module)
        return _ratio(weight if inputs is None else weight * inputs, target, dim=1)

    def _pair(self, module: str) -> tuple[Tensor, Tensor]:
        """Return the dequantized weight and the original weight, (N, K) float32."""
        target = self.original.tensor(f"{module}.weight").float()
        if not self.is_quantized(module):
            return self.quantized.tensor(f"{module}.weight").float(), target
        return self._decoded(module).dequantize(torch.float32), target


def _ratio(weight: Tensor, target: Tensor, dim: int) -> Tensor:
    """Fit by least squares a factor for each row (dim 1) or column (dim 0) of a weight to match another weight."""
    norm = (weight * weight).sum(dim)
    # Least squares for a single factor has this closed form; a weight of zeros leaves the factor open.
    return torch.where(norm == 0, torch.ones_like(norm), (weight * target).sum(dim) / norm)
