"""Adapt fused groups of a quantized model, so that they can replace the same groups in the original model.

AWQ and SmoothQuant move scales between a linear and the norm or linear before it, its *source*. A quantized linear
alone therefore does not fit into the original model. This module scales the quantized linear's inputs and outputs back.
If the source is a norm, the factors are exact, because both models store this norm. If the source is a linear, the
factors are fitted by least squares against the original weight.
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
        layer: index of the decoder layer.
        name: name of the group, e.g. "q/k/v", "gate/up"; "experts" for all experts of a layer.
        modules: full names of the group's linears.
        part: (object, attribute) of the original model at which the group is replaced.
        replacement: quantized module to put there.
        quantized_bytes, stored_bytes, dense_bytes: bytes of the group when quantized, as the original stores it, and in
            16 bits.
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
        inputs: factors of the inputs, (K,); None = 1.
        outputs: factors of the outputs, (N,); None = 1.
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
    """Replace groups of the original model by their quantized versions inside the `with` block.

    Inside the block, steps must run layer by layer, see `Runner.layer_by_layer`.
    """
    kept = [getattr(*group.part) for group in groups]
    try:
        for group in groups:
            setattr(*group.part, group.replacement)
        yield
    finally:
        # Also after an error, because every further measurement uses the same original.
        for group, value in zip(groups, kept, strict=True):
            setattr(*group.part, value)


class _Slot:
    """One linear of a `SideBySide`, as an attribute that can be replaced."""

    def __init__(self, joined: SideBySide, index: int) -> None:
        self._joined, self._index = joined, index

    @property
    def linear(self) -> Linear:
        """The linear at this index."""
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
        apart: whether to treat each linear as a separate group. The original is then changed to compute q, k and v one
            by one. Ignored for models with recurrent layers or gated queries.
    Raises:
        ModelError: a model runs through transformers or has adapters, or the models differ in dtype or in their number
            of layers.
    """
    ours, theirs = llm.model, original.model
    if not (isinstance(ours, NativeModel) and isinstance(theirs, NativeModel)):
        raise ModelError(
            f"{llm.path}: quantkit runs this model through transformers, but a sensitivity map needs a model that "
            "quantkit's engine runs itself"
        )
    if ours.adapters.by_name:
        raise ModelError(
            "a sensitivity map swaps parts between models, which is impossible with an adapter; leave --adapter out"
        )
    # In another dtype, a swapped group would add its own rounding to the KL.
    if ours.dtype != theirs.dtype:
        raise ModelError(
            f"{llm.path} runs in {ours.dtype}, but {original.path} runs in {theirs.dtype}; load both in the same dtype"
        )
    if len(ours.blocks) != len(theirs.blocks):
        raise ModelError(
            f"{llm.path} has {len(ours.blocks)} layers, but {original.path} has {len(theirs.blocks)}; give the model "
            "that the checkpoint was made from"
        )
    family = ours.config.family
    single = apart and family.recurrent is None and not family.parts.gated_query  # gates are among the query rows
    sources = _Sources(CheckpointReader(llm.path), open_dense(original.path), family.layers, moved, single)
    return [group for index in range(len(ours.blocks)) for group in _layer_groups(sources, ours, theirs, index)]


