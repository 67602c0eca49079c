"""View a checkpoint as one (N, K) tensor per linear, regardless of the layout of its files.

Experts that are stored as one 3-D tensor appear as separate matrices, and matrices that are stored transposed appear as
(N, K). All names have the prefix that transformers' causal LM class gives them. Tensors that transformers merges or
splits on loading appear in their converted form. Creating the view copies no tensor; `restore` converts tensors back
to the layout of the files.
Shapes: E experts, I width of an expert, H hidden width.
"""

import re
import threading
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from quantkit.checkpoints.encoded_weight import EncodedInfo
from quantkit.checkpoints.header import TensorInfo
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import SchemeError
from quantkit.models.family import Experts, Family
from quantkit.models.linear_sets import at
from quantkit.models.stored_names import TensorConversion
from quantkit.numerics.scheme import LinearScheme
from quantkit.numerics.tensor import QuantizedTensor

_T = TypeVar("_T")

# Number of conversion results to cache: gate, up and down of one expert are read in turn, then those of the next.
_KEPT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPart:
    """The part of a stored tensor that belongs to one linear.

    Args:
        stored: full name of the stored tensor.
        expert: index of the expert in the first dimension; None = the tensor has no such dimension.
        outputs: slice of the stored tensor's outputs that belongs to the linear.
        transposed: whether outputs are the last dimension of the stored tensor.
    """

    stored: str
    expert: int | None
    outputs: slice
    transposed: bool

    def of(self, whole: Tensor) -> Tensor:
        """Return the linear's part of a stored tensor as a view, (N, K) for weights and (N,) for biases.

        Args:
            whole: the stored tensor; if it stacks experts, only the slice of this part's expert.
        """
        if not self.transposed:
            return whole[self.outputs]
        return whole[..., self.outputs].mT if whole.dim() == 2 else whole[self.outputs]


