"""Divide GPTQ's work into sets whose statistics fit into memory together, and into rows that one process solves.

The division of a set depends on its shape alone, not on the number of processes. So the set's codes do not
depend on that number either.
"""

import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from quantkit.compress.calibration.layer import LayerContext
from quantkit.distributed import world
from quantkit.models.linear_sets import LinearSet, find_expert

# Largest number of weights that go through the loop as one matrix, in float32: 1 GiB.
_TALLEST = 1 << 28
# Least number of rows per part of a matrix, on average, and largest number of parts.
_SHORTEST, _MOST_PARTS = 1024, 4
# Factorising a Hessian takes as long as solving one row for every 8 columns of the Hessian.
_FACTORISED = 8
# Bisection steps in the search for the smallest possible largest share.
_HALVINGS = 20

Pending = tuple[LinearSet, tuple[str, ...]]
"""A set and those of its linears that have no codes yet."""


class Job(NamedTuple):
    """Rows that GPTQ's loop processes together as one tall matrix.

    Args:
        set: names of the linears that share their inputs.
        rows: names and rows of some of these linears, all with one scheme.
    """

    set: tuple[str, ...]
    rows: list[tuple[str, slice]]


def is_of_one_expert(names: tuple[str, ...]) -> bool:
    """Whether all linears of a set belong to the same expert.

    A layer has many such sets. One process collects the statistics of such a set and solves it.
    """
    experts = {find_expert(name) for name in names}
    return len(experts) == 1 and None not in experts


def cut_set(layer: LayerContext, names: tuple[str, ...]) -> Iterator[Job]:
    """Yield the linears of a set as jobs: linears of one scheme form one tall matrix, or several if it is very large.

    The division does not depend on the number of processes. On a GPU, extra rows cost almost nothing, so a
    matrix is not divided there.
    """
    for scheme in dict.fromkeys(layer.schemes[name].weight for name in names):
        same = [name for name in names if layer.schemes[name].weight == scheme]
        each = max(1, _TALLEST // layer.weight(same[0]).numel())
        for start in range(0, len(same), each):
            members = same[start : start + each]
            sizes = [len(layer.weight(name)) for name in members]
            whole = layer.device.type == "cuda" or scheme.block_rows is None
            count = 1 if whole else min(max(sum(sizes) // _SHORTEST, 1), _MOST_PARTS)
            for part in cut_rows(sizes, count, max(_SHORTEST // 16, scheme.block_rows or 1)):
                yield Job(names, [(members[number], rows) for number, rows in part])


def owners(layer: LayerContext, jobs: list[Job]) -> list[int]:
    """Assign jobs to processes: an expert's job to the process that has its statistics; other jobs are balanced by
    cost.
    """
    width = {job.set: layer.weight(job.set[0]).shape[1] for job in jobs}
    rows = [sum(rows.stop - rows.start for _, rows in job.rows) for job in jobs]
    solvers = [layer.owner(job.set[0]) for job in jobs]
    # Sets stay whole if possible: each process that solves a part of a set has to factorise the set's Hessian.
    shared = [number for number, job in enumerate(jobs) if not is_of_one_expert(job.set)]
    shared.sort(key=lambda number: -width[jobs[number].set])
    work = [(jobs[n].set, rows[n] * width[jobs[n].set] ** 2, width[jobs[n].set] ** 3 / _FACTORISED) for n in shared]
    for number, solver in zip(shared, deal_out(work, world()), strict=True):
        solvers[number] = solver
    return solvers


def deal_out(work: Sequence[tuple[Hashable, float, float]], count: int) -> list[int]:
    """Split a list of work items into consecutive shares so that the largest share is as small as possible.

    Args:
        work: for each item: its kind, its cost, and a cost that a process pays once for the first item of that kind.
        count: number of shares.
    """

    def shares(limit: float) -> list[int]:
        owner, load, owned = 0, 0.0, list[int]()
        begun: Hashable = None
        for of, cost, once in work:
            added = cost + (once if begun != of else 0)
            if load and load + added > limit:
                owner, load, added = owner + 1, 0.0, cost + once
            load, begun = load + added, of
            owned.append(owner)
        return owned

    low, high = max((cost + once for _, cost, once in work), default=0.0), sum(cost + once for _, cost, once in work)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if max(shares(middle), default=0) < count else (middle, high)
    return shares(high)


def cut_rows(sizes: list[int], count: int, height: int) -> list[list[tuple[int, slice]]]:
    """Divide the rows of several matrices into parts of about equal size; no part is empty.

    Args:
        sizes: number of rows of each matrix.
        count: maximum number of parts.
        height: number of rows of a matrix that stay together.
    Returns:
        For each part, the number of each matrix and its rows.
    """
    total, start = sum(sizes), 0
    parts: list[list[tuple[int, slice]]] = [[] for _ in range(count)]
    for number, size in enumerate(sizes):
        inside = [(total * part // count - start) // height * height for part in range(1, count)]
        edges = [0, *(min(max(edge, 0), size) for edge in inside), size]
        for part, (low, high) in zip(parts, itertools.pairwise(edges), strict=True):
            if low < high:
                part.append((number, slice(low, high)))
        start += size
    return [part for part in parts if part]


def fitting_rounds(layer: LayerContext, sets: list[Pending], *, one_by_one: bool) -> Iterator[list[Pending]]:
    """Yield the sets whose statistics are gathered at the same time.

    Args:
        layer: the layer. The statistics of experts may take as much memory as its weights; further experts follow in
            later rounds.
        sets: the result of `LayerContext.pending`.
        one_by_one: gather each set only after the set before it has codes. Expert sets of one kind do not depend on
            each other and stay together.
    """
    limit = sum(parameter.nbytes for parameter in layer.block.parameters())
    entries: list[Pending] = []
    kind, taken = "", 0
    for entry in sets:
        first = entry[1][0]
        expert, size, before = find_expert(first), 4 * layer.weight(first).shape[1] ** 2, kind
        kind = first if expert is None else first.rpartition(".")[2]
        if entries and ((one_by_one and kind != before) or (expert is not None and taken + size > limit)):
            yield entries
            entries, taken = [], 0
        entries.append(entry)
        taken += size
    if entries:
        yield entries
