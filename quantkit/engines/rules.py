"""The contents of a checkpoint as far as engines mind, an engine's rules about them, and its verdict. Torch-free.

The first rule about each linear answers, and the worst answer counts.

The rules stand in one YAML file per engine. They were read from the sources of a release, each with its file and
function; none was run on a GPU. Whether an engine supports an architecture is another question.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from quantkit.engines.devices import AMX, CAPABILITIES, CPU, NAMED, device_key
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
"""How an engine takes a checkpoint, best first. `unknown`: no rule is about it. `wrong`: it computes other numbers."""
UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredLinear:
    """One kind of quantized linear.

    Args:
        scheme: its number types and groups.
        shape: (N, K) of its weight; None = not known.
        expert: whether it belongs to a mixture of experts.
    """

    scheme: LinearScheme
    shape: tuple[int, int] | None = None
    expert: bool = False

    @property
    def groups(self) -> Groups:
        """Group size, or "channel", "block" or "tensor"."""
        weight = self.scheme.weight
        if weight.block_rows != 1:
            return "tensor" if weight.block_rows is None else "block"
        return "channel" if weight.group_size is None else weight.group_size

    @property
    def inputs(self) -> str:
        """Number type of the activations."""
        return "16-bit" if self.scheme.activation is None else self.scheme.activation.dtype.name

    def describe(self) -> str:
        """Short form for messages, e.g. `int4 g128 (experts)`."""
        return self.scheme.describe() + (" (experts)" if self.expert else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredModel:
    """Contents of a checkpoint, written or planned.

    Args:
        format: on-disk format by its name in `quantkit.formats`.
        linears: the different kinds of quantized linears; empty for an ordinary model.
        cache: "fp8": the checkpoint has calibrated scales of an FP8 cache; "own": an entry that only quantkit reads.
        hidden_size: the model's width; None = not known.
        group_order: whether groups follow the order of activations (GPTQ's desc_act).
        compressed_experts: whether transformers takes compressed experts of this family.
        other_codes: whether it has codes that `linears` does not name, as GGUF files of other tools do.
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
    """Linears, models and devices that a rule is about; an empty tuple or None does not narrow it.

    Args:
        format, weights, inputs: names of formats and number types; inputs of 16 bits are "16-bit".
        groups, besides: sizes of groups that it is about and that it is not about, see `StoredLinear.groups`.
        zero_points, experts, group_order, compressed_experts: only models with (True) or without (False).
        static: only inputs with (True) or without (False) calibrated scales.
        multiples: numbers that N and K must be multiples of.
        hidden: number that the model's width must be a multiple of.
        device: "gpu": NVIDIA GPUs; "cpu": any CPU; "amx": CPUs with AMX tiles; "any": all of these.
        capability: lowest and highest compute capability of GPUs, times ten, both included.
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
        """First and last capability, with `CPU` and `AMX` below those of GPUs."""
        return {"gpu": self.capability, "cpu": (CPU, AMX), "amx": (AMX, AMX), "any": (CPU, _LAST)}[self.device]

    def covers(self, capability: int | None) -> bool:
        """Whether the rule is about a device; None stands for every device."""
        return capability is None or self.span[0] <= capability <= self.span[1]

    def cover_format(self, name: str) -> bool:
        """Whether the rule is about everything in a format, whatever the linears are."""
        only_format = replace(self, format=(), device="gpu", capability=_ALL_GPUS) == Conditions()
        return only_format and name in self.format and self.span[1] == _LAST

    def hold(self, linear: StoredLinear, model: StoredModel, capability: int | None) -> bool:
        """Whether the rule is about this linear of a model on a device; sizes that are not known fit."""
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
    """An answer of an engine, and the linears that it is about; the first rule that holds decides.

    Args:
        reads: the answer.
        reason: why, or by which kernel; `{linear}` and `{format}` are filled in.
        when: what the rule is about.
        source: file and function of the release.
        error: text of the engine's refusal, as far as it is always the same; "" = not known.
    """

    reads: Answer
    reason: str
    when: Conditions = field(default_factory=Conditions)
    source: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRelease(Record):
    """One engine at one release: a YAML file.

    Args:
        title: its name.
        release: the release that the rules were read from.
        rules: in the order in which they are asked.
        ordinary: the answer for a model without codes.
        caches: what becomes of the KV cache that a checkpoint asks for, where the engine uses another, by `Cache`.
        devices: whether answers depend on the device.
    """

    title: str
    release: str
    rules: tuple[EngineRule, ...]
    ordinary: EngineRule = EngineRule(reads="fast", reason="an ordinary checkpoint, as large as the original")
    caches: dict[str, str] = field(default_factory=dict)
    devices: bool = True


_NO_RULE = EngineRule(reads="unknown", reason="no rule known for {linear} in format {format}")
_NO_RULES = EngineRule(reads="unknown", reason="no rule known for this device")


def engine_names(folder: Path = Path(__file__).parent) -> list[str]:
    """Names of all engines: one YAML file each."""
    return sorted(file.stem for file in folder.glob("*.yaml"))


@functools.cache
def read_engine(file: Path) -> EngineRelease:
    """Read an engine's file.

    Raises:
        ReportError: a field is missing, unknown or of another type.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return EngineRelease.from_dict(yaml.load(file.read_text(encoding="utf-8"), loader), where=file.name)


def find_engine(name: str) -> tuple[EngineRelease, int | None]:
    """The engine called `vllm`, or called `vllm:h100` with the capability of that device.

    Raises:
        InputError: no such engine or device; lists them. Or no rule of the engine is about the device.
    """
    own, _, device = name.partition(":")
    key, names = own.replace("_", "-").replace(".", "-"), engine_names()
    if key not in names:
        raise InputError(f"unknown engine {own!r}{suggestion(key, names)}; there are: {', '.join(names)}")
    engine = read_engine(Path(__file__).with_name(f"{key}.yaml"))
    if not device:
        return engine, None
    if device_key(device) not in NAMED:
        nearest = suggestion(device_key(device), NAMED)
        raise InputError(f"unknown device {device!r}{nearest}; there are: {', '.join(NAMED)}")
    capability = NAMED[device_key(device)]
    if engine.devices and not any(rule.when.covers(capability) for rule in engine.rules):
        raise InputError(
            f"no rule known for {engine.title} {engine.release} on {device}; leave the device out for what is known"
        )
    return engine, capability


def judge(name: str, model: StoredModel, capability: int | None = None) -> EngineReading:
    """Return how an engine takes a checkpoint.

    Args:
        name: of the engine, or of it and a device, see `find_engine`.
        model: contents of the checkpoint.
        capability: compute capability times ten, 90 for an H100, or `CPU`, `AMX`, `OTHER`, if the name has no device;
            None = the best of all NVIDIA GPUs, with the reasons of each.
    Raises:
        InputError: no such engine or device.
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
    known = itertools.dropwhile(lambda pair: pair[1].reads == "no", by_device)  # old devices go without saying
    runs = [list(run) for _, run in itertools.groupby(known, key=lambda pair: (pair[1].reads, pair[1].reason))]
    if len(runs) == 1 and len(runs[0]) == len(by_device):
        return best
    return replace(best, reason="; ".join(_describe_run(run, best.reads) for run in runs))


def judge_all(model: StoredModel, capability: int | None = None) -> list[EngineReading]:
    """Return how every engine takes a checkpoint, see `judge`."""
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
    """The rule about a model whose linears say nothing: ordinary, or a file of another tool."""
    about = (rule for rule in engine.rules if rule.when.cover_format(model.format))
    rule = next(about, _NO_RULE if model.other_codes else engine.ordinary)
    return rule if rule is _NO_RULE or rule.when.covers(capability) else _NO_RULES


def _describe_run(run: list[tuple[int, EngineReading]], usual: str) -> str:
    """The answer for neighbouring compute capabilities, e.g. `9.0: Marlin kernels`; says an unusual answer too."""
    first, last = f"{run[0][0] / 10:.1f}", f"{run[-1][0] / 10:.1f}"
    reading = run[0][1]
    span = first if first == last else f"{first} to {last}"
    if run[-1][0] == CAPABILITIES[-1]:
        span = f"from {first} on"
    how = "" if reading.reads == usual else f"{reading.reads}, "
    return f"{span}: {how}{reading.reason}"