class ModelReader(CheckpointReader):
    """Reader of a checkpoint that presents one tensor per linear, whatever the files hold; see the module's docstring.

    Names in arguments and results are those of the view, unless stated otherwise.

    Args:
        path: directory of the checkpoint.
        family: family of the model.
    Raises:
        ModelError, CheckpointError: see `CheckpointReader`.
    """

    def __init__(self, path: Path | str, family: Family) -> None:
        super().__init__(path)
        self._view(family)

    @classmethod
    def of(cls, reader: CheckpointReader, family: Family) -> "ModelReader":
        """Return a reader with one tensor per linear; it reuses the headers that `reader` has read."""
        view = cls.__new__(cls)
        view._share(reader)
        view._view(family)
        return view

    def tensor(self, name: str) -> Tensor:
        part = self._parts.get(name)
        if part is None:
            return self._converted(name).clone() if name in self._made else super().tensor(name)
        whole = self._whole(part.stored, part.expert)
        # A view would keep the whole stored tensor in memory for as long as one part of it is used.
        return part.of(whole).clone(memory_format=torch.contiguous_format)

    def stored_scheme(self, name: str) -> LinearScheme | None:
        """See `CheckpointReader`; the result is also None for tensors that transformers converts on loading."""
        part = self._parts.get(name)
        if name in self._made or (part is not None and part.stored in self._made):
            return None
        return super().stored_scheme(name)

    def codes(self, name: str) -> QuantizedTensor:
        """Return the codes (N, K) of a weight whose `stored_scheme` is not None.

        Raises:
            SchemeError: the weight and another part of the stored tensor share the scale of a block.
        """
        part, info = self._parts.get(name), self._tensors[name]
        if part is not None:
            whole = self._stored[part.stored]
            info = whole if part.expert is None else whole.item(part.expert)
        assert isinstance(info, EncodedInfo), f"{name} has no codes"
        weight = info.codes(self._read_tensor)
        if part is None or part.outputs == slice(None):
            return weight
        start, _, step = part.outputs.indices(weight.shape[0])
        rows = weight.scheme.block_rows
        if rows not in (1, None) and (step != 1 or start % rows):
            raise SchemeError(
                f"{name} and another linear share a block of {rows} outputs of {part.stored}. The block has one scale, "
                "so the codes of the two linears cannot be separated"
            )
        return weight.take_rows(torch.arange(weight.shape[0])[part.outputs])

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """See `CheckpointReader`; a tensor derived from a stored one, e.g. one expert of a stack, is read whole."""
        return self.tensor(name)[start:stop].clone() if self._is_view(name) else super().rows(name, start, stop)

    def gather_rows(self, name: str, indices: Tensor) -> Tensor:
        """See `CheckpointReader`; a tensor derived from a stored one, e.g. one expert of a stack, is read whole."""
        return self.tensor(name)[indices.cpu()] if self._is_view(name) else super().gather_rows(name, indices)

    def chunks(self, name: str, size: int = 1 << 22) -> Iterator[bytes | memoryview]:
        """See `CheckpointReader`; a tensor derived from a stored one, e.g. one expert of a stack, is one chunk."""
        if self._is_view(name):
            yield self.tensor(name).view(-1).view(torch.uint8).numpy().tobytes()
        else:
            yield from super().chunks(name, size)

    def restore(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert tensors to the layout and the names of the files.

        Args:
            tensors: tensors, keyed by their names in this view. The parts of one stored tensor are joined only if all
                of these parts are in `tensors`. Otherwise, e.g. because some are stored as codes, all stay separate.
        Returns:
            Tensors, keyed by the names to write.
        """
        restored = dict(tensors)
        whole = self._whole_parts(tensors)
        for whole_name, names in whole.items():
            if whole_name.removesuffix("_bias") not in whole:
                continue  # biases go with their weights
            if any(f"{name}_scale" in tensors for name in names):
                continue  # the weights' names hold codes, which loaders expect as one tensor per expert
            info = self._stored[whole_name]
            value = torch.empty(info.shape, dtype=restored[names[0]].dtype)
            for name in names:
                part = self._parts[name]
                part.of(value if part.expert is None else value[part.expert]).copy_(restored.pop(name))
            restored[whole_name] = value
        for conversion in self._conversions():
            # If a step has changed a tensor, all targets stay in the model's form, which loaders accept too.
            targets = [name for name in conversion.targets if name in restored]
            same = (_same(restored[name], self._converted(name)) for name in targets)
            if len(targets) == len(conversion.targets) and all(same):
                for name in targets:
                    del restored[name]
                restored |= {name: self._read_tensor(self._stored[name]) for name in conversion.sources}
        return {self.stored_name(name): tensor for name, tensor in restored.items()}

    def stored_name(self, name: str) -> str:
        """Return the name of a tensor of this view in written files; parts of a stored tensor have separate names."""
        if self.family.stored_names is not None:
            return self.family.stored_names.of(name)
        for own, stored in _renamed(self.family):
            if name.startswith(own):
                return stored + name.removeprefix(own)
        return name

    def own_name(self, stored: str) -> str:
        """Return this view's name of a tensor, given its name in files; a name of the view is returned unchanged."""
        return next(iter(_with_own_names({stored: None}, self.family)))

    def write_converted(self, sources: Container[str]) -> bool:
        """Make `restore` leave stored tensors in their converted form; return whether a conversion uses any of them.

        Args:
            sources: names of the stored tensors.
        """
        kept = [item for item in self._conversions() if any(name in sources for name in item.sources)]
        self._unrestored |= {id(item) for item in kept}
        return bool(kept)

    def _conversions(self) -> list[TensorConversion]:
        """Return the conversions of this view that `restore` has to reverse."""
        made = {id(item): item for item in self._made.values()}
        return [item for key, item in made.items() if key not in self._unrestored]

    def written_shapes(self, quantized: Container[str]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the unquantized tensors to write, keyed by their names in the files.

        Args:
            quantized: names of the tensors of this view that are stored as codes.
        """
        names = [name for name in self.names if name not in quantized]
        blank = {name: torch.empty(self.info(name).shape, device="meta") for name in names}
        for stored, own in self._whole_parts(blank).items():
            for name in own:
                del blank[name]
            blank[stored] = torch.empty(self._stored[stored].shape, device="meta")
        for conversion in self._conversions():
            if all(name in blank for name in conversion.targets):
                for name in conversion.targets:
                    del blank[name]
                blank |= {name: torch.empty(self._stored[name].shape, device="meta") for name in conversion.sources}
        return {self.stored_name(name): tuple(value.shape) for name, value in blank.items()}

    def _whole_parts(self, present: Container[str]) -> dict[str, list[str]]:
        """Return the names of the parts of each stored tensor whose parts are all in `present`, keyed by its name."""
        parts: dict[str, list[str]] = {}
        for name, part in self._parts.items():
            parts.setdefault(part.stored, []).append(name)
        return {stored: own for stored, own in parts.items() if all(name in present for name in own)}

    def _is_view(self, name: str) -> bool:
        return name in self._parts or name in self._made

    def _converted(self, name: str) -> Tensor:
        """Return a tensor that transformers converts from stored tensors; the latest results are cached."""
        conversion = self._made[name]
        with self._converting:  # several threads may read parts of the same tensor
            if id(conversion) not in self._kept:
                while len(self._kept) >= _KEPT:
                    del self._kept[next(iter(self._kept))]
                sources = {source: self._read_tensor(self._stored[source]) for source in conversion.sources}
                self._kept[id(conversion)] = conversion.convert(sources)
            return self._kept[id(conversion)][name]

    def _whole(self, stored: str, expert: int | None) -> Tensor:
        if stored in self._made:
            value = self._converted(stored)
            return value if expert is None else value[expert]
        info = self._stored[stored]
        if expert is not None:
            info = info.item(expert)  # read only this expert's bytes; the tensor holds all experts of the layer
        return self._read_tensor(info)

    def _view(self, family: Family) -> None:
        published = None if family.published is None else family.published(tuple(self._tensors))
        family = family if published is None else replace(family, stored_names=published)
        self.family = family
        self._tensors = _with_own_names(self._tensors, family)
        self._parts: dict[str, StoredPart] = {}
        self._stored: dict[str, TensorInfo] = {}
        self._made: dict[str, TensorConversion] = {}
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._converting = threading.Lock()
        self._unrestored: set[int] = set()
        copied = self._convert(family)
        for stored, parts in _find_parts(self._tensors, family).items():
            info = self._stored[stored] = self._tensors.pop(stored)
            shape = info.shape if next(iter(parts.values())).expert is None else info.shape[1:]
            for name, part in parts.items():
                # On the meta device, slicing gives the shape and takes no memory.
                own = tuple(part.of(torch.empty(shape, device="meta")).shape)
                size = torch.Size(own).numel() * info.dtype.itemsize
                self._parts[name] = part
                self._tensors[name] = replace(info, shape=own, num_bytes=size)
        self.names = tuple(sorted(name for name in self._tensors if name not in copied))

    def _convert(self, family: Family) -> set[str]:
        """Add the converted tensors to the view; return the names of those outside the layers.

        Tensors outside the layers are not written in converted form: the stored tensors are copied instead.
        """
        copied: set[str] = set()
        for conversion in family.stored_names.conversions if family.stored_names else ():
            if not all(name in self._tensors for name in conversion.sources):
                continue  # in another shard, or stored in the model's form
            inside = all(name.startswith(f"{family.layers}.") for name in conversion.targets)
            self._stored |= {name: self._tensors[name] for name in conversion.sources}
            first = self._tensors[conversion.sources[0]]
            for name in conversion.sources if inside else ():
                del self._tensors[name]
            for name, shape in conversion.targets.items():
                size = torch.Size(shape).numel() * first.dtype.itemsize
                self._tensors[name] = replace(first, shape=shape, num_bytes=size)
                self._made[name] = conversion
            copied |= set() if inside else set(conversion.targets)
        return copied


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same dtype and values."""
    return first.dtype == second.dtype and torch.equal(first, second)


def _renamed(family: Family) -> list[tuple[str, str]]:
    """Return the name prefixes that differ between model and files, as pairs (prefix in the model, prefix in files).

    The pair of the output head, if any, comes first.
    """
    pairs = []
    if family.stored_head is not None:
        # First, since the backbone's prefix may be empty and would match every name.
        pairs.append((f"{family.head}.", f"{family.stored_head}."))
    if family.stored_prefix is not None:
        pairs.append((f"{family.backbone}." if family.backbone else "", family.stored_prefix))
    return pairs


def _with_own_names(tensors: dict[str, _T], family: Family) -> dict[str, _T]:
    """Return the tensors, keyed by their names in the causal LM.

    Files have other names if they were saved from a multimodal wrapper, or from the backbone alone.
    """
    if family.stored_names is not None:
        return {own: tensors[name] for name, own in family.stored_names.own(tuple(tensors)).items()}
    pairs, (prefix, _, inside) = _renamed(family), family.layers.partition(".")
    if family.stored_prefix is None and inside and not any(name.startswith(f"{prefix}.") for name in tensors):
        pairs += [(f"{prefix}.", "")] if any(name.startswith(f"{inside}.") for name in tensors) else []
    own = (f"{family.head}.", *(prefix for prefix, _ in pairs if prefix))
    renamed: dict[str, _T] = {}
    for name, info in tensors.items():
        match = None if name.startswith(own) else next((pair for pair in pairs if name.startswith(pair[1])), None)
        renamed[name if match is None else match[0] + name.removeprefix(match[1])] = info
    return renamed


def _find_parts(tensors: Mapping[str, TensorInfo], family: Family) -> dict[str, dict[str, StoredPart]]:
    """Find the stored tensors that the view splits, transposes or renames.

    Returns:
        Parts, keyed first by the name of the stored tensor, then by the name of the part in the view.
    """
    heads = [] if family.mtp is None else [family.mtp.block_pattern]
    layer = re.compile("|".join([rf"{re.escape(family.layers)}\.\d+\.", *heads]))
    parts_of: dict[str, dict[str, StoredPart]] = {}
    own_names = {stored: own for own, stored in family.stored_tensors.items()}
    for name, info in tensors.items():
        match = layer.match(name)
        if match is None:
            continue
        prefix, local = match.group(), name[match.end() :]
        if local in own_names:
            part = StoredPart(stored=name, expert=None, outputs=slice(None), transposed=False)
            parts_of[name] = {prefix + own_names[local]: part}
        elif local.removesuffix(".weight") in family.transposed and len(info.shape) == 2:
            parts_of[name] = {name: StoredPart(stored=name, expert=None, outputs=slice(None), transposed=True)}
        elif family.experts is not None and len(info.shape) >= 2:
            parts = {prefix + key: part for key, part in expert_parts(name, local, info.shape, family.experts)}
            parts_of |= {name: parts} if parts else {}
    return parts_of


def expert_parts(name: str, local: str, shape: tuple[int, ...], data: Experts) -> Iterator[tuple[str, StoredPart]]:
    """Yield the linears of all experts in a stacked tensor: name relative to the layer, and part of the tensor.

    Yield nothing if the tensor does not stack experts.

    Args:
        name: full name of the tensor.
        local: name of the tensor relative to the layer.
        shape: shape of the tensor.
        data: description of the family's experts.
    """
    for stacked, linears in ((data.stacked_up, data.up), (data.stacked_down, (data.down,))):
        kind = {stacked: "weight", f"{stacked}_bias": "bias"}.get(local)
        if kind is None or len(shape) != (3 if kind == "weight" else 2):
            continue
        outputs = shape[-1] if kind == "bias" or data.transposed else shape[1]
        each = outputs // len(linears)
        for expert in range(shape[0]):
            for number, linear in enumerate(linears):
                rows = slice(number * each, (number + 1) * each)
                if data.interleaved:
                    rows = slice(number, None, len(linears))
                transposed = data.transposed or kind == "bias"
                part = StoredPart(stored=name, expert=expert, outputs=rows, transposed=transposed)
                yield f"{at(linear, expert)}.{kind}", part
