"""Measure a sensitivity map, the KL that each quantized fused group causes alone, and propose a change of the recipe.

The original is loaded once. One group at a time is quantized in it, and the KL to the unchanged original is measured on
the same text. The proposal is to ignore the groups with the most KL per byte; its KL is measured, not only predicted.
Related: Dong et al. 2019 (HAWQ) choose bits per layer by curvature.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

from torch import Tensor

from quantkit.distributed import share_out, world
from quantkit.errors import InputError
from quantkit.evaluate.fidelity import (
    Distances,
    Windows,
    batches,
    check_vocabulary,
    compare_windows,
    distances,
    join_distances,
    window_logits,
)
from quantkit.evaluate.group_swaps import FusedGroup, find_fused_groups, swapped
from quantkit.evaluate.loading import UNQUANTIZED
from quantkit.quantities import elapsed
from quantkit.results import GateResult, Report, SensitivityMap, SensitivityProposal, SensitivityRecord
from quantkit.results.gates import METRICS
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.model import NativeModel

States = list[tuple[Tensor, Tensor | None]]  # inputs of a block at each step of the engine
Forms = tuple[tuple[FusedGroup, ...], ...]  # the quantized groups of each layer


class Replay:
    """Caches the inputs of one layer, so that a measurement can skip all earlier layers. *Mutable*.

    Two successive measurements compute the same before the first layer whose quantized groups differ: on average, in
    half of the layers. The cache works only for a `NativeModel` on a CPU; other models run all layers.

    Args:
        llm: the model; every measurement must use the same inputs.
    """

    def __init__(self, llm: LLM) -> None:
        self._model = llm.model if isinstance(llm.model, NativeModel) and llm.model.device.type == "cpu" else None
        self._last: Forms = ()
        self._kept: Forms = ()  # forms of the layers before the one whose inputs are `_states`
        self._states: States = []

    @contextmanager
    def start(self, groups: Sequence[FusedGroup]) -> Iterator[None]:
        """Run one measurement inside the `with` block, without the first layers if the cache holds their result.

        Args:
            groups: groups that are quantized in this measurement.
        """
        if self._model is None:
            yield
            return
        blocks = self._model.blocks
        forms = tuple(tuple(group for group in groups if group.layer == index) for index in range(len(blocks)))
        first = len(self._kept) if self._kept == forms[: len(self._kept)] else 0
        # The next measurement differs from this one no earlier than this one differs from the last.
        parting = next((i for i, (a, b) in enumerate(zip(self._last, forms, strict=False)) if a != b), len(self._last))
        recorded: States = []
        running: list[Any] = [_Replayed(self._states), *blocks[first:]] if first else list(blocks)
        if first < parting < len(blocks):
            running.insert(len(running) - (len(blocks) - parting), _Recorded(recorded))
        try:
            self._model.blocks = running
            yield
        finally:
            self._model.blocks = blocks
        self._last = forms
        if recorded:
            self._kept, self._states = forms[:parting], recorded


class _Recorded:
    """A block that records its inputs and passes them on."""

    rope = None

    def __init__(self, states: States) -> None:
        self._states = states

    def __call__(self, x: Tensor, pending: Tensor | None, *_: Any) -> tuple[Tensor, Tensor | None]:
        self._states.append(_copied(x, pending))
        return x, pending


class _Replayed:
    """A block that returns recorded states instead of its inputs."""

    rope = None

    def __init__(self, states: States) -> None:
        self._left = iter(states)

    def __call__(self, *_: Any) -> tuple[Tensor, Tensor | None]:
        return _copied(*next(self._left))


def _copied(x: Tensor, pending: Tensor | None) -> tuple[Tensor, Tensor | None]:
    # Kernels may write into their inputs.
    return x.clone(), None if pending is None else pending.clone()


MAX_TOKENS, FEW_TOKENS = 4096, 1024  # maximum tokens of text: for a requested map, and for one that was not requested
REFERENCE_BYTES = 1 << 29  # maximum for the original's logits on the text, to which every measurement is compared
MARGIN = 0.8  # share of a limit that a proposal may use, because it is compressed again and measured on other text


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """Limits that a model's distances from its original must meet.

    Args:
        kl: maximum mean KL.
        kl_p99: maximum 99th percentile of KL.
        top1: minimum share of positions with the same likeliest token.
    """

    kl: float = math.inf
    kl_p99: float = math.inf
    top1: float = 0.0

    def reached(self, measured: Distances) -> bool:
        """Whether measured distances meet the goal, with a margin for the mean KL and for disagreement."""
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
    moved: bool | None = None,
    max_tokens: int = MAX_TOKENS,
    progress: Callable[[str], None] = lambda _: None,
) -> SensitivityMap:
    """Quantize one fused group of the original at a time, and measure the KL that this causes.

    Args:
        llm: the quantized model.
        original: the original, loaded in the same dtype; unchanged on return.
        windows: windows of token ids; only the first ones are used, see `few`.
        data: name of the text, for the record.
        goal: limits that a proposal has to meet; None = make no proposal.
        ignored: patterns of linears that the recipe already ignores; a proposal ignores them too.
        moved: see `find_fused_groups`.
        max_tokens: maximum number of tokens of text.
        progress: callback for progress messages.
    Raises:
        ModelError: the vocabularies differ; see also `find_fused_groups`.
    """
    check_vocabulary(llm, original)
    groups = find_fused_groups(llm, original, moved=moved)
    probe = Probe(original, few(windows, original.vocab_size, max_tokens))
    began = time.perf_counter()

    def measure(number: int) -> float:
        group, spent = groups[number], time.perf_counter() - began
        rest = spent / max(1, number) * (len(groups) - number)
        left = f"; about {elapsed(rest)} left" if number and world() == 1 else ""
        progress(f"sensitivity map: group {number + 1} of {len(groups)}, layer {group.layer} {group.name}{left}")
        return probe.measure([group]).mean

    # Give neighbouring groups to one rank, which runs the layers before both of them only once.
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
    progress("sensitivity map: searching for the smallest change that meets the gates")
    return replace(measured, proposal=propose(groups, measured, probe.measure, goal, ignored))


def propose(
    groups: Sequence[FusedGroup],
    measured: SensitivityMap,
    measure: Callable[[list[FusedGroup]], Distances],
    goal: Goal,
    ignored: Sequence[str] = (),
) -> SensitivityProposal | None:
    """Propose fused groups that the recipe should not quantize; those with the most KL per byte are chosen first.

    Args:
        groups: all groups, in the order of the map.
        measured: the sensitivity map of these groups.
        measure: function that returns the distances of the original with the given groups quantized.
        goal: limits to meet; checked by measuring, since the sum of KL is only a prediction.
        ignored: patterns of linears that the recipe already ignores.
    Returns:
        The proposal; None if all groups would have to be ignored.
    """
    gain = {group: record.kl for group, record in zip(groups, measured.records, strict=True)}
    # Greedy, as for a knapsack: first the groups that reduce KL most per additional byte.
    order = sorted(groups, key=lambda group: gain[group] / max(1, _extra_bytes(group)), reverse=True)
    # The groups' KL seldom adds up to the total, so the total is assumed to shrink in proportion to the sum.
    scale = measured.total_kl / measured.sum_kl if measured.sum_kl > 0 else 1.0
    rest = measured.sum_kl
    # Without the last group: a model that ignores every group is not compressed.
    for count, group in enumerate(order[:-1], start=1):
        rest -= gain[group]
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
    """Return the additional bytes on disk if a group is ignored."""
    return group.stored_bytes - group.quantized_bytes


def few(
    windows: Windows, vocab_size: int, max_tokens: int = MAX_TOKENS, reference_bytes: int = REFERENCE_BYTES
) -> Windows:
    """Return the first windows, as many as the limits allow but at least one.

    Args:
        windows: windows of token ids.
        vocab_size: logits per token.
        max_tokens: maximum number of tokens in all windows.
        reference_bytes: maximum bytes of the original's logits that a `Probe` keeps.
    Raises:
        InputError: there is no window.
    """
    if not windows:
        raise InputError("a sensitivity map needs text, but no window of text was given; give at least one")
    # Four bytes per logit, since the reference is kept in float32.
    limit = min(max_tokens, reference_bytes // (4 * vocab_size))
    fitting = sum(total <= limit for total in accumulate(map(len, windows)))
    return windows[: max(1, fitting)]


class Probe:
    """Measures distances from the original, whose logits on a fixed text it stores.

    Args:
        original: the original, without replaced groups.
        windows: windows of the text.
    """

    def __init__(self, original: LLM, windows: Windows) -> None:
        self._original, self._groups, self._replay = original, list(batches(original, windows)), Replay(original)
        # Kept, because every group is compared with it, and recomputing it would double the passes.
        self._reference: list[list[Tensor]] = [window_logits(original, group) for group in self._groups]

    def measure(self, groups: list[FusedGroup]) -> Distances:
        """Measure the distances that quantizing these groups in the original causes."""
        with self._original.engine.runner.layer_by_layer(), swapped(groups), self._replay.start(groups):
            return self.compare(self._original)

    def compare(self, llm: LLM) -> Distances:
        """Measure a model's distances from the stored logits; the model may be the original with swapped groups."""
        if llm.kv_type not in UNQUANTIZED:
            return self.compare_decoding(llm)
        return join_distances(
            [
                distances(p, q)
                for group, reference in zip(self._groups, self._reference, strict=True)
                for p, q in zip(reference, window_logits(llm, group), strict=True)
            ]
        )

    def compare_decoding(self, llm: LLM) -> Distances:
        """Measure the distances of a model with a quantized cache, which reads one token of each window per step."""
        reference = list(chain.from_iterable(self._reference))
        return compare_windows(llm, tuple(chain.from_iterable(self._groups)), reference)


