"""Divide GPTQ's work into rounds of sets whose statistics fit into memory together, and divide each set into jobs.

One process solves a job. How a set is divided into jobs does not depend on the number of processes, so the set's codes
do not depend on this number either.
"""

import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from quantkit.compress.calibration.layer import LayerContext
from quantkit.distributed import world
from quantkit.models.linear_sets import LinearSet, find_expert

# Maximum number of weights that go through the loop as one matrix; in float32, they take 1 GiB.
_TALLEST = 1 << 28
# Minimum average number of rows per part of a matrix, and maximum number of parts.
_SHORTEST, _MOST_PARTS = 1024, 4
# Factorising a (K, K) Hessian takes as long as solving K / 8 rows.
_FACTORISED = 8
# Number of bisection steps that minimize the cost of the largest share.
_HALVINGS = 20

Pending = tuple[LinearSet, tuple[str, ...]]
"""A set and those of its linears that have no codes yet."""


class Job(NamedTuple):
    """Rows that GPTQ's loop processes together as one tall matrix.

    Args:
        set: names of the linears that share their inputs.
        rows: name and rows of each linear in the job; these linears belong to the set and have the same scheme.
    """

    set: tuple[str, ...]
    rows: list[tuple[str, slice]]


def is_of_one_expert(names: tuple[str, ...]) -> bool:
    """Whether all linears of a set belong to the same expert.

    A layer with experts has many such sets, enough for all processes. So none of them is divided: one process collects
    all statistics of a set and solves all of its jobs.
    """
    experts = {find_expert(name) for name in names}
    return len(experts) == 1 and None not in experts


def cut_set(layer: LayerContext, names: tuple[str, ...]) -> Iterator[Job]:
    """Divide a set into jobs. Linears with the same scheme form one tall matrix, or several if one would be too large.

    On a CPU, the rows of a tall matrix are divided among several jobs. On a GPU they are not, because extra rows cost
    almost nothing. The division does not depend on the number of processes.
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
    """Return the process that solves each job. An expert's job goes to the process that has the expert's statistics;
    other jobs are balanced by cost.
    """
    width = {job.set: layer.weight(job.set[0]).shape[1] for job in jobs}
    rows = [sum(rows.stop - rows.start for _, rows in job.rows) for job in jobs]
    solvers = [layer.owner(job.set[0]) for job in jobs]
    # Sets are divided only if necessary, because each process that solves a part of a set must factorise its Hessian.
    shared = [number for number, job in enumerate(jobs) if not is_of_one_expert(job.set)]
    shared.sort(key=lambda number: -width[jobs[number].set])
    work = [(jobs[n].set, rows[n] * width[jobs[n].set] ** 2, width[jobs[n].set] ** 3 / _FACTORISED) for n in shared]
    for number, solver in zip(shared, deal_out(work, world()), strict=True):
        solvers[number] = solver
    return solvers


def deal_out(work: Sequence[tuple[Hashable, float, float]], count: int) -> list[int]:
    """Divide a list of work items into consecutive shares, so that the most expensive share is as cheap as possible.

    Args:
        work: kind, cost and setup cost of each item. A share bears the setup cost once for consecutive items of the
            same kind.
        count: number of shares.
    Returns:
        For each item, the number of its share.
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
        height: a matrix is cut only at multiples of this number of rows.
    Returns:
        For each part, the index of each matrix in it and the rows of this matrix.
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
    """Divide sets into rounds, and yield the sets of each round. A round's statistics are gathered at the same time.

    Args:
        layer: the layer. An expert's set moves to the next round if the round's statistics would otherwise need more
            memory than the layer's weights.
        sets: the result of `LayerContext.pending`.
        one_by_one: whether each set gets its own round, so that its statistics are gathered after the earlier sets
            have codes. Sets of the same linear in different experts do not depend on each other and share a round.
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
