"""Predict how an engine reads a checkpoint, by applying the engine's rules to properties of the checkpoint.

The first rule that applies to a linear gives the answer for this linear. The result is the worst answer of all linears.

The rules are in one YAML file per engine. They come from reading the source of a release of the engine; each rule names
the file and the function. No rule was tested on a GPU. The rules do not say whether an engine supports an architecture.
This module does not import torch.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from quantkit.engine_rules.data_sheets import AMX, CAPABILITIES, CPU, NAMED, device_key
from quantkit.errors import InputError, suggestion
from quantkit.results import EngineReading, Record

if TYPE_CHECKING:
    from quantkit.numerics.scheme import LinearScheme

_LAST = 999
_ALL_GPUS = (10, _LAST)

Groups = int | Literal["channel", "tensor", "block"]
Cache = Literal["", "fp8", "own"]
Answer = Literal["fast", "slow", "unknown", "wrong", "no"]
ANSWERS = ("fast", "slow", "unknown", "wrong", "no")
"""How an engine reads a checkpoint, best first. `unknown`: no rule says. `wrong`: the engine loads the checkpoint but
computes with wrong numbers.
"""
UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredLinear:
    """One kind of quantized linear in a checkpoint.

    Args:
        scheme: number types and group size.
        shape: (N, K) of the weight; None = unknown.
        expert: whether the linear belongs to a mixture of experts.
    """

    scheme: LinearScheme
    shape: tuple[int, int] | None = None
    expert: bool = False

    @property
    def groups(self) -> Groups:
        """Return the number of inputs that share a scale, or "channel", "block" or "tensor"."""
        weight = self.scheme.weight
        if weight.block_rows != 1:
            return "tensor" if weight.block_rows is None else "block"
        return "channel" if weight.group_size is None else weight.group_size

    @property
    def inputs(self) -> str:
        """Return the number type of the activations; "16-bit" if they are not quantized."""
        return "16-bit" if self.scheme.activation is None else self.scheme.activation.dtype.name

    def describe(self) -> str:
        """Short form for messages, e.g. `int4 g128 (experts)`."""
        return self.scheme.describe() + (" (experts)" if self.expert else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredModel:
    """Contents of a checkpoint, written or planned.

    Args:
        format: on-disk format by its name in `quantkit.formats`.
        linears: the distinct kinds of quantized linears; empty for an unquantized model.
        cache: "fp8" = the checkpoint has calibrated scales of an FP8 cache; "own" = it has a cache entry that only
            quantkit reads; "" = neither.
        hidden_size: the model's hidden size; None = unknown.
        group_order: whether groups follow the order of activations (GPTQ's desc_act).
        compressed_experts: whether transformers can load compressed experts of this family.
        other_codes: whether the checkpoint has codes that `linears` does not list, as in GGUF files of other tools.
    """

    format: str
    linears: tuple[StoredLinear, ...] = ()
    cache: Cache = ""
    hidden_size: int | None = None
    group_order: bool = False
    compressed_experts: bool = True
    other_codes: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions(Record):
    """Linears, models and devices to which a rule applies; an empty tuple or None does not restrict the rule.

    Args:
        format, weights, inputs: names of formats and number types; unquantized inputs are "16-bit".
        groups: group sizes to which the rule applies; see `StoredLinear.groups`.
        besides: group sizes to which the rule does not apply.
        zero_points, experts, group_order, compressed_experts: True = only linears or models with this property, False =
            only those without it.
        static: True = only inputs with calibrated scales, False = only inputs without them.
        multiples: numbers of which N and K must be multiples.
        hidden: number of which the model's hidden size must be a multiple.
        device: "gpu": NVIDIA GPUs; "cpu": any CPU; "amx": CPUs with AMX tiles; "any": all of these.
        capability: lowest and highest compute capability of GPUs, times ten, inclusive.
    """

    format: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    groups: tuple[Any, ...] = ()
    besides: tuple[Any, ...] = ()
    zero_points: bool | None = None
    experts: bool | None = None
    static: bool | None = None
    group_order: bool | None = None
    compressed_experts: bool | None = None
    multiples: tuple[int, int] = (1, 1)
    hidden: int = 1
    device: Literal["gpu", "cpu", "amx", "any"] = "gpu"
    capability: tuple[int, int] = _ALL_GPUS

    @property
    def span(self) -> tuple[int, int]:
        """Return the lowest and highest capability to which the rule applies; `CPU` and `AMX` are below all GPUs."""
        return {"gpu": self.capability, "cpu": (CPU, AMX), "amx": (AMX, AMX), "any": (CPU, _LAST)}[self.device]

    def covers(self, capability: int | None) -> bool:
        """Whether the rule applies to devices of this compute capability; None = any device."""
        return capability is None or self.span[0] <= capability <= self.span[1]

    def cover_format(self, name: str) -> bool:
        """Whether the rule applies to every model in a format, whatever its linears."""
        only_format = replace(self, format=(), device="gpu", capability=_ALL_GPUS) == Conditions()
        return only_format and name in self.format and self.span[1] == _LAST

    def hold(self, linear: StoredLinear, model: StoredModel, capability: int | None) -> bool:
        """Whether the rule applies to this linear of a model on a device; an unknown size counts as a match."""
        weight, activation = linear.scheme.weight, linear.scheme.activation
        rows, columns = linear.shape or (0, 0)
        named = (
            (self.format, model.format),
            (self.weights, weight.dtype.name),
            (self.inputs, linear.inputs),
            (self.groups, linear.groups),
        )
        asked = (
            (self.zero_points, not weight.symmetric),
            (self.experts, linear.expert),
            (self.static, activation is not None and not activation.dynamic),
            (self.group_order, model.group_order and weight.group_size is not None),
            (self.compressed_experts, model.compressed_experts),
        )
        return (
            self.covers(capability)
            and all(not names or name in names for names, name in named)
            and linear.groups not in self.besides
            and all(flag is None or flag is given for flag, given in asked)
            and not (rows % self.multiples[0] or columns % self.multiples[1] or (model.hidden_size or 0) % self.hidden)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRule(Record):
    """An engine's answer, and the conditions under which it applies; the first rule that applies decides.

    Args:
        reads: the answer; see `ANSWERS`.
        reason: the reason, or the name of the kernel; `{linear}` and `{format}` are filled in.
        when: conditions of the rule.
        source: file and function in the release.
        error: the constant part of the engine's error message; "" = unknown.
    """

    reads: Answer
    reason: str
    when: Conditions = field(default_factory=Conditions)
    source: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRelease(Record):
    """One engine at one release, as described by a YAML file.

    Args:
        title: name of the engine.
        release: release whose source the rules come from.
        rules: the rules, in the order in which they are tried.
        ordinary: answer for an unquantized model.
        caches: how the engine stores the KV cache instead, keyed by each value of `StoredModel.cache` that it ignores.
        devices: whether answers depend on the device.
    """

    title: str
    release: str
    rules: tuple[EngineRule, ...]
    ordinary: EngineRule = EngineRule(reads="fast", reason="an unquantized checkpoint, as large as the original")
    caches: dict[str, str] = field(default_factory=dict)
    devices: bool = True


_NO_RULE = EngineRule(reads="unknown", reason="no rule known for {linear} in format {format}")
_NO_RULES = EngineRule(reads="unknown", reason="no rule known for this device")


def engine_names(folder: Path = Path(__file__).parent) -> list[str]:
    """Return the names of all engines; each has a YAML file."""
    return sorted(file.stem for file in folder.glob("*.yaml"))


@functools.cache
def read_engine(file: Path) -> EngineRelease:
    """Read the YAML file of an engine.

    Raises:
        ReportError: a field is missing, unknown or of the wrong type.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return EngineRelease.from_dict(yaml.load(file.read_text(encoding="utf-8"), loader), where=file.name)


def find_engine(name: str) -> tuple[EngineRelease, int | None]:
    """Return the engine that `vllm` or `vllm:h100` names, and the device's compute capability; None without a device.

    Raises:
        InputError: there is no such engine or device (the message lists them), or the engine has no rules for the
            device.
    """
    own, _, device = name.partition(":")
    key, names = own.replace("_", "-").replace(".", "-"), engine_names()
    if key not in names:
        raise InputError(f"unknown engine {own!r}{suggestion(key, names)}; known engines: {', '.join(names)}")
    engine = read_engine(Path(__file__).with_name(f"{key}.yaml"))
    if not device:
        return engine, None
    if device_key(device) not in NAMED:
        nearest = suggestion(device_key(device), NAMED)
        raise InputError(f"unknown device {device!r}{nearest}; known devices: {', '.join(NAMED)}")
    capability = NAMED[device_key(device)]
    if engine.devices and not any(rule.when.covers(capability) for rule in engine.rules):
        raise InputError(
            f"quantkit has no rules for {engine.title} {engine.release} on {device}; leave the device out to see the "
            "rules for other devices"
        )
    return engine, capability


def judge(name: str, model: StoredModel, capability: int | None = None) -> EngineReading:
    """Predict how an engine reads a checkpoint.

    Args:
        name: name of the engine, or of engine and device; see `find_engine`.
        model: contents of the checkpoint.
        capability: compute capability times ten (90 for an H100), or `CPU`, `AMX` or `OTHER`; used only if `name` has
            no device. None = judge every NVIDIA GPU generation and return the best answer; its reason names the
            generations that differ.
    Raises:
        InputError: there is no such engine or device.
    """
    engine, own = find_engine(name)
    if not engine.devices:
        return _judge_on(engine, model, None)
    capability = capability if own is None else own
    if capability is not None:
        return _judge_on(engine, model, capability)
    by_device = [(device, _judge_on(engine, model, device)) for device in CAPABILITIES]
    best = min((reading for _, reading in reversed(by_device)), key=lambda reading: ANSWERS.index(reading.reads))
    if best.reads == "no":
        return best
    # The oldest devices that cannot read the checkpoint are not listed.
    known = itertools.dropwhile(lambda pair: pair[1].reads == "no", by_device)
    runs = [list(run) for _, run in itertools.groupby(known, key=lambda pair: (pair[1].reads, pair[1].reason))]
    if len(runs) == 1 and len(runs[0]) == len(by_device):
        return best
    return replace(best, reason="; ".join(_describe_run(run, best.reads) for run in runs))


def judge_all(model: StoredModel, capability: int | None = None) -> list[EngineReading]:
    """Predict how every engine reads a checkpoint; see `judge`."""
    return [judge(name, model, capability) for name in engine_names()]


def _judge_on(engine: EngineRelease, model: StoredModel, capability: int | None) -> EngineReading:
    known = [rule for rule in engine.rules if rule.when.covers(capability)]
    unknown = _NO_RULE if known else _NO_RULES
    answers: list[tuple[StoredLinear | None, EngineRule]] = [
        (linear, next((rule for rule in known if rule.when.hold(linear, model, capability)), unknown))
        for linear in model.linears
    ]
    linear, rule = max(
        answers or [(None, _whole(engine, model, capability))], key=lambda pair: ANSWERS.index(pair[1].reads)
    )
    values = {"linear": "its codes" if linear is None else linear.describe(), "format": model.format}
    return EngineReading(
        engine=engine.title,
        release=engine.release,
        reads=rule.reads,
        reason=rule.reason.format(**values),
        source=rule.source,
        cache=engine.caches.get(model.cache, ""),
        error=rule.error,
    )


def _whole(engine: EngineRelease, model: StoredModel, capability: int | None) -> EngineRule:
    """Return the rule for a model that lists no linears: an unquantized model, or a GGUF file of another tool."""
    about = (rule for rule in engine.rules if rule.when.cover_format(model.format))
    rule = next(about, _NO_RULE if model.other_codes else engine.ordinary)
    return rule if rule is _NO_RULE or rule.when.covers(capability) else _NO_RULES


def _describe_run(run: list[tuple[int, EngineReading]], usual: str) -> str:
    """Describe the common answer for neighbouring compute capabilities, e.g. `9.0: Marlin kernels`, or, if the answer
    is not `usual`, `9.0: slow, Marlin kernels`.
    """
    first, last = f"{run[0][0] / 10:.1f}", f"{run[-1][0] / 10:.1f}"
    reading = run[0][1]
    span = first if first == last else f"{first} to {last}"
    if run[-1][0] == CAPABILITIES[-1]:
        span = f"from {first} on"
    how = "" if reading.reads == usual else f"{reading.reads}, "
    return f"{span}: {how}{reading.reason}"
