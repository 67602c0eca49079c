"""Predict how transformers' `from_pretrained` loads a checkpoint, from names, shapes and samples of its tensors.

The model is built on the meta device with the checkpoint's quantization config. transformers' own rules, including
those of its quantizer, are applied to every stored name. If a rule joins or decodes tensors, it runs on a sample, for
example on the tensors of one expert, and the result is compared with quantkit's. The weights are not loaded, so the
model's size does not matter; other tests compare logits of fully loaded models.
"""

import contextlib
import inspect
import io
import math
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import ModelError, first_line
from quantkit.huggingface.layer_inputs import build_model, config_and_class
from quantkit.huggingface.names import Destination, Renaming, find_stored_names
from quantkit.models.family import Family
from quantkit.models.linear_sets import common_owner

_TOLERANCE = 0.01  # relative error of a rule's result; the rule may compute in a different dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A tensor of a checkpoint.

    Args:
        module: the quantized module that the tensor belongs to; "" = none.
        kind: label of similar tensors; one sample represents all tensors of equal `kind` and `evenness`.
        shape: shape of the tensor; None = not known yet.
    """

    module: str = ""
    kind: str = ""
    shape: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Number of elements; 0 if it is not known."""
        return math.prod(self.shape or (0,))

    @property
    def evenness(self) -> tuple[int, ...] | None:
        """Properties of the shape that affect how codes and groups are split: the remainders of division by four."""
        return None if self.shape is None else tuple(size % 4 for size in self.shape)


@dataclass(kw_only=True, slots=True)
class Problems:
    """Problems that loading a checkpoint would cause.

    Args:
        missing: tensors of the model that no stored tensor provides.
        unexpected: stored tensors that the model does not use.
        mismatched: stored tensors whose shapes differ from the model's, with both shapes.
        unconverted: tensors of the model for which a rule fails or gives a wrong result, each with the reason.
        modules: quantized modules that have an unexpected or unconverted tensor, each with the reason.
        sources: stored tensors that a failing rule uses and that belong to no quantized module.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    unconverted: dict[str, str] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    sources: set[str] = field(default_factory=set)

    def but(self, known: Callable[[str], bool]) -> "Problems":
        """Return the problems of all tensors and modules for whose names `known` is false."""
        return Problems(
            missing=[name for name in self.missing if not known(name)],
            unexpected=[name for name in self.unexpected if not known(name)],
            mismatched=[text for text in self.mismatched if not known(text.partition(" ")[0])],
            unconverted={name: why for name, why in self.unconverted.items() if not known(name)},
            modules={name: why for name, why in self.modules.items() if not known(name)},
            sources={name for name in self.sources if not known(name)},
        )

    @property
    def summary(self) -> str:
        """One phrase per kind of problem, with the first affected tensor; empty if there is no problem."""
        kinds = {
            "missing": sorted(self.missing),
            "unused by the model": sorted(self.unexpected),
            "with a different shape": sorted(self.mismatched),
            "wrongly decoded": [f"{name} ({why})" for name, why in sorted(self.unconverted.items())],
        }
        return "; ".join(f"{len(names)} {kind}, e.g. {names[0]}" for kind, names in kinds.items() if names)


class CannotLoad(ModelError):
    """The installed transformers cannot load this model class in this quantized format, whichever tool wrote it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Made:
    """Names of the tensors that a rule creates for one target, relative to their common module.

    The common module is the innermost one that contains the target and all created tensors. The relative names are the
    same for other targets of the same kind.

    Args:
        depth: number of parts of the target's name that follow the name of the common module.
        names: created names relative to the common module.
    """

    depth: int
    names: tuple[str, ...]

    @classmethod
    def by_rule(cls, target: str, made: Iterable[str]) -> "_Made":
        """Convert full names; one rule may create tensors of several modules, such as gate and up projections."""
        owner = common_owner((target, *made))
        inside = tuple(name.removeprefix(f"{owner}.") for name in (target, *made))
        return cls(depth=inside[0].count(".") + 1, names=inside)

    def of(self, target: str) -> set[str]:
        """Return the full names of a target and of the tensors that the rule creates for it."""
        owner = target.split(".")[: -self.depth]
        return {target, *(".".join([*owner, name]) for name in self.names)}


@contextlib.contextmanager
def _raised_as(kind: type[ModelError], *errors: type[Exception]) -> Iterator[None]:
    """Convert errors of the libraries inside the block to the given kind of ModelError."""
    try:
        yield
    except errors as error:
        raise kind(f"{type(error).__name__}: {first_line(error)}") from error