def _layer_groups(sources: "_Sources", ours: NativeModel, theirs: NativeModel, index: int) -> Iterator[FusedGroup]:
    """Yield the quantized fused groups of one layer."""
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
    """Reads the quantized checkpoint and the original, and creates fused groups from them.

    Args:
        quantized, original: readers of the checkpoints.
        layers: name of the list of decoder layers, e.g. "model.layers".
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
        """Whether a layer of the original has a linear or norm with this name inside the layer."""
        return f"{self.layers}.{layer}.{name}.weight" in self.original

    def group(
        self, layer: int, name: str, modules: tuple[str, ...], part: tuple[Any, str], replacement: Any
    ) -> FusedGroup:
        """Create a fused group, with its sizes computed from both checkpoints."""
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
        self, index: int, names: tuple[str, ...], part: tuple[Any, str], model: NativeModel, sets: tuple[LinearSet, ...]
    ) -> Iterator[FusedGroup]:
        """Given several linears that read the same input, yield one `FusedGroup` for each of them that is quantized.

        If the original computes these linears as one, it is first changed to compute them one by one.

        Args:
            index: number of the layer.
            names: names of the linears in the layer.
            part: (object, attribute) of the original that computes these linears.
            model: the original.
            sets: the layer's sets of linears that read the same tensor.
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
        return build_with_bias(weight, reader, module, model)

    def _decoded(self, module: str) -> QuantizedTensor:
        """Read the quantized weight of a linear."""
        format_, scheme = self._stored
        linear = None if scheme is None else scheme.find(module)
        assert format_ is not None and linear is not None, module
        tensors = {name: self.quantized.tensor(f"{module}.{name}") for name in self.modules[module] if name != "bias"}
        return format_.decode(tensors, linear)

    def fit(self, linear: Linear, names: tuple[str, ...], index: int, sets: tuple[LinearSet, ...]) -> Linear:
        """Return a linear, scaled so that it fits between the original's modules; unchanged if no scales were moved.

        Args:
            linear: a quantized linear, or several that are computed as one.
            names: names of these linears in the layer.
            index: number of the layer.
            sets: the layer's sets of linears that read the same tensor.
        """
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
        # A norm stores a vector, a linear a matrix: the shape tells which of them feeds this linear.
        is_linear = home.source is not None and source in self.original and len(self.original.info(source).shape) > 1
        if inputs is None and is_linear and len(names) == 1:
            inputs = _ratio(*self._pair(prefix + names[0]), dim=0)
        outputs = None
        # A linear that feeds a smoothed linear has the inverse factors on its own rows.
        if feeds & set(names):
            outputs = torch.cat([self._row_ratio(prefix + name, inputs, name in feeds) for name in names])
        if inputs is None and outputs is None:
            return linear
        return Rescaled(linear, inputs, outputs)

    def _norm_ratio(self, norm: str) -> Tensor | None:
        """Return a norm's weight in the quantized model divided by its weight in the original, (K,).

        None if both weights are equal, or if `norm` is not the name of a norm.
        """
        name = f"{norm}.weight"
        if name not in self.original or name not in self.quantized or len(self.original.info(name).shape) != 1:
            return None
        before, after = self.original.tensor(name).float(), self.quantized.tensor(name).float()
        if torch.equal(before, after):
            return None
        # If the norm's weight is zero, the channel stays zero whatever its factor.
        return torch.where(before == 0, torch.ones_like(before), after / before)

    def _row_ratio(self, module: str, inputs: Tensor | None, scaled: bool) -> Tensor:
        """Return the factors, (N,), that scale a linear's outputs back to the original's; ones if `scaled` is False."""
        # Some linears of a fused group, e.g. q and k of q/k/v, may feed no other linear; they keep their scale.
        if not scaled:
            return torch.ones(self.original.info(f"{module}.weight").shape[0])
        weight, target = self._pair(module)
        return _ratio(weight if inputs is None else weight * inputs, target, dim=1)

    def _pair(self, module: str) -> tuple[Tensor, Tensor]:
        """Return a linear's weight in the quantized model, dequantized, and in the original; both (N, K) float32."""
        target = self.original.tensor(f"{module}.weight").float()
        if not self.is_quantized(module):
            return self.quantized.tensor(f"{module}.weight").float(), target
        return self._decoded(module).dequantize(torch.float32), target


def build_with_bias(
    weight: Tensor | QuantizedTensor, reader: CheckpointReader, module: str, model: NativeModel
) -> Linear:
    """Build a linear from a weight and the bias that a checkpoint stores for a module, in a model's dtype."""
    bias = reader.tensor(f"{module}.bias").to(model.device, model.dtype) if f"{module}.bias" in reader else None
    return build_linear(weight, bias=bias, dtype=model.dtype, device=model.device)


def _ratio(weight: Tensor, target: Tensor, dim: int) -> Tensor:
    """Return the factors that scale a weight as close to a target as possible, by least squares.

    Args:
        weight, target: (N, K).
        dim: 1 = one factor per row, 0 = one factor per column.
    """
    norm = (weight * weight).sum(dim)
    # Least squares for a single factor has this closed form. For a weight of zeros, every factor is equally good.
    return torch.where(norm == 0, torch.ones_like(norm), (weight * target).sum(dim) / norm)
