"""Map the tensors of a checkpoint's files to the tensors of the transformers model.

Files keep the names under which a model was published; transformers renames, joins and splits tensors while it loads
them. This module applies transformers' own rules to every name and defines no rules itself.
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

# Tensors that replace a quantized weight. transformers may rename a module's weight but not these.
_COMPANIONS = ("weight_packed", "weight_scale")


@dataclass(kw_only=True, slots=True)
class Destination:
    """Destination of a stored tensor in the model.

    Args:
        target: name of the model's tensor that results, or the first if there are several. If the model does not use
            the stored tensor, no tensor of the model has this name.
        renamed: name that the stored tensor has after renaming, before it is joined or split; equal to `target` if it
            is neither joined nor split.
        pattern: pattern of the rule that joins or splits the stored tensor; None = no rule does.
    """

    target: str
    renamed: str
    pattern: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Renaming:
    """Renaming rules of transformers for one model.

    Args:
        model: the model on the meta device.
        rules: renamings and converters, in the order in which they are applied.
        shapes: shapes of the model's tensors.
    """

    model: Any
    rules: tuple[Any, ...]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, quantizer: Any = None) -> "Renaming | None":
        """Return the rules of a model and of its quantizer; None for transformers before version 5, which has none."""
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import rename_source_key  # noqa: F401
        except ImportError:
            return None
        rules = tuple(get_model_conversion_mapping(model, hf_quantizer=quantizer))
        return cls(model=model, rules=rules, shapes={n: tuple(v.shape) for n, v in model.state_dict().items()})

    def destinations(self, names: Iterable[str]) -> dict[str, Destination]:
        """Return the destination of each stored tensor, keyed by the tensor's name in the files."""
        from transformers.core_model_loading import WeightConverter, dot_natural_key

        # Rules may keep state from name to name, so apply fresh copies, to names in transformers' order.
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
        # transformers adds or removes the backbone's prefix after all rules.
        if target == f"{prefix}.{joined}":
            renamed = f"{prefix}.{renamed}"
        elif joined == f"{prefix}.{target}":
            renamed = renamed.removeprefix(f"{prefix}.")
        return Destination(target=target, renamed=renamed, pattern=pattern)

    def convert(self, target: str, sources: Mapping[str, Destination], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Apply the rule that creates `target` to stored tensors.

        Args:
            target: name of the first resulting tensor.
            sources: destinations with this target, keyed by the stored tensor's name in the files.
            tensors: the stored tensors, keyed by name in the files.
        Returns:
            Tensors, keyed by name in the model.
        Raises:
            Exception: any error of transformers.
        """
        rule = copy.deepcopy(self._rule(sources))
        for name, destination in sources.items():
            rule.add_tensor(target, name, destination.pattern, tensors[name])
        made = rule.convert(target, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def divides(self, sources: Mapping[str, Destination]) -> bool:
        """Whether one rule joins the tensors in `sources` and splits the result; each result may then need all sources.

        Args:
            sources: destinations with one common target, keyed by the stored tensor's name in the files.
        """
        rule = self._rule(sources)
        return len(rule.target_patterns) > 1 and len(sources) > 1

    def _rule(self, sources: Mapping[str, Destination]) -> Any:
        first = next(iter(sources.values()))
        return next(rule for rule in self.rules[::-1] if first.pattern in rule.source_patterns)

    def expert_names(self, target: str) -> list[str]:
        """Return the names in files of one expert's linears that `target` joins, e.g. `w1` and `w3`, in this order.

        The list is empty if no rule joins experts to `target`.
        """
        for rule in self.rules:
            sources, targets = rule.source_patterns, rule.target_patterns
            starred = all(re.search(r"\*\\?\.[^.]+\.weight$", source) for source in sources)
            if hasattr(rule, "operations") and starred and target.endswith(targets[0].replace("\\", "").lstrip(".")):
                return [source.split(".")[-2].rstrip("\\") for source in sources]
        return []


def find_stored_names(renaming: Renaming, reader: CheckpointReader, backbone: str) -> StoredNames:
    """Find the names that a model's tensors have in the model's files.

    Args:
        renaming: renaming rules of the model.
        reader: reader of the model's files.
        backbone: prefix of tensor names; conversions to tensors outside this prefix are ignored.
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
        # Some rules transpose a tensor only if necessary; leave out conversions that change no shape.
        conversions=tuple(c for c in made if {n: reader.info(n).shape for n in c.sources} != c.targets),
    )


def _is_expert(renaming: Renaming, name: str, destination: Destination) -> bool:
    """Whether a stored tensor is one expert's part of a stacked tensor, which quantkit treats as a separate linear.

    The result is False if files number the experts of several modules consecutively, as Ernie does for text and images.
    """
    owner = destination.target.rpartition(".")[0]
    if renaming.divides({name: destination, "": destination}):
        return False
    if destination.target not in renaming.shapes or not holds_stacked_experts(renaming.model.get_submodule(owner)):
        return False
    return re.search(r"\.\d+\.[^.]+\.weight$", destination.renamed) is not None


def _modules(renaming: Renaming, tensors: Mapping[str, str]) -> dict[str, str]:
    """Map module names in the model to names in files, for modules whose codes are renamed like the weight."""
    pairs = {own.removesuffix(".weight"): name.removesuffix(".weight") for own, name in tensors.items()
             if own != name and own.endswith(".weight") and name.endswith(".weight")}  # fmt: skip
    asked = renaming.destinations([f"{stored}.{leaf}" for stored in pairs.values() for leaf in _COMPANIONS])
    return {
        own: stored
        for own, stored in pairs.items()
        if all(_without_prefix(renaming, asked[f"{stored}.{leaf}"].renamed, f"{own}.{leaf}") for leaf in _COMPANIONS)
    }


def _without_prefix(renaming: Renaming, renamed: str, own: str) -> bool:
    """Whether `renamed` equals `own` apart from the backbone's prefix."""
    prefix = f"{renaming.model.base_model_prefix}."
    return renamed in (own, own.removeprefix(prefix)) or renamed.removeprefix(prefix) == own


def _conversion(
    renaming: Renaming, reader: CheckpointReader, target: str, sources: Mapping[str, Destination]
) -> TensorConversion:
    def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return renaming.convert(target, sources, tensors)

    # Run it on the meta device to find the names and shapes of its results.
    infos = {name: reader.info(name) for name in sources}
    blank = {name: torch.empty(info.shape, dtype=info.dtype, device="meta") for name, info in infos.items()}
    try:
        shapes = {name: tuple(value.shape) for name, value in convert(blank).items()}
    except Exception as error:  # whatever transformers raises on its own rule
        raise ModelError(f"{reader.path}: transformers cannot convert {target} ({first_line(error)})") from error
    return TensorConversion(sources=tuple(sources), targets=shapes, convert=convert)