class HfLoader:
    """Loading rules of transformers for one checkpoint.

    Args:
        reader: reader of the model's config.json.
        section: `quantization_config`; empty for an unquantized checkpoint.
    Attributes:
        touches_weights: whether transformers' initialization of the model accesses the weights of linears. Quantized
            linears have no weights, so loading then fails; see `decode_at_load`.
    Raises:
        ModelError: the installed libraries cannot build the model; the message gives the reason.
        CannotLoad: the libraries can build the model, but setting up its loading rules fails.
    """

    def __init__(self, reader: CheckpointReader, section: Mapping[str, Any]) -> None:
        with _raised_as(ModelError, Exception):  # whatever the libraries raise on what they cannot build
            self._model = _build(reader, section)
            plain = Renaming.of(_build(reader, {})[0])
        # Only the quantizer can fail here, e.g. on rules that split tensors: the plain rules worked.
        with _raised_as(CannotLoad, Exception):
            rules = Renaming.of(self._model[0], self._model[1])
        if rules is None or plain is None:
            raise ModelError(
                "this version of transformers does not expose its renaming rules; install transformers 5 or later"
            )
        self._rules, self._plain = rules, plain
        self.touches_weights = bool(section) and _touches_weights(self._model[0])

    @_raised_as(ModelError, AttributeError, TypeError)  # transformers does not guarantee these functions
    def check(
        self,
        tensors: Mapping[str, Stored],
        sample: Callable[[str], Tensor],
        decoded: Callable[[str], tuple[str, Tensor]],
    ) -> Problems:
        """Apply the loading rules to every tensor and collect the problems.

        Args:
            tensors: tensors of the checkpoint, by name.
            sample: function of a tensor's name; returns this tensor or another tensor of the same kind.
            decoded: function of a quantized module's name; returns the name of the module's weight in an unquantized
                checkpoint, and the weight decoded from the samples.
        Raises:
            ModelError: this version of transformers does not expose its rules.
        """
        problems = Problems()
        shapes, groups, reached = self._rules.shapes, dict[str, dict[str, Destination]](), set[str]()
        for name, destination in self._rules.destinations(tensors).items():
            stored, expected = tensors[name], shapes.get(destination.target)
            if expected is None:
                problems.unexpected.append(name)
                if stored.module:
                    problems.modules[stored.module] = "the model has no tensor for it"
            elif destination.pattern is not None:
                groups.setdefault(destination.target, {})[name] = destination
            elif stored.shape not in (None, expected) and not _is_packed_late(name, stored.shape, expected):
                problems.mismatched.append(f"{name} {list(stored.shape)} instead of {list(expected)}")
            reached.add(destination.target)
        results: dict[Any, str | _Made] = {}
        # Sample the smallest tensors of a kind: transformers needs up to 100 bytes for each number that it decodes.
        for target, sources in sorted(groups.items(), key=lambda group: sum(tensors[n].size for n in group[1])):
            chosen = sources if self._rules.divides(sources) else _first_of_each(sources)
            kind = tuple((d.pattern, tensors[n].kind, tensors[n].evenness) for n, d in chosen.items())
            if kind not in results:
                results[kind] = self._convert(target, chosen, tensors, sample, decoded)
            result = results[kind]
            if isinstance(result, _Made):
                reached |= result.of(target)
                continue
            problems.unconverted[target] = result
            problems.modules |= {tensors[name].module: result for name in sources if tensors[name].module}
            problems.sources |= {name for name in sources if not tensors[name].module}
        problems.missing = self._adjusted("missing_keys", set(shapes) - reached - set(self._tied(reached)))
        problems.unexpected = self._adjusted("unexpected_keys", set(problems.unexpected))
        return problems

    def _convert(
        self,
        target: str,
        sources: Mapping[str, Destination],
        tensors: Mapping[str, Stored],
        sample: Callable[[str], Tensor],
        decoded: Callable[[str], tuple[str, Tensor]],
    ) -> "str | _Made":
        """Run a rule on samples; return the created names, or a description of the error."""
        try:
            made = self._rules.convert(target, sources, {name: sample(name) for name in sources})
        except Exception as error:  # whatever transformers raises on what it was not made for
            return f"{type(error).__name__}: {first_line(error)}"
        modules = dict.fromkeys(tensors[name].module for name in sources if tensors[name].module)
        dense = dict(decoded(module) for module in modules)
        dense |= {name: sample(name) for name in sources if not tensors[name].module}
        known = self._plain.destinations(dense)
        joined = {name: destination for name, destination in known.items() if destination.pattern is not None}
        expected = self._plain.convert(target, joined, dense) if joined else {target: next(iter(dense.values()))}
        for name, value in expected.items():
            if name not in made or made[name].shape != value.shape:
                return "its converted shape differs from the model's"
            if torch.equal(made[name], value):  # e.g. an unchanged embedding, which is large in float32
                continue
            if (made[name].float() - value.float()).norm() > _TOLERANCE * value.float().norm():
                return "its converted values are wrong"
        return _Made.by_rule(target, made)

    def _tied(self, reached: set[str]) -> list[str]:
        tied: Mapping[str, str] = getattr(self._model[0], "all_tied_weights_keys", None) or {}
        return [name for name, other in tied.items() if other in reached or name in reached]

    def _adjusted(self, kind: str, names: set[str]) -> list[str]:
        """Return the names of one kind, sorted, without those that transformers ignores for this model."""
        info = types.SimpleNamespace(missing_keys=set[str](), unexpected_keys=set[str]())
        setattr(info, kind, names)
        self._model[0]._adjust_missing_and_unexpected_keys(info)
        return sorted(getattr(info, kind))


