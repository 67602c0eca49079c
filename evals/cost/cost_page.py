"""Make the cost tables of docs/performance.md and README's sentence about costs, from the results of each machine."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import provenance
from measure_cost import BEFORE, RESULTS, changed, read_entries
from provenance import MARK
from works import OURS, WORKS, Work, key

BUSY = 0.1  # CPU seconds that other processes may use, as a share of the row's own CPU seconds
Entry = dict[str, Any]
# Linears of a layer as (outputs, inputs), and the four sets of linears that have the same input.
LINEARS = ((2048, 2048), (256, 2048), (256, 2048), (2048, 2048), (5632, 2048), (5632, 2048), (2048, 5632))
SETS = ((2560, 2048), (2048, 2048), (11264, 2048), (2048, 5632))  # outputs, inputs
NUM_LAYERS = 2
COUNTED = ("work", "TFLOP done", "TFLOP needed", "done / needed", "s in layers", "share of matrix rate")
NOTHING = (
    "No cost has been measured yet. `evals/cost/measure_cost.py` measures quantkit, llm-compressor, GPTQModel and\n"
    "auto-round."
)
HEAD = """\
Each figure covers a whole process, including imports, reading and writing. The processes run one after another. Unless
a row says otherwise, the model is {model}, with random weights in bfloat16. All tools quantize it to 4 bits in groups
of 128 with the same token ids ({length} in each sequence). Each machine has a separate table, because the ratios depend
on how fast a machine multiplies matrices.

- *ours / best peer*: quantkit's figure divided by that of the best peer, for wall time, CPU seconds and peak memory.
  The best peer is the one with the least CPU seconds. For a search, the peer is an earlier quantkit, which compressed
  with each candidate in a separate pass.
- *limit* and *goal*: upper bounds that we set for the first two ratios. *peak* is the bound for the third.
"""
MODEL = "two layers of TinyLlama-1.1B's shape (one for AutoRound)"


def table(folder: Path = RESULTS) -> str:
    """Return the section of docs/performance.md."""
    machines = _machines(folder)
    head = HEAD.format(model=MODEL, length=WORKS[0].length)
    return "\n".join([head, *("\n".join(_section(entries)) for entries in machines)]) if machines else NOTHING


def _machines(folder: Path) -> list[dict[str, Entry]]:
    """Return the rows of each machine."""
    return [entries for path in sorted(folder.glob("*.json")) if (entries := read_entries(path))]


def _section(entries: dict[str, Entry]) -> list[str]:
    """Return the lines of one machine."""
    machine = " or ".join(sorted({entry["taken"]["machine"] for entry in entries.values()}))
    rates = next((entry["rates"] for entry in entries.values() if "rates" in entry), {})
    said = ", ".join(f"{rate / 1e9:.0f} GFLOP/s in {dtype}" for dtype, rate in rates.items())
    title = f"**{machine}**; large products: {said}" if said else f"**{machine}**"
    compared = "ours / best peer: wall / CPU / peak"
    head = ("work", "tool", "wall s", "CPU s", "peak MB", compared, "limit", "goal")
    made = provenance.table(head, [cells for work in WORKS for cells in _rows(work, entries)])
    return [title, "", made, *_notes(entries), *_arithmetic(entries), *_where(entries)]


def readme_sentence(folder: Path = RESULTS) -> str:
    """Compare the shipped GPTQ recipe with the best peer on quiet machines that ran today's code; "" if none did."""
    work, pairs = WORKS[0], []
    for entries in _machines(folder):
        ours, peer = entries.get(key(work, OURS)), best_peer(work, entries)
        if ours and peer and not (changed(ours, work) or is_busy(ours) or is_busy(peer)):
            pairs.append((ours, peer))
    if not pairs:
        return ""
    wall, _, peak = (_range(values) for values in zip(*(ratios(*pair) for pair in pairs), strict=True))
    tools = " and ".join(sorted({peer["tool"] for _, peer in pairs}))
    return (
        f"On {len(pairs)} kinds of machine, `gptq-int4` needs {wall} % of the time and {peak} % of the memory of\n"
        f"{tools}'s GPTQ ([performance](docs/performance.md))."
    )


