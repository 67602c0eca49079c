"""The table of costs in docs/performance.md, and README's sentence on them, from evals/results/cost/cost.json."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure_cost import BEFORE, RESULTS, changed, read_entries
from provenance import MARK
from works import OURS, WORKS, Work, key

BUSY = 0.1  # of a row's own CPU seconds that other processes may take
Entry = dict[str, Any]
# Layers' linears of the model: outputs x inputs, and inputs of the four sets that read the same.
LINEARS = ((2048, 2048), (256, 2048), (256, 2048), (2048, 2048), (5632, 2048), (5632, 2048), (2048, 5632))
SETS = ((2560, 2048), (2048, 2048), (11264, 2048), (2048, 5632))  # outputs, inputs
NUM_LAYERS = 2
NOTHING = (
    "No cost has been measured on today's machine and code: `evals/cost/measure_cost.py` makes these figures, with\n"
    "llm-compressor, GPTQModel and auto-round beside ours."
)
HEAD = """\
Whole processes, one after another, imports, reading and writing included: {model}, random
weights in bfloat16, 4 bits in groups of 128, the same token ids for all ({length} a sequence). *To the best peer* is
ours by that of the peer with the least CPU seconds, in wall time, CPU seconds and memory; *least* and *goal* are what
the first two should be at most, *peak* what the third should be; for a search, of what it took before all candidates
shared a pass.
"""
MODEL = "two layers of TinyLlama-1.1B's shape (one for AutoRound)"


def table(path: Path = RESULTS) -> str:
    """What docs/performance.md says."""
    entries = read_entries(path)
    if not entries:
        return NOTHING
    lines = [HEAD.format(model=MODEL, length=WORKS[0].length)]
    lines += [
        "| work | tool | wall s | CPU s | peak MB | to the best peer | least | goal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for work in WORKS:
        lines += (_line(cells) for cells in _rows(work, entries))
    return "\n".join([*lines, *_notes(entries), *_arithmetic(entries), *_where(entries)])


def readme_sentence(path: Path = RESULTS) -> str:
    """How the shipped GPTQ recipe compares; nothing while it is stale, was taken on a busy machine, or has no peer."""
    entries = read_entries(path)
    work = WORKS[0]
    ours, peer = entries.get(key(work, OURS)), best_peer(work, entries)
    if ours is None or peer is None or changed(ours, work) or is_busy(ours) or is_busy(peer):
        return ""
    wall, cpu, peak = ratios(ours, peer)
    return (
        f"`gptq-int4` takes {wall:.2f} times the time, {cpu:.2f} times the CPU seconds and {peak:.2f} times\n"
        f"the memory of {peer['tool']}'s GPTQ on the same machine ([performance](docs/performance.md))."
    )


def best_peer(work: Work, entries: dict[str, Entry]) -> Entry | None:
    """The peer's row with the least CPU seconds; of a search, our own earlier one."""
    of = next(each for each in WORKS if each.name == (work.of or work.name))
    names = [key(of, tool) for tool in of.jobs] or [key(work, BEFORE)]
    rows = [entries[name] for name in names if name in entries]
    return min(rows, key=lambda row: float(row["cpu_s"]), default=None)


def ratios(ours: Entry, peer: Entry) -> tuple[float, float, float]:
    """Wall, CPU seconds and peak, ours by the peer's."""
    wall, cpu, peak = (ours[name] / peer[name] for name in ("wall_s", "cpu_s", "peak_mb"))
    return wall, cpu, peak


def is_busy(entry: Entry) -> bool:
    """Whether other processes took more than a small share meanwhile."""
    return bool(entry["others_cpu_s"] > BUSY * entry["cpu_s"])


