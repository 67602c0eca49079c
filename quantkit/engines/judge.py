"""How an engine takes a checkpoint: the first rule that is about each linear, and the worst of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

from quantkit.engines.base import CAPABILITIES, Engine, Reads, Rule, StoredLinear, StoredModel, Verdict
from quantkit.errors import InputError
from quantkit.registry import Registry

REGISTRY = Registry(package="quantkit.engines", attribute="ENGINE", noun="engine")
_ORDER = list(Reads)
_UNKNOWN = Rule(reads=Reads.NO, reason="nothing is known of {linear} in format {format} there", source="")


def find_engine(name: str) -> Engine:
    """The engine called `name`.

    Raises:
        InputError: no such engine; lists them.
    """
    engine: Engine = REGISTRY.load(name.replace(".", "-"))
    return engine


def judge(name: str, model: StoredModel, capability: int | None = None) -> Verdict:
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
    runs = [list(run) for _, run in itertools.groupby(by_device, key=lambda pair: (pair[1].reads, pair[1].reason))]
    best = min((run[0][1] for run in runs), key=lambda verdict: _ORDER.index(verdict.reads))
    if len(runs) == 1:
        return best
    reasons = [f"{_span(run[0][0], run[-1][0])}: {run[0][1].reads}, {run[0][1].reason}" for run in runs]
    return replace(best, reason="; ".join(reasons))


def judge_all(model: StoredModel, capability: int | None = None) -> list[Verdict]:
    """What `judge` says of every engine."""
    return [judge(name, model, capability) for name in REGISTRY.names()]


def _judge_on(engine: Engine, model: StoredModel, capability: int) -> Verdict:
    rules = [(linear, _rule_of(engine, linear, model, capability)) for linear in model.linears]
    linear, rule = max(rules, key=lambda pair: _ORDER.index(pair[1].reads), default=(None, engine.ordinary))
    values = {"linear": "" if linear is None else linear.describe(), "format": model.format}
    return Verdict(
        engine=engine.title,
        release=engine.release,
        reads=rule.reads,
        reason=rule.reason.format(**values),
        source=rule.source,
        cache=engine.caches.get(model.cache, ""),
    )


def _rule_of(engine: Engine, linear: StoredLinear, model: StoredModel, capability: int) -> Rule:
    return next((rule for rule in engine.rules if rule.applies(linear, model, capability)), _UNKNOWN)


def _span(low: int, high: int) -> str:
    first, last = f"{low / 10:.1f}", f"{high / 10:.1f}"
    if high == CAPABILITIES[-1]:
        return f"from {first} on"
    return first if low == high else f"{first} to {last}"
