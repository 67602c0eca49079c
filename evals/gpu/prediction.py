# ruff: noqa: RUF001 - the sign of times is meant
"""Arithmetic of a prediction: what counts of instructions and bytes say a launch takes, and the page of it.

    python evals/gpu/prediction.py              # the page again, from the kept counts

A launch takes as long as the slowest of three things that overlap, and what a launch costs on top:

- memory: bytes by the bandwidth of a copy, or, where too few are under way at once, by what Little's law makes of them;
- issue: instructions of the busiest multiprocessor by its four issue slots;
- tensor cores: products of the busiest multiprocessor by the rate of a large product.

Not in it: the L2 cache, shared memory and its conflicts, the first tile of a program, the sum over splits, waiting for
a result that the next instruction needs, clocks that fall under load. So a prediction is nearer than the plan's floor,
and still a bound that a kernel may miss.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.planning.devices import find_device

STORE = Path(__file__).resolve().parents[2] / "evals/results/compile/predictions.json"
PAGE = STORE.with_suffix(".md")
# Assumed. Shares of what the data sheet says are those of `quantkit.planning.devices`.
COPY_SHARE, PRODUCT_SHARE = 0.9, 0.75
LATENCY, LAUNCH = 700e-9, 1.3e-6  # s from a load to its data under load; s per launch inside a graph
# Of all chips here: instructions a multiprocessor issues per clock, its registers, registers it gives a warp at once,
# shared memory that it keeps of each block.
ISSUE_SLOTS, REGISTERS, REGISTER_UNIT, SHARED_KEPT = 4, 65536, 256, 1024
TERMS = ("memory", "issue", "tensor")


@dataclass(frozen=True)
class Chip:
    """What the device table does not have.

    Source: CUDA C++ Programming Guide, technical specifications per compute capability; the makers' white papers.

    Args:
        capability: 90 for Hopper.
        processors: multiprocessors.
        flops: of dense bfloat16 products, per multiprocessor and clock.
        warps, blocks: that a multiprocessor holds.
        shared_kib: of a multiprocessor.
    """

    capability: int
    processors: int
    flops: int
    warps: int
    blocks: int
    shared_kib: int


CHIPS = {
    "h100": Chip(90, 132, 4096, 64, 32, 228),
    "a100": Chip(80, 108, 2048, 64, 32, 164),
    "l4": Chip(89, 58, 1024, 48, 24, 100),
    "4090": Chip(89, 128, 512, 48, 24, 100),
}
Row = dict[str, Any]


def clock(name: str) -> float:
    """Hertz at which the device's peak is meant."""
    return find_device(name).peak("bf16") / (CHIPS[name].processors * CHIPS[name].flops)