def _is_packed_late(name: str, stored: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether a tensor holds packed zero points, and `expected` is the shape of the zero points before packing.

    With transformers 5.17, compressed-tensors packs zero points only while a model with weights loads. A model that has
    only shapes still has one zero point per row.
    """
    return name.endswith(".weight_zero_point") and stored[1:] == expected[1:] and stored[0] < expected[0]


def _first_of_each(sources: Mapping[str, Destination]) -> dict[str, Destination]:
    """Select one tensor per pattern of a rule: if several experts match, the first in transformers' order."""
    firsts: dict[str | None, str] = {}
    for name, destination in sources.items():
        firsts.setdefault(destination.pattern, name)
    return {name: sources[name] for name in firsts.values()}


def _build(reader: CheckpointReader, section: Mapping[str, Any]) -> tuple[Any, Any]:
    """Build the model on the meta device, as it is before weights are loaded; return the model and its quantizer."""
    from accelerate import init_empty_weights
    from transformers.quantizers.auto import AutoHfQuantizer

    config, kind = config_and_class(reader)
    config.__dict__.pop("quantization_config", None)
    quantizer: Any = None
    if section:
        quantizer = AutoHfQuantizer.from_config(dict(section), pre_quantized=True)
        quantizer.validate_environment(device_map=None, weights_only=True)
    # Both libraries print progress bars.
    with init_empty_weights(include_buffers=True), contextlib.redirect_stderr(io.StringIO()):
        build = getattr(kind, "_from_config", None) or kind.from_config
        model = build(config)
        if quantizer is not None:
            quantizer.preprocess_model(model=model, dtype=model.dtype, device_map=None)
    return model.eval(), quantizer


def _touches_weights(model: Any) -> bool:
    """Whether initializing missing parameters fails because quantized linears lack a weight."""
    for value in (*model.parameters(), *model.buffers()):
        value._is_hf_initialized = True
    try:
        model.initialize_weights()
    except AttributeError as error:
        return "has no attribute 'weight'" in str(error)
    except Exception:  # other failures on the meta device say nothing about weights
        return False
    return False


# Code of a module that reads the weight of an inner module, e.g. `self.blocks[0].mlp.fc2.weight`.
_READ = re.compile(r"\bself((?:\.\w+|\[\d+\])+)\.weight\b")


def tower_linears(model: Any, family: Family) -> dict[str, tuple[int, int]]:
    """Return the shape (N, K) of each linear outside the language model, keyed by name; empty for a text-only model.

    Linears whose weight other code accesses, e.g. to read its dtype, are left out, because codes would break that code.

    Args:
        model: transformers model without weights.
        family: family with the name of the language model.
    """
    if model.config.get_text_config() is model.config or not family.backbone:
        return {}
    inside = tuple(f"{name}." for name in (family.backbone, family.layers, family.embedding, family.head))
    paths = {kind: _paths_read(kind) for kind in {type(module) for module in model.modules()}}
    read = {f"{name}{path}".lstrip(".") for name, module in model.named_modules() for path in paths[type(module)]}
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        # No subclasses of nn.Linear: `MultiheadAttention` reads its linear's weight and never calls the linear.
        if type(module) is nn.Linear and not f"{name}.".startswith(inside) and name not in read
    }


def _paths_read(kind: type) -> tuple[str, ...]:
    """Return the modules whose weight the code of a class accesses, as relative names with a leading dot."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # made at run time
        return ()
    return tuple(re.sub(r"\[(\d+)\]", r".\1", path) for path in _READ.findall(source))


def with_tower_names(family: Family, reader: CheckpointReader) -> Family:
    """Return the family with the stored names of all tensors, including those outside the language model.

    Args:
        family: family of the model.
        reader: reader whose tensor names are those in the files.
    Raises:
        ModelError: this version of transformers does not expose its renaming rules.
    """
    if family.stored_names is not None:
        return family
    renaming = Renaming.of(build_model(reader))
    if renaming is None:
        raise ModelError("quantizing modules outside the language model needs transformers 5 or later; install it")
    names = find_stored_names(renaming, reader, f"{family.backbone}.")
    return replace(family, stored_names=names, stored_prefix=None, stored_head=None)
