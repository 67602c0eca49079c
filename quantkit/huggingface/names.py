"""transformers' own renaming of checkpoints: which of a model's tensors the tensors of its files become.

Files keep the names under which a model was published, and transformers renames, joins and cuts tensors while it loads
them. Its rules are asked for what they do with every name; none of them is written down here.
Source: transformers 5.17 to 5.23, `conversion_mapping.py` and `core_model_loading.py`.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import ModelError, first_line
from quantkit.huggingface.experts import holds_stacked_experts
from quantkit.models.stored_names import StoredNames, TensorConversion

# Of tensors that stand for a quantized weight: a module whose weight is renamed need not have these renamed alike.
_COMPANIONS = ("weight_packed", "weight_scale")


@dataclass(kw_only=True, slots=True)
class Destination:
    """Destination of a stored tensor.

    Args:
        target: of the model's tensors, the first one if it becomes several; none of them if it has no place.
        renamed: its name before it is joined or cut; the same as `target` where it is neither.
        pattern: of the rule that joins or cuts it.
    """

    target: str
    renamed: str
    pattern: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Renaming:
    """transformers' rules for one model.

    Args:
        model: on the meta device.
        rules: renamings and converters, in the order in which they are applied.
        shapes: of the model's tensors.
    """

    model: Any
    rules: tuple[Any, ...]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, quantizer: Any = None) -> "Renaming | None":
        """The rules of a model, with those of a quantizer; None where transformers has no such rules (before 5)."""
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import rename_source_key  # noqa: F401
        except ImportError:
            return None
        rules = tuple(get_model_conversion_mapping(model, hf_quantizer=quantizer))
        return cls(model=model, rules=rules, shapes={n: tuple(v.shape) for n, v in model.state_dict().items()})

    def destinations(self, names: Iterable[str]) -> dict[str, Destination]:
        """Destination of each stored tensor, by its name."""
        from transformers.core_model_loading import WeightConverter, dot_natural_key

        # A rule may wait for another name before it: copies are used once, on names in transformers' order.
        rules = copy.deepcopy(self.rules)
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
        return {name: self._destination(name, renamings, converters) for name in sorted(names, key=dot_natural_key)}

    def _destination(self, name: str, renamings: list[Any], converters: list[Any]) -> Destination:
        from transformers.core_model_loading import rename_source_key

        prefix = self.model.base_model_prefix
        target, pattern = rename_source_key(name, renamings, converters, prefix, self.shapes)
        if target not in self.shapes and name in self.shapes:
            target, pattern = rename_source_key(name, [], [], prefix, self.shapes)
        if pattern is None:
            return Destination(target=target, renamed=target, pattern=None)
        renamed = rename_source_key(name, renamings, [])[0]
        joined = rename_source_key(renamed, [], converters)[0]
        # The backbone's prefix is put on or taken off last.
        if target == f"{prefix}.{joined}":
            renamed = f"{prefix}.{renamed}"
        elif joined == f"{prefix}.{target}":
            renamed = renamed.removeprefix(f"{prefix}.")
        return Destination(target=target, renamed=renamed, pattern=pattern)

    def convert(self, target: str, sources: Mapping[str, Destination], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Result of the rule for some tensors.

        Args:
            target: the first of the tensors that they become.
            sources: by name in files, all with this target.
            tensors: the same.
        Returns:
            tensors by names in the model.
        Raises:
            Exception: whatever transformers raises.
        """
        rule = copy.deepcopy(self._rule(sources))
        for name, destination in sources.items():
            rule.add_tensor(target, name, destination.pattern, tensors[name])
        made = rule.convert(target, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def divides(self, sources: Mapping[str, Destination]) -> bool:
        """Whether the rule of some tensors with one target makes several out of many: each may need all of them."""
        rule = self._rule(sources)
        return len(rule.target_patterns) > 1 and len(sources) > 1

    def _rule(self, sources: Mapping[str, Destination]) -> Any:
        first = next(iter(sources.values()))
        return next(rule for rule in self.rules[::-1] if first.pattern in rule.source_patterns)

    def expert_names(self, target: str) -> list[str]:
        """Names of one expert's weights in files of which this tensor is made, in the order of its parts."""
        for rule in self.rules:
            sources, targets = rule.source_patterns, rule.target_patterns
            starred = all(re.search(r"\*\\?\.[^.]+\.weight$", source) for source in sources)
            if hasattr(rule, "operations") and starred and target.endswith(targets[0].replace("\\", "").lstrip(".")):
                return [source.split(".")[-2].rstrip("\\") for source in sources]
        return []


def find_stored_names(renaming: Renaming, reader: CheckpointReader, backbone: str) -> StoredNames:
    """Find the names of a model's tensors in its files.

    Args:
        renaming: of the model.
        reader: of its files.
        backbone: only tensors of this module are joined and cut; what others become does not matter here.
    Raises:
        ModelError: transformers cannot apply its own rule.
    """
    known = renaming.destinations(reader.names)
    tensors: dict[str, str] = {}
    groups: dict[str, dict[str, Destination]] = {}
    for name, destination in known.items():
        if destination.pattern is None or _is_expert(renaming, name, destination):
            tensors[destination.renamed] = name
        elif destination.target.startswith(backbone):
            groups.setdefault(destination.target, {})[name] = destination
    made = (_conversion(renaming, reader, target, sources) for target, sources in groups.items())
    return StoredNames(
        tensors={own: name for own, name in tensors.items() if own != name},
        modules=_modules(renaming, tensors),
        # Rules that turn a tensor only if it lies otherwise leave those of the right shape as they are.
        conversions=tuple(c for c in made if {n: reader.info(n).shape for n in c.sources} != c.targets),
    )


def _is_expert(renaming: Renaming, name: str, destination: Destination) -> bool:
    """Whether a tensor is one expert's share of two that hold all: such are linears by themselves here.

    Not where files number the experts of several modules in one go, as Ernie's for text and for images.
    """
    owner = destination.target.rpartition(".")[0]
    if renaming.divides({name: destination, "": destination}):
        return False
    if destination.target not in renaming.shapes or not holds_stacked_experts(renaming.model.get_submodule(owner)):
        return False
    return re.search(r"\.\d+\.[^.]+\.weight$", destination.renamed) is not None


def _modules(renaming: Renaming, tensors: Mapping[str, str]) -> dict[str, str]:
    """Modules in files by modules of the model, where codes and scales are renamed as the weight is."""
    pairs = {own.removesuffix(".weight"): name.removesuffix(".weight") for own, name in tensors.items()
             if own != name and own.endswith(".weight") and name.endswith(".weight")}  # fmt: skip
    asked = renaming.destinations([f"{stored}.{leaf}" for stored in pairs.values() for leaf in _COMPANIONS])
    return {
        own: stored
        for own, stored in pairs.items()
        if all(_without_prefix(renaming, asked[f"{stored}.{leaf}"].renamed, f"{own}.{leaf}") for leaf in _COMPANIONS)
    }


def _without_prefix(renaming: Renaming, renamed: str, own: str) -> bool:
    """Whether a tensor that the model without codes lacks is renamed to `own`, but for the prefix of its backbone."""
    prefix = f"{renaming.model.base_model_prefix}."
    return renamed in (own, own.removeprefix(prefix)) or renamed.removeprefix(prefix) == own


def _conversion(
    renaming: Renaming, reader: CheckpointReader, target: str, sources: Mapping[str, Destination]
) -> TensorConversion:
    def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return renaming.convert(target, sources, tensors)

    # On the meta device: names and shapes of what comes out.
    infos = {name: reader.info(name) for name in sources}
    blank = {name: torch.empty(info.shape, dtype=info.dtype, device="meta") for name, info in infos.items()}
    try:
        shapes = {name: tuple(value.shape) for name, value in convert(blank).items()}
    except Exception as error:  # whatever transformers raises on its own rule
        raise ModelError(f"{reader.path}: transformers cannot convert {target} ({first_line(error)})") from error
    return TensorConversion(sources=tuple(sources), targets=shapes, convert=convert)
