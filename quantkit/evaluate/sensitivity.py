"""The sensitivity map: every fused group quantized alone in the original model, and what to change in the recipe.

The original is loaded once; one group at a time is quantized in it, the same text is read, and the KL to the original
is what that group costs. Where the parts add up to the whole, the whole can be mended part by part: the
proposal ignores the groups with the most KL per byte, and is itself measured before it is made.
Choosing bits layer by layer by what each costs: Dong et al. 2019 (HAWQ), who ask the curvature instead.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from torch import Tensor

from quantkit.distributed import share_out, world
from quantkit.errors import InputError
from quantkit.evaluate.fidelity import (
    Distances,
    Windows,
    batches,
    check_vocabulary,
    distances,
    join_distances,
    window_logits,
)
from quantkit.evaluate.fused_groups import FusedGroup, find_fused_groups, swapped
from quantkit.evaluate.replay import Replay
from quantkit.results import SensitivityMap, SensitivityProposal, SensitivityRecord
from quantkit.runtime.llm import LLM

MAX_TOKENS = 4096
REFERENCE_BYTES = 1 << 29  # of the original's logits, which every group is compared with
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

    def reached(self, measured: Distances) -> bool:
        """Whether measured distances are within the goal, with a margin to spare."""
        # The margin applies to disagreement, which a repair reduces as it reduces KL.
        agrees = not self.top1 or 1 - measured.top1 <= MARGIN * (1 - self.top1)
        return measured.mean <= MARGIN * self.kl and measured.p99 <= self.kl_p99 and agrees


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
    """Measure what each group costs.

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
    groups = find_fused_groups(llm, original)
    probe = Probe(original, few(windows, original.model.vocab_size))

    def measure(number: int) -> float:
        group = groups[number]
        progress(f"sensitivity map: group {number + 1} of {len(groups)}, layer {group.layer} {group.name}")
        return probe.measure([group]).mean

    # Neighbours to one rank: what runs before both of them is run once.
    owners = [number * world() // len(groups) for number in range(len(groups))]
    kls = share_out(range(len(groups)), measure, owners=owners)
    records = tuple(
        SensitivityRecord(
            layer=group.layer,
            group=group.name,
            modules=group.modules,
            kl=kl,
            quantized_bytes=group.quantized_bytes,
            dense_bytes=group.dense_bytes,
        )
        for group, kl in zip(groups, kls, strict=True)
    )
    whole = probe.compare(llm)
    measured = SensitivityMap(data=data, num_tokens=len(whole.kl), records=records, total_kl=whole.mean)
    if goal is None or goal.reached(whole):
        return measured
    progress("sensitivity map: searching the fewest bytes that mend it")
    return replace(measured, proposal=propose(groups, measured, probe.measure, goal, ignored))


def propose(
    groups: Sequence[FusedGroup],
    measured: SensitivityMap,
    measure: Callable[[list[FusedGroup]], Distances],
    goal: Goal,
    ignored: Sequence[str] = (),
) -> SensitivityProposal | None:
    """The groups to ignore, those with the most KL per byte first.

    Args:
        groups: all of them, as in the map.
        measured: the map.
        measure: distances of the original with these groups quantized.
        goal: to be reached; checked by measuring, since the sum is only a prediction.
        ignored: patterns that the recipe ignores already.
    Returns:
        the proposal, or None when only ignoring everything would do.
    """
    gain = {id(group): record.kl for group, record in zip(groups, measured.records, strict=True)}
    # Greedy, as for a knapsack: what a group mends for each byte that it costs.
    order = sorted(groups, key=lambda group: gain[id(group)] / max(1, _extra_bytes(group)), reverse=True)
    # The parts seldom add up exactly; the whole is taken to shrink in proportion to their sum.
    scale = measured.total_kl / measured.sum_kl if measured.sum_kl > 0 else 1.0
    rest = measured.sum_kl
    # Without the last group: a model that ignores every group is not compressed.
    for count, group in enumerate(order[:-1], start=1):
        rest -= gain[id(group)]
        if rest * scale > MARGIN * goal.kl:
            continue  # far from the goal: not worth measuring
        distance = measure(order[count:])
        if goal.reached(distance):
            chosen = order[:count]
            patterns = [*ignored, *(module for group in chosen for module in group.modules)]
            return SensitivityProposal(
                action="ignore",
                groups=tuple((group.layer, group.name) for group in chosen),
                overrides=(f"ignore={json.dumps(patterns)}",),
                predicted_kl=distance.mean,
                extra_bytes=sum(map(_extra_bytes, chosen)),
            )
    return None


def _extra_bytes(group: FusedGroup) -> int:
    """What ignoring a group costs on disk."""
    return group.stored_bytes - group.quantized_bytes


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
    if not windows:
        raise InputError("a sensitivity map needs text; give at least one window")
    # Four bytes per logit, since the reference is kept in float32.
    limit = min(max_tokens, reference_bytes // (4 * vocab_size))
    fitting = sum(total <= limit for total in accumulate(map(len, windows)))
    return windows[: max(1, fitting)]


class Probe:
    """The original's answers on fixed text, and how far others are from them.

    Args:
        original: with all its own groups in place.
        windows: the text.
    """

    def __init__(self, original: LLM, windows: Windows) -> None:
        self._original, self._groups, self._replay = original, list(batches(original, windows)), Replay(original)
        # Kept, because every group is compared with it: computing it anew doubles the passes.
        self._reference: list[list[Tensor]] = [window_logits(original, group) for group in self._groups]

    def measure(self, groups: list[FusedGroup]) -> Distances:
        """The original with these groups quantized."""
        with swapped(groups), self._replay.start(groups):
            return self.compare(self._original)

    def compare(self, llm: LLM) -> Distances:
        """Another model, or the original as it is now."""
        return join_distances(
            [
                distances(p, q)
                for group, reference in zip(self._groups, self._reference, strict=True)
                for p, q in zip(reference, window_logits(llm, group), strict=True)
            ]
        )