def _rows(work: Work, entries: dict[str, Entry]) -> Iterator[list[str]]:
    peer = best_peer(work, entries)
    for tool in (OURS, BEFORE, *work.jobs):
        entry = entries.get(key(work, tool))
        if entry is None:
            continue
        own = tool == OURS
        name = f"**{tool}**" if own else f"quantkit {entry['taken']['commit']}" if tool == BEFORE else entry["tool"]
        marks = MARK * bool(own and changed(entry, work)) + "‡" * is_busy(entry)
        figures = [f"{entry['wall_s']:.1f}", f"{entry['cpu_s']:.1f}", str(entry["peak_mb"])]
        compared = " / ".join(f"{ratio:.2f}" for ratio in ratios(entry, peer)) if own and peer else ""
        limits = [_limit(work.least, work.least_peak), _limit(work.goal, work.goal_peak)] if own else ["", ""]
        yield [work.title if own else "", f"{name} {marks}".strip(), *figures, compared, *limits]


def _limit(seconds: float, peak: float | None) -> str:
    return f"{seconds}" if peak is None else f"{seconds}, peak {peak}"


def _notes(entries: dict[str, Entry]) -> list[str]:
    """What the marks mean, where there are any."""
    works = {work.name: work for work in WORKS}
    lines = []
    stale = {entry["work"]: change for entry in entries.values() if (change := changed(entry, works[entry["work"]]))}
    if stale:
        said = ", ".join(f"`{name}` of {change[0]}" for name, change in stale.items())
        lines.append(f"{MARK} Taken before the last change: {said}.")
    if any(map(is_busy, entries.values())):
        lines.append("‡ Other processes ran meanwhile: these seconds are too many.")
    return ["", *lines] if lines else []


def needed(work: Work) -> float:
    """Operations that a GPTQ recipe cannot do without.

    Each linear runs once per stream, a Gram matrix is half of a product, and each linear is solved twice, the second
    time with fitted scales. A cross Gram is of errors of inputs, or of what they do to the outputs where these are
    few; a correction divides the smaller matrix.
    """
    is_plain = bool(work.changes)
    streams, tokens = (1 if is_plain else 2), work.samples * work.length
    forward = sum(2 * outputs * inputs for outputs, inputs in LINEARS) + 2 * work.length * LINEARS[0][0]
    grams = sum(width**2 for _, width in SETS)
    solve = sum(width**3 / 3 for _, width in SETS) + sum(2 * outputs * inputs**2 for outputs, inputs in LINEARS)
    needed = tokens * (streams * forward + grams) + solve
    if not is_plain:
        needed += tokens * sum(2 * width * min(width, 2 * rows) for rows, width in SETS)
        needed += sum(
            2 * rows * width**2 + (2 * width * min(rows, width) * width) * (2 * rows > width) for rows, width in SETS
        )
    return NUM_LAYERS * needed


def _arithmetic(entries: dict[str, Entry]) -> list[str]:
    """How many operations, and how close to what the machine can do."""
    counted = [(work, entries[key(work, OURS)]) for work in WORKS if "operations" in entries.get(key(work, OURS), {})]
    if not counted:
        return []
    rates = counted[0][1]["rates"]
    said = ", ".join(f"{rate / 1e9:.0f} GFLOP/s in {dtype}" for dtype, rate in rates.items())
    return [
        "",
        "*Of the matrix rate* is the time that large products of as many operations take on this machine",
        f"({said}) by the time in layers.",
        "",
        "| work | TFLOP done | needed | done / needed | s in layers | of the matrix rate |",
        "|---|---|---|---|---|---|",
        *(_line(_counted(work, entry)) for work, entry in counted),
    ]


def _counted(work: Work, entry: Entry) -> list[str]:
    operations, rates = entry["operations"], entry["rates"]
    done = sum(operations.values())
    seconds = sum(count / rates.get(dtype, rates["float32"]) for dtype, count in operations.items())
    title = f"{work.title} {MARK}" if changed(entry, work) else work.title
    amounts = [f"{done / 1e12:.1f}", f"{needed(work) / 1e12:.1f}", f"{done / needed(work):.2f}"]
    return [title, *amounts, f"{entry['layers_s']:.1f}", f"{100 * seconds / entry['layers_s']:.0f} %"]


def _where(entries: dict[str, Entry]) -> list[str]:
    """Where and when."""
    stamps = [entry["taken"] for entry in entries.values()]
    taken = sorted({f"{each['date']} at {each['commit']} on {each['machine']}" for each in stamps})
    return ["", f"Taken {'; '.join(taken)}."]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
