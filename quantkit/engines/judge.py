"""Verdict of an engine on a checkpoint: the first rule about each linear answers, and the worst counts."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path

import yaml

from quantkit.engines.devices import NAMED, device_key
from quantkit.engines.rules import ANSWERS, CAPABILITIES, EngineRelease, EngineRule, StoredLinear, StoredModel
from quantkit.errors import InputError, suggestion
from quantkit.results import EngineReading

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