def failed_accuracy(report: Report) -> list[GateResult]:
    """Return the accuracy gates of a report that were measured and failed."""
    return [
        gate
        for gate in report.gates
        if not gate.held and gate.value is not None and METRICS[gate.metric].kind == "accuracy"
    ]


def repair_goal(report: Report) -> Goal | None:
    """Convert a report's failed accuracy gates to a `Goal`; None if no gate failed or none can be converted.

    The conversion assumes that the loss of accuracy and the logarithm of a perplexity ratio are proportional to KL.
    If accuracy falls faster at larger KL, as is usual, the true limit on KL is higher, so the converted limit is on the
    safe side.

    Args:
        report: report with fidelity and evaluated gates.
    """
    failed = failed_accuracy(report)
    if not failed or report.fidelity is None:
        return None
    total = report.fidelity.mean_kl
    limits = {gate.metric: gate.limit for gate in failed}
    shares = [share for gate in failed if (share := _share(report, gate)) is not None]
    kl = min([limits.get("kl", math.inf), *(total * share for share in shares)])
    goal = Goal(kl=kl, kl_p99=limits.get("kl_p99", math.inf), top1=limits.get("top1", 0.0))
    return None if goal == Goal() else goal


def _share(report: Report, gate: GateResult) -> float | None:
    """Return the share of the measured loss that a gate allows; None for gates that do not limit a loss."""
    assert gate.value is not None
    if gate.metric == "recovery":
        return _ratio(100 - gate.limit, 100 - gate.value)
    if gate.metric == "perplexity_ratio":
        # The logarithm of a perplexity ratio is a loss in nats per token, the unit of KL.
        return _ratio(_log(gate.limit), _log(gate.value))
    of_text = gate.metric == "perplexity"
    # A gate need not name a task or text. It was then checked on the comparison that has the gate's value.
    alike = (c for c in report.comparisons if c.value == gate.value and c.metric.startswith("perplexity") == of_text)
    comparison = next(alike, None)
    if comparison is None:
        return None
    if gate.metric == "score":
        return _ratio(comparison.baseline - gate.limit, comparison.baseline - gate.value)
    if gate.metric == "perplexity":
        return _ratio(_log(gate.limit / comparison.baseline), _log(gate.value / comparison.baseline))
    return None


def _ratio(allowed: float, lost: float) -> float | None:
    """Return the share of a loss that a gate allows: allowed / lost, clamped to 0..1.

    None if nothing was lost or the loss is infinite.
    """
    if not lost > 0 or math.isinf(lost):
        return None
    return max(0.0, min(1.0, allowed / lost))


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
