"""How an engine takes a checkpoint: the first rule that is about each linear, and the worst of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

from quantkit.engines._devices import find_capability
from quantkit.engines.base import CAPABILITIES, CPU, Engine, Reads, Rule, StoredLinear, StoredModel
from quantkit.errors import InputError
from quantkit.registry import Registry
from quantkit.results import EngineReading

REGISTRY = Registry(package="quantkit.engines", attribute="ENGINE", noun="engine")
_ORDER = [str(reads) for reads in Reads]
_NO_RULE = Rule(reads=Reads.UNKNOWN, reason="no rule known for {linear} in format {format}", source="")
_NO_RULES = Rule(reads=Reads.UNKNOWN, reason="no rule known for this device", source="")


def find_engine(name: str) -> tuple[Engine, int | None]:
    """The engine of a name, `vllm`, or of one with a device, `vllm:h100`, and what rules know of that.

    Raises:
        InputError: no such engine or device; lists them. Or no rule of the engine is about the device.
    """
    own, _, device = name.partition(":")
    engine: Engine = REGISTRY.load(own.replace(".", "-"))
    if not device:
        return engine, None
    capability = find_capability(device)
    if engine.devices and not any(rule.covers(capability) for rule in engine.rules):
        raise InputError(
            f"no rule known for {engine.title} {engine.release} on {device}; leave the device out for what is known"
        )
    return engine, capability


def judge(name: str, model: StoredModel, capability: int | None = None) -> EngineReading:
    """How an engine takes a checkpoint.

    Args:
        name: of the engine, or of it and a device, see `find_engine`.
        model: what is stored.
        capability: compute capability times ten, 90 for an H100, or `CPU`, `AMX`, `OTHER`, if the name has no device;
            None = the best of all NVIDIA GPUs, with the reasons of each.
    Raises:
        InputError: no such engine or device.
    """
    engine, own = find_engine(name)
    capability = (capability if own is None else own) if engine.devices else CPU
    if capability is not None:
        return _judge_on(engine, model, capability)
    by_device = [(device, _judge_on(engine, model, device)) for device in CAPABILITIES]
    best = min((reading for _, reading in reversed(by_device)), key=lambda reading: _ORDER.index(reading.reads))
    if best.reads == Reads.NO:
        return best
    known = itertools.dropwhile(lambda pair: pair[1].reads == Reads.NO, by_device)  # old devices go without saying
    runs = [list(run) for _, run in itertools.groupby(known, key=lambda pair: (pair[1].reads, pair[1].reason))]
    if len(runs) == 1 and len(runs[0]) == len(by_device):
        return best
    return replace(best, reason="; ".join(_on_devices(run, best.reads) for run in runs))


def judge_all(model: StoredModel, capability: int | None = None) -> list[EngineReading]:
    """What `judge` says of every engine."""
    return [judge(name, model, capability) for name in REGISTRY.names()]


def _judge_on(engine: Engine, model: StoredModel, capability: int) -> EngineReading:
    rules = [(linear, _rule_of(engine, linear, model, capability)) for linear in model.linears]
    otherwise = _NO_RULE if model.other_codes else engine.ordinary
    whole = next((rule for rule in engine.rules if rule.is_about_format(model.format)), otherwise)
    whole = whole if whole is _NO_RULE or whole.covers(capability) else _NO_RULES
    linear, rule = max(rules, key=lambda pair: _ORDER.index(pair[1].reads), default=(None, whole))
    values = {"linear": "its codes" if linear is None else linear.describe(), "format": model.format}
    return EngineReading(
        engine=engine.title,
        release=engine.release,
        reads=str(rule.reads),
        reason=rule.reason.format(**values),
        source=rule.source,
        cache=engine.caches.get(model.cache, ""),
        error=rule.error,
    )


def _rule_of(engine: Engine, linear: StoredLinear, model: StoredModel, capability: int) -> Rule:
    unknown = _NO_RULE if any(rule.covers(capability) for rule in engine.rules) else _NO_RULES
    return next((rule for rule in engine.rules if rule.applies(linear, model, capability)), unknown)


def _on_devices(run: list[tuple[int, EngineReading]], usual: str) -> str:
    """`9.0: Marlin kernels`: what is said of neighbouring compute capabilities, and how they take it if unusual."""
    first, last = f"{run[0][0] / 10:.1f}", f"{run[-1][0] / 10:.1f}"
    reading = run[0][1]
    span = first if first == last else f"{first} to {last}"
    if run[-1][0] == CAPABILITIES[-1]:
        span = f"from {first} on"
    how = "" if reading.reads == usual else f"{reading.reads}, "
    return f"{span}: {how}{reading.reason}"
