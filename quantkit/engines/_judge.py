"""How an engine takes a checkpoint: the first rule that is about each linear, and the worst of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

from quantkit.engines.base import CAPABILITIES, Engine, Reads, Rule, StoredLinear, StoredModel
from quantkit.registry import Registry
from quantkit.results import EngineReading

REGISTRY = Registry(package="quantkit.engines", attribute="ENGINE", noun="engine")
_ORDER = [str(reads) for reads in Reads]
_UNKNOWN = Rule(reads=Reads.NO, reason="nothing is known of {linear} in format {format} there", source="")


def find_engine(name: str) -> Engine:
    """The engine called `name`.

    Raises:
        InputError: no such engine; lists them.
    """
    engine: Engine = REGISTRY.load(name.replace(".", "-"))
    return engine


def judge(name: str, model: StoredModel, capability: int | None = None) -> EngineReading:
    """How an engine takes a checkpoint.

    Args:
        name: of the engine.
        model: what is stored.
        capability: compute capability times ten, 90 for an H100, or `CPU`; None = the best of all NVIDIA GPUs, with the
            reasons of each.
    Raises:
        InputError: no such engine.
    """
    engine = find_engine(name)
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
    whole = next((rule for rule in engine.rules if rule.is_about_format(model.format)), engine.ordinary)
    linear, rule = max(rules, key=lambda pair: _ORDER.index(pair[1].reads), default=(None, whole))
    values = {"linear": "" if linear is None else linear.describe(), "format": model.format}
    return EngineReading(
        engine=engine.title,
        release=engine.release,
        reads=str(rule.reads),
        reason=rule.reason.format(**values),
        source=rule.source,
        cache=engine.caches.get(model.cache, ""),
    )


def _rule_of(engine: Engine, linear: StoredLinear, model: StoredModel, capability: int) -> Rule:
    return next((rule for rule in engine.rules if rule.applies(linear, model, capability)), _UNKNOWN)


def _on_devices(run: list[tuple[int, EngineReading]], usual: str) -> str:
    """`9.0: Marlin kernels`: what is said of neighbouring compute capabilities, and how they take it if unusual."""
    first, last = f"{run[0][0] / 10:.1f}", f"{run[-1][0] / 10:.1f}"
    reading = run[0][1]
    span = first if first == last else f"{first} to {last}"
    if run[-1][0] == CAPABILITIES[-1]:
        span = f"from {first} on"
    how = "" if reading.reads == usual else f"{reading.reads}, "
    return f"{span}: {how}{reading.reason}"
