"""The sensitivity map: every quantized unit alone in the otherwise original model, and what to change in the recipe.

The original is loaded once; one unit at a time takes its place in it, the same text is read, and the KL to the
original is what that unit costs. Where the parts add up to the whole, the whole can be mended part by part: the
proposal leaves alone the units with the most KL per byte, and is itself measured before it is made.
Choosing bits layer by layer by what each costs: Dong et al. 2019 (HAWQ), who ask the curvature instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from quantkit.errors import InputError
from quantkit.evaluate.fidelity import Distances, Windows, batches, check_vocabulary, distances, join, logits
from quantkit.evaluate.fused_groups import Unit, find_units, swapped
from quantkit.results import SensitivityMap, SensitivityProposal, SensitivityRecord
from quantkit.runtime.llm import LLM

MAX_TOKENS = 4096
REFERENCE_BYTES = 1 << 29  # of the original's logits, which every unit is compared with
MARGIN = 0.8  # of a goal that a proposal may use up: it is measured on other text, and compressed anew


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """What the model has to reach.

    Args:
        kl: mean KL at most.
        kl_p99: 99th percentile at most.
        top1: share of positions with the same likeliest token at least.
    """

    kl: float = math.inf
    kl_p99: float = math.inf
    top1: float = 0.0

    def reached(self, found: Distances) -> bool:
        """Whether measured distances are within the goal, with a margin to spare."""
        agrees = not self.top1 or 1 - found.top1 <= MARGIN * (1 - self.top1)
        return found.mean <= MARGIN * self.kl and found.p99 <= self.kl_p99 and agrees


def sensitivity_map(
    llm: LLM,
    original: LLM,
    windows: Windows,
    *,
    data: str = "text",
    goal: Goal | None = None,
    ignored: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> SensitivityMap:
    """Measure what each unit costs.

    Args:
        llm: the quantized model.
        original: loaded in the same arithmetic; as before when this returns.
        windows: of token ids; as many are used as fit the limits of this module.
        data: name of the text, for the record.
        goal: what a proposal has to reach; None = no proposal is made.
        ignored: patterns that the recipe ignores already; a proposal keeps them.
        progress: told what is going on.
    Raises:
        ModelError: the vocabularies differ, or a model does not run natively.
    """
    check_vocabulary(llm, original)
    units = find_units(llm, original)
    probe = Probe(original, few(windows, original.model.vocab_size))
    records = []
    for number, unit in enumerate(units, start=1):
        progress(f"sensitivity map: unit {number} of {len(units)}, layer {unit.layer} {unit.name}")
        records.append(_record(unit, probe.measure([unit]).mean))
    whole = probe.compare(llm)
    found = SensitivityMap(data=data, num_tokens=len(whole.kl), records=tuple(records), total_kl=whole.mean)
    if goal is None or goal.reached(whole):
        return found
    progress("sensitivity map: looking for the fewest bytes that mend it")
    proposal = propose(units, found, probe.measure, goal, ignored)
    return SensitivityMap(
        data=data, num_tokens=found.num_tokens, records=found.records, total_kl=found.total_kl, proposal=proposal
    )


def propose(
    units: Sequence[Unit],
    found: SensitivityMap,
    measure: Callable[[list[Unit]], Distances],
    goal: Goal,
    ignored: Sequence[str] = (),
) -> SensitivityProposal | None:
    """The units to leave alone, those with the most KL per byte first.

    Args:
        units: all of them, as in the map.
        found: the map.
        measure: distances of the original with these units quantized.
        goal: to be reached; checked by measuring, since the sum is only a prediction.
        ignored: patterns that the recipe ignores already.
    Returns:
        the proposal, or None when only leaving everything alone would do.
    """
    gain = {id(unit): record.kl for unit, record in zip(units, found.records, strict=True)}
    order = sorted(units, key=lambda unit: gain[id(unit)] / max(1, _extra_bytes(unit)), reverse=True)
    scale = found.total_kl / found.sum_kl if found.sum_kl > 0 else 1.0
    rest = found.sum_kl
    for count, unit in enumerate(order[:-1], start=1):
        rest -= gain[id(unit)]
        if rest * scale > MARGIN * goal.kl:
            continue
        distance = measure(order[count:])
        if goal.reached(distance):
            return _proposal(order[:count], distance.mean, ignored)
    return None


def _proposal(chosen: Sequence[Unit], kl: float, ignored: Sequence[str]) -> SensitivityProposal:
    patterns = [*ignored, *(module for unit in chosen for module in unit.modules)]
    return SensitivityProposal(
        action="leave alone",
        units=tuple((unit.layer, unit.name) for unit in chosen),
        overrides=(f"ignore={json.dumps(patterns)}",),
        predicted_kl=kl,
        extra_bytes=sum(map(_extra_bytes, chosen)),
    )


def _extra_bytes(unit: Unit) -> int:
    """What leaving a unit alone costs on disk."""
    return unit.stored_bytes - unit.quantized_bytes


def _record(unit: Unit, kl: float) -> SensitivityRecord:
    return SensitivityRecord(
        layer=unit.layer,
        unit=unit.name,
        modules=unit.modules,
        kl=kl,
        quantized_bytes=unit.quantized_bytes,
        dense_bytes=unit.dense_bytes,
    )


def few(
    windows: Windows, vocab_size: int, max_tokens: int = MAX_TOKENS, reference_bytes: int = REFERENCE_BYTES
) -> Windows:
    """As many windows as the limits allow, one at least.

    Args:
        windows: of token ids.
        vocab_size: logits per token.
        max_tokens: of all windows together.
        reference_bytes: of the logits that a `Probe` keeps of them.
    Raises:
        InputError: there is no window.
    """
    room = min(max_tokens, reference_bytes // (4 * vocab_size))
    kept: list[tuple[int, ...]] = []
    for ids in windows:
        if kept and room < len(ids):
            break
        kept.append(ids)
        room -= len(ids)
    if not kept:
        raise InputError("a sensitivity map needs text; give at least one window")
    return tuple(kept)


class Probe:
    """The original's answers on fixed text, and how far others are from them.

    Args:
        original: with all its own units in place.
        windows: the text.
    """

    def __init__(self, original: LLM, windows: Windows) -> None:
        self._original, self._groups = original, list(batches(original, windows))
        self._reference: list[list[Tensor]] = [logits(original, group) for group in self._groups]

    def measure(self, units: list[Unit]) -> Distances:
        """The original with these units quantized."""
        with swapped(units):
            return self.compare(self._original)

    def compare(self, llm: LLM) -> Distances:
        """Another model, or the original as it is now."""
        return join(
            [
                distances(p, q)
                for group, reference in zip(self._groups, self._reference, strict=True)
                for p, q in zip(reference, logits(llm, group), strict=True)
            ]
        )