def _range(values: Iterable[float]) -> str:
    """Return the smallest and the largest of the ratios, in per cent."""
    said = sorted({round(100 * value) for value in values})
    return " to ".join(dict.fromkeys((str(said[0]), str(said[-1]))))


def best_peer(work: Work, entries: dict[str, Entry]) -> Entry | None:
    """Return the row of the peer with the least CPU seconds; for a search, the row of an earlier quantkit."""
    of = next(each for each in WORKS if each.name == (work.of or work.name))
    names = [key(of, tool) for tool in of.jobs] or [key(work, BEFORE)]
    rows = [entries[name] for name in names if name in entries]
    return min(rows, key=lambda row: float(row["cpu_s"]), default=None)


def ratios(ours: Entry, peer: Entry) -> tuple[float, float, float]:
    """Return our wall seconds, CPU seconds and peak memory, divided by those of the peer."""
    wall, cpu, peak = (ours[name] / peer[name] for name in ("wall_s", "cpu_s", "peak_mb"))
    return wall, cpu, peak


def is_busy(entry: Entry) -> bool:
    """Whether other processes used too many CPU seconds meanwhile; see BUSY."""
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
    """Return lines that explain the marks; nothing if there are no marks."""
    works = {work.name: work for work in WORKS}
    lines = []
    stale: dict[str, list[str]] = {}
    for entry in entries.values():
        if change := changed(entry, works[entry["work"]]):
            stale.setdefault(change[0], []).append(f"`{entry['work']}`")
    if stale:
        said = "; of ".join(f"{module} ({', '.join(names)})" for module, names in stale.items())
        lines.append(f"{MARK} Measured before the last change of {said}.")
    if any(map(is_busy, entries.values())):
        lines.append("‡ Other processes ran at the same time, so these times are too long.")
    return ["", *lines] if lines else []


def needed(work: Work) -> float:
    """Return the number of operations that a GPTQ recipe cannot avoid.

    Each linear runs once per stream. A Gram matrix takes half of a product. Each linear is solved twice, the second
    time with fitted scales. A cross Gram matrix is computed from the errors of the inputs, or from their effect on the
    outputs if there are fewer outputs. A correction divides by the smaller matrix.
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
    """Return the table of operations, and of how close they come to the speed of large products."""
    counted = [(work, entries[key(work, OURS)]) for work in WORKS if "operations" in entries.get(key(work, OURS), {})]
    if not counted:
        return []
    return [
        "",
        "*TFLOP needed*: the operations that the method cannot avoid. *Share of matrix rate*: the time that this",
        "machine takes for the same number of operations in large products, divided by the time in layers.",
        "",
        provenance.table(COUNTED, [_counted(work, entry) for work, entry in counted]),
    ]


def _counted(work: Work, entry: Entry) -> list[str]:
    operations, rates = entry["operations"], entry["rates"]
    done = sum(operations.values())
    seconds = sum(count / rates.get(dtype, rates["float32"]) for dtype, count in operations.items())
    title = f"{work.title} {MARK}" if changed(entry, work) else work.title
    amounts = [f"{done / 1e12:.1f}", f"{needed(work) / 1e12:.1f}", f"{done / needed(work):.2f}"]
    return [title, *amounts, f"{entry['layers_s']:.1f}", f"{100 * seconds / entry['layers_s']:.0f} %"]


def _where(entries: dict[str, Entry]) -> list[str]:
    """Return the line that says when and at which commits the rows were measured."""
    stamps = [entry["taken"] for entry in entries.values()]
    taken = sorted({f"{each['date']} at commit {each['commit']}" for each in stamps})
    return ["", f"Measured on {'; on '.join(taken)}.", ""]