def resident(chip: Chip, code: Row, warps: int) -> int:
    """Blocks that a multiprocessor holds at once."""
    per_warp = -(-32 * code["registers"] // REGISTER_UNIT) * REGISTER_UNIT
    by_shared = chip.shared_kib * 1024 // (code["shared"] + SHARED_KEPT)
    return max(1, min(REGISTERS // (per_warp * warps), by_shared, chip.warps // warps, chip.blocks))


@dataclass(frozen=True)
class Times:
    """What one launch is predicted to take.

    Args:
        memory, issue, tensor: seconds each.
        blocks: on a multiprocessor at once; 0 = not known, another's kernel.
        in_flight: bytes on their way to a multiprocessor at once.
        instructions: of all warps.
    """

    memory: float
    issue: float = 0.0
    tensor: float = 0.0
    blocks: int = 0
    in_flight: float = 0.0
    instructions: int = 0

    @property
    def bound_by(self) -> str:
        """The term that is longest."""
        return max(TERMS, key=lambda term: float(getattr(self, term)))

    @property
    def seconds(self) -> float:
        """With what a launch costs."""
        return max(self.memory, self.issue, self.tensor) + LAUNCH


def times(call: Row, code: Row | None, name: str) -> Times:
    """Predict one launch.

    Args:
        call: its bytes, and programs, trips, warps or operations.
        code: counts of the compiled kernel; None = torch's, which is taken to reach what copies and products reach.
        name: of the device.
    """
    chip, device = CHIPS[name], find_device(name)
    copy, rate = COPY_SHARE * device.bandwidth, PRODUCT_SHARE * device.peak("bf16")
    if code is None:
        return Times(max(call["bytes"] / copy, LATENCY), tensor=call["flops"] / rate)
    programs, trips, warps = call["programs"], call["trips"], call["warps"]
    most = resident(chip, code, warps)
    running = min(programs, most * chip.processors)
    share = running * min(code["ahead"], trips) / (programs * trips)  # of all bytes, in flight at once
    per_warp = code["outside"] + trips * code["loop"]
    busiest = -(-programs // chip.processors) * warps  # warps, one after another
    return Times(
        memory=max(call["bytes"] / copy, LATENCY / share),
        issue=busiest * per_warp / (ISSUE_SLOTS * clock(name)),
        tensor=busiest * trips * code["flops"] * chip.processors / rate,
        blocks=min(most, -(-programs // chip.processors)),
        in_flight=share * call["bytes"] / chip.processors,
        instructions=programs * warps * per_warp,
    )


def _calls(row: Row, codes: Row, name: str) -> Iterator[tuple[Row, Row | None, Times]]:
    for call in row["calls"]:
        code = codes[call["key"]] if "key" in call else None
        yield call, code, times(call, code, name)


def seconds(row: Row, codes: Row, name: str) -> float:
    """Of all launches of a row."""
    return sum(call["count"] * one.seconds for call, _, one in _calls(row, codes, name))


def _us(value: float) -> str:
    return f"{value * 1e6:.1f}"


def _base(row: Row, rows: list[Row]) -> Row:
    return next(other for other in rows if (other["name"], other["kind"]) == (row["name"], "bf16"))


def _kernel_lines(rows: list[Row], codes: Row, name: str) -> Iterator[str]:
    """Single launches: a line each."""
    chip, device = CHIPS[name], find_device(name)
    head = "| | programs × trips | instr. per number | barriers | registers | blocks, occupancy | KiB in flight "
    yield head + "| memory | issue | tensor | predicted | bound by | floor | of floor | bf16 | to bf16 |"
    yield "|---" * 16 + "|"
    for row in rows:
        call, code, one = next(_calls(row, codes, name))
        if code is None:
            continue
        warps, floor = call["warps"], call["bytes"] / device.bandwidth
        base = seconds(_base(row, rows), codes, name)
        cells = (
            f"{row['name']}, {row['kind']}",
            f"{call['programs']} × {call['trips']}",
            f"{32 * one.instructions / row['numbers']:.2f}",
            str(code["barriers"]),
            str(code["registers"]),
            f"{one.blocks}, {one.blocks * warps / chip.warps:.0%}".replace("%", " %"),
            f"{one.in_flight / 1024:.1f}",
            *(_us(getattr(one, term)) for term in TERMS),
            f"**{_us(one.seconds)}**",
            one.bound_by,
            _us(floor),
            f"{floor / one.seconds:.0%}".replace("%", " %"),
            _us(base),
            f"{base / one.seconds:.2f}×",
        )
        yield "| " + " | ".join(cells) + " |"


def _step_lines(rows: list[Row], codes: Row, name: str) -> Iterator[str]:
    """Decode steps: sums over launches, by what binds each of them."""
    yield "| | launches | bound by memory | issue | tensor | launching | predicted | floor | of floor | to bf16 |"
    yield "|---" * 10 + "|"
    for row in rows:
        every = list(_calls(row, codes, name))
        number = sum(call["count"] for call, _, _ in every)
        sums = dict.fromkeys(TERMS, 0.0)
        for call, _, one in every:
            sums[one.bound_by] += call["count"] * getattr(one, one.bound_by)
        total = seconds(row, codes, name)
        cells = [f"{1e3 * value:.2f}" for value in (*sums.values(), number * LAUNCH)]
        ratio = seconds(_base(row, rows), codes, name) / total
        cells = [f"{row['name']}, {row['kind']}", str(number), *cells, f"**{1e3 * total:.2f}**"]
        cells += [f"{1e3 * row['floor']:.2f}", f"{row['floor'] / total:.0%}".replace("%", " %"), f"{ratio:.2f}×"]
        yield "| " + " | ".join(cells) + " |"


def _launch_lines(row: Row, codes: Row, name: str) -> Iterator[str]:
    """The launches of one step, longest first."""
    yield "| kernel | launches | MB each | programs × trips | memory | issue | tensor | µs, all of them |"
    yield "|---" * 8 + "|"
    for call, code, one in sorted(_calls(row, codes, name), key=lambda item: -item[0]["count"] * item[2].seconds):
        size = "" if code is None else f"{call['programs']} × {call['trips']}"
        cells = [f"`{call['kernel']}`", str(call["count"]), f"{call['bytes'] / 1e6:.2f}", size]
        cells += [*(_us(getattr(one, term)) for term in TERMS), _us(call["count"] * one.seconds)]
        yield "| " + " | ".join(cells) + " |"


def _worked(row: Row, codes: Row, name: str) -> str:
    """One line of the first table, spelled out."""
    call, code, one = next(_calls(row, codes, name))
    assert code is not None
    chip, device = CHIPS[name], find_device(name)
    rounds = -(-call["programs"] // chip.processors)
    each = f"{call['warps']} warps × ({code['outside']} + {call['trips']} × {code['loop']}) instructions"
    return (
        f"{row['name']}: {call['programs']} programs on {chip.processors} multiprocessors, at most {rounds} on one. "
        f"Issue: {rounds} × {each} / ({ISSUE_SLOTS} × {clock(name) / 1e9:.2f} GHz) = {_us(one.issue)} µs. "
        f"Memory: {call['bytes'] / 1e6:.1f} MB / min({COPY_SHARE} × {device.bandwidth / 1e12:.2f} TB/s, "
        f"{chip.processors} × {one.in_flight / 1024:.1f} KiB / {LATENCY * 1e9:.0f} ns) = {_us(one.memory)} µs. "
        f"Tensor cores: {rounds} × {call['warps']} × {call['trips']} × {code['flops']} operations / "
        f"({PRODUCT_SHARE} × {device.peak('bf16') / 1e12:.0f} TFLOP/s / {chip.processors}) = {_us(one.tensor)} µs. "
        f"The longest of them and {LAUNCH * 1e6:.1f} µs for the launch: {_us(one.seconds)} µs."
    )


def _device_lines(rows: list[Row], codes: Row, name: str) -> Iterator[str]:
    chip, device = CHIPS[name], find_device(name)
    groups = {group: [row for row in rows if row["group"] == group] for group in ("product", "attention", "step")}
    needed = COPY_SHARE * device.bandwidth * LATENCY / chip.processors / 1024
    first = next(row for row in groups["product"] if row["kind"] != "bf16")
    yield from ("", f"### {device.title}: predicted, not measured", "")
    yield f"{chip.processors} multiprocessors at {clock(name) / 1e9:.2f} GHz, sm_{chip.capability}; on each of them"
    yield f"{needed:.1f} KiB have to be in flight to reach the bandwidth of a copy."
    yield from ("", "Products, µs:", "", *_kernel_lines(groups["product"], codes, name))
    yield from ("", _worked(first, codes, name))
    yield from ("", "Attention of one layer, µs; numbers are those of keys and values:", "")
    yield from _kernel_lines(groups["attention"], codes, name)
    yield from ("", "Decode steps, ms:", "", *_step_lines(groups["step"], codes, name))
    shown = groups["step"][-1]
    yield from ("", f"Launches of {shown['name']}, {shown['kind']}, µs:", "", *_launch_lines(shown, codes, name))


def is_complete(chips: Row, data: Row) -> bool:
    """Whether a compiler has made everything that is launched."""
    return all(
        call["key"] in chips.get(str(CHIPS[name].capability), {})
        for name, rows in data["devices"].items()
        for row in rows
        for call in row["calls"]
        if "key" in call
    )


def page(data: Row) -> str:
    """Everything, by compiler and device."""
    lines = [
        "# Predicted times of the GPU kernels: arithmetic, not measurements",
        "",
        "Made by `python evals/gpu/predict.py --write` out of `predictions.json`. **Nothing here was run on a GPU.**",
        "Instructions, registers and barriers are counted in compiled code; programs, trips through the main loop and",
        "bytes are those of the launches that the engine makes. A launch is predicted to take the longest of",
        "",
        f"- memory: bytes / min({COPY_SHARE} × bandwidth on the data sheet, bytes in flight / {LATENCY * 1e9:.0f} ns);",
        "  the latter is Little's law;",
        f"- issue: instructions of the busiest multiprocessor / ({ISSUE_SLOTS} × clock);",
        f"- tensor cores: operations of the busiest multiprocessor / ({PRODUCT_SHARE} × its peak on the data sheet);",
        "",
        f"and {LAUNCH * 1e6:.1f} µs for the launch, inside a graph. The shares and the two times are assumptions.",
        "",
        "Left out are the L2 cache, conflicts in shared memory, the first tile of a program, for which all its warps",
        "wait, the sum over splits, waiting for the result of an instruction, and clocks that fall under load. A",
        "kernel can miss its prediction, a short one more than a long one. Code outside of the main loop is counted",
        "once, with both sides of its branches. What torch does is taken to reach what copies and large products do.",
        "The floor is the plan's: bytes by bandwidth, or operations by peak, as on the data sheet. Instructions are",
        "per weight, or per number of a key or value; barriers are those of the main loop.",
        "",
        "The first run on a GPU will say how far all this is off.",
    ]
    for version, chips in sorted(data["compilers"].items()):
        lines += ["", f"## triton {version}"]
        if not is_complete(chips, data):
            lines += ["", "Not all is compiled: `python evals/gpu/predict.py --write` with this version goes on."]
            continue
        for name, rows in data["devices"].items():
            lines += _device_lines(rows, chips[str(CHIPS[name].capability)], name)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(STORE.read_text(encoding="utf-8"))), encoding="utf-8")
