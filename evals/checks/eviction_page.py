"""What eviction costs, for docs/runtime.md: one table and one plot of evals/results/eviction; for evals/pages.py.

Standard library only.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from provenance import known_rows

RESULTS = Path(__file__).parents[1] / "results/eviction"
SHARES = (0.5, 0.25, 0.125)
TASKS = {
    ("demo", "recall after"): "recall, asked after",
    ("demo", "recall before"): "recall, asked before",
    ("demo", "perplexity"): "perplexity, demo",
    ("babyllama-361", "perplexity"): "perplexity, babyllama-361",
}
TYPES = {"bf16": "16 bit", "int8": "INT8", "int4": "INT4"}
PRESS_BYTES = 2  # of an element: what a press keeps is counted as in a cache of 16 bits
Row = dict[str, Any]


def rows() -> list[Row]:
    """Of ours and of the presses, with `who` each is and `cost`, its bytes to those of all tokens in 16 bits."""
    ours, presses = (_read(name)["rows"] for name in ("ours", "presses"))
    full = {(r["model"], r["task"]): r["bytes"] for r in ours if r["policy"] == "full" and r["kv_cache"] == "bf16"}
    for row in ours:
        row |= {
            "who": f"{row['policy']}, {TYPES[row['kv_cache']]}",
            "cost": row["bytes"] / full[row["model"], row["task"]],
        }
    for row in presses:
        row |= {"who": f"{row['press']} (kvpress)", "cost": row["share"]}
    return [*ours, *(row for row in presses if row["press"] != "full")]


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table() -> str:
    """The part of the page."""
    known = rows()
    kept = " · ".join(f"{100 * share:g}" for share in SHARES)
    lines = [f"| Kept: {kept} % | " + " | ".join(TASKS.values()) + " |", "|---" * (len(TASKS) + 1) + "|"]
    for who in dict.fromkeys(row["who"] for row in known):
        cells = []
        for task in TASKS:
            own = {r["share"]: r["value"] for r in known if r["who"] == who and (r["model"], r["task"]) == task}
            shares = (1.0,) if who.startswith("full") else SHARES
            cells.append(" · ".join(_figure(own.get(share)) for share in shares))
        lines.append(f"| {who} | " + " | ".join(cells) + " |")
    cases = " to ".join(map(str, sorted({row["cases"] for row in known})))
    origin = f"{cases} cases each. Ours: {_origin('ours')}. Presses: {_origin('presses')}."
    shown = f"![Recall against bytes of the cache]({PLOT})"
    return "\n".join([*lines, "", shown, "", origin, "", _users(), "", *_soak(), ""])


def _origin(name: str) -> str:
    """Commits of a file's rows, and when and with what they were taken."""
    about = _read(name)["about"]
    commits = ", ".join(sorted({row["commit"] for row in known_rows(RESULTS / f"{name}.json")}))
    versions = (f"{which} {version}" for which, version in about["versions"].items())
    return ", ".join([f"commit {commits}", about["date"], *versions])


def _users() -> str:
    """What `eviction_users.py` has counted."""
    kept = _read("users")
    full, evicting = (kept["measured"][name] for name in ("full", "budget"))
    about = kept["about"]
    return (
        f"Users: in a pool of {kept['pool']}, prompts of {kept['prompt']} tokens and {kept['new']} new ones, "
        f"{evicting['in_flight']:.1f} requests in flight with a budget of {kept['budget']} and {full['in_flight']:.1f} "
        f"without, {kept['measured_ratio']:.2f} times as many (planned: {kept['planned_ratio']:.2f}); "
        f"{evicting['tokens_per_s']:,.0f} and {full['tokens_per_s']:,.0f} tokens per second. "
        f"Commit {about['commit']}, {about['date']}, {about['machine']}."
    )


def _soak() -> Iterator[str]:
    """What `eviction_soak.py` has counted."""
    rows = _read("soak")["rows"]
    yield "| Soak | preemptions | pages evicted | tokens found in the prefix cache | same text alone |"
    yield "|---" * 5 + "|"
    for row in rows:
        counts = " | ".join(f"{row[key]:,}" for key in ("preemptions", "evicted_pages", "prefix_hit_tokens"))
        name = f"{row['policy']}, {TYPES.get(row['kv_cache'], '32 bit')}"
        yield f"| {name} | {counts} | {row['same_alone']} of {row['asked_alone']} |"
    yield ""
    cancelled = " to ".join(f"{end(row['cancelled'] for row in rows):,}" for end in (min, max))
    first = rows[0]
    yield (
        f"{first['requests']:,} requests each, {cancelled} of them cancelled, in {first['num_pages']} pages of "
        f"{first['page_size']} tokens, budget {first['kv_budget']}; no page was lost. With a quantized cache a text "
        f"may depend on its batch, with a budget or without. Soaks: {_origin('soak')}."
    )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value <= 1 else f"{value:.3f}"


PLOT = "eviction.svg"
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 330, 52, 16, 200, 44
COLOURS = ("#0b62a8", "#9a5b00", "#b3261e", "#59636e", "#3d7a37", "#7a3f8f", "#1c2127")


def plot() -> str:
    """Recall of a question that comes after the eviction, over bytes of the cache on a logarithmic scale."""
    known = [r for r in rows() if (r["model"], r["task"]) == ("demo", "recall after")]
    lines = {}
    for row in known:
        policy = row.get("policy", "")
        if policy in ("keydiff", "window", "full") or row["who"].startswith(("KeyDiff", "SnapKV")):
            lines.setdefault(row["who"], []).append((row["cost"], row["value"]))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" ',
        'font-family="sans-serif" font-size="12">',
        "<title>Recall against bytes of the cache</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        *_axes(),
    ]
    for index, (who, points) in enumerate(lines.items()):
        out += _line(who, sorted(points), index)
    return "\n".join([*out, "</svg>", ""])


def _x(cost: float) -> float:
    """1/64 to 1."""
    return LEFT + (WIDTH - LEFT - RIGHT) * (1 + math.log2(cost) / 6)


def _y(value: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value)


def _axes() -> Iterator[str]:
    for power in range(7):
        x = _x(2.0**-power)
        yield f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#d5dae0"/>'
        name = "1" if not power else f"1/{2**power}"
        yield f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#59636e">{name}</text>'
    for tenth in range(0, 11, 2):
        y = _y(tenth / 10)
        yield f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#d5dae0"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#59636e">{tenth / 10:g}</text>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    label = "bytes of the cache, of all tokens in 16 bits"
    yield f'<text x="{middle:.1f}" y="{HEIGHT - 8}" text-anchor="middle" fill="#1c2127">{label}</text>'


def _line(who: str, points: list[tuple[float, float]], index: int) -> Iterator[str]:
    colour, dash = COLOURS[index % len(COLOURS)], ' stroke-dasharray="5 3"' if "kvpress" in who else ""
    places = [(_x(cost), _y(value)) for cost, value in points]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
    yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in places)
    y = TOP + 14 + 17 * index
    yield f'<path d="M{WIDTH - RIGHT + 14} {y - 4}h20" stroke="{colour}" stroke-width="2"{dash}/>'
    yield f'<text x="{WIDTH - RIGHT + 40}" y="{y}" fill="#1c2127">{who}</text>'
