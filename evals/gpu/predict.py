"""What stands in for times on a GPU until there are some: what compiled code and launches predict. Nothing is run.

    python evals/gpu/predict.py [--write] [--all]
    python evals/gpu/predict.py --check

Launches of packed products, of attention and of decode steps are recorded for each device on tensors without memory,
with their programs, loops and bytes, and compiled for it; instructions are counted in the disassembled code. What
follows from that, and how, is arithmetic: `prediction.py`. `--write` keeps the counts in
`evals/results/compile/predictions.json`, what other versions of the compiler have made of the same launches beside
them, and writes the page. What is there is not compiled again, so it can be killed and started again at any time.
`--check` says which launches the file lacks, and whether the page is what the file gives.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from attention import PAGE
from linears import SHAPES, random_weight
from prediction import CHIPS, STORE, page
from prediction import PAGE as RESULT
from random_model import SCHEMES, settings
from recorder import Launch, launch_of
from resources import compiled
from step_count import META, Call, Operations, StepCount, count_step, on_meta
from torch.nn import functional

from quantkit.kernels.ops.linear import build_linear
from quantkit.models.cache import find_kv_form
from quantkit.planning.devices import find_device
from quantkit.planning.limits import decode_floor
from quantkit.planning.memory import everywhere
from quantkit.planning.source import from_shape_file
from quantkit.planning.weights import INT4_WEIGHTS, INT8_WEIGHTS

W4 = "quantkit w4a16 g128"
PRODUCTS = ("8192 squared", "8B gate+up", "8B down", "8B qkv", "8B output")
ROWS = (1, 16, 64)
BATCH, CONTEXT = 32, 8192
KV_TYPES = ("auto", "fp8", "int8", "int4")
# Weights and KV type of a step; sequences and tokens of each.
STEPS = (("bf16", "auto"), ("w4a16 head8", "auto"), ("w4a16 head8", "int4"))
STEP_SIZES = ((1, 1024), (BATCH, CONTEXT))
BASE = "bf16"
Row = dict[str, Any]


def products(chip: int, processors: int) -> Iterator[tuple[Row, list[Call]]]:
    """Products with W4 weights, and with weights of 16 bits."""
    for shape in PRODUCTS:
        outputs, inputs = SHAPES[shape]
        for rows in ROWS:
            x = torch.empty(rows, inputs, dtype=torch.bfloat16, device=META)
            for kind in (BASE, W4):
                count = StepCount()
                with on_meta(count, set(), chip, processors), Operations(count):
                    if kind == BASE:
                        functional.linear(x, torch.empty(outputs, inputs, dtype=torch.bfloat16, device=META))
                    else:
                        weight = random_weight(outputs, inputs, SCHEMES[kind][0], META)
                        linear = build_linear(weight, activation=None, dtype=torch.bfloat16, device=META)
                        linear(x)
                        count.calls.clear()  # also of what is made once
                        linear(x)
                names = {"group": "product", "name": f"{shape}, M = {rows}", "kind": kind.removeprefix("quantkit ")}
                yield {**names, "numbers": outputs * inputs}, count.calls


def attention(chip: int, processors: int) -> Iterator[tuple[Row, list[Call]]]:
    """One layer's attention over long contexts."""
    for kv in KV_TYPES:
        count, model = count_step("8B", BASE, kv, BATCH, CONTEXT, chip, processors)
        calls = [call for call in count.calls if call.name == "attend_kernel"][:1]
        layer = model.layouts(kv, PAGE)[0]
        names = {"group": "attention", "name": f"{BATCH} x {CONTEXT}", "kind": BASE if kv == "auto" else f"{kv} KV"}
        yield {**names, "numbers": 2 * BATCH * CONTEXT * layer.num_heads * layer.head_dim}, calls


def steps(name: str, chip: int, processors: int) -> Iterator[tuple[Row, list[Call]]]:
    """Whole decode steps, greedy choice included, with what the plan says they take at least."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "8B.json"
        path.write_text(json.dumps(settings("8B")))
        shape = from_shape_file(path)
    for batch, context in STEP_SIZES:
        for weights, kv in STEPS:
            count, _ = count_step("8B", weights, kv, batch, context, chip, processors)
            scheme = everywhere(None) if weights == BASE else everywhere(INT4_WEIGHTS, INT8_WEIGHTS)
            floor = decode_floor(shape, scheme, find_kv_form(kv), find_device(name), context=context, batch=batch)
            kind = BASE if (weights, kv) == STEPS[0] else "W4, INT8 head" + ("" if kv == "auto" else ", INT4 KV")
            names = {"group": "step", "name": f"8B, batch {batch}, {context} tokens", "kind": kind}
            yield {**names, "floor": floor.seconds}, count.calls


def trips_of(call: Call) -> int:
    """Times that a program goes through its main loop; 1 for kernels without one."""
    given = call.arguments
    if call.name == "tile_kernel":
        return int(given["blocks_per_split"])
    if call.name == "attend_kernel":
        tiles = -(-given["page_table"].shape[1] * given["PAGE"] // given["TILE"])
        return int(-(-tiles // given["num_splits"]))
    return 1


def described(call: Call) -> tuple[Row, Launch | None]:
    """A launch in numbers, and what has to be compiled for it."""
    read = call.bytes_read + (call.cache_bytes if call.name == "attend_kernel" else 0)
    if call.kernel is None:
        return {"kernel": call.name, "bytes": read, "flops": call.flops}, None
    launch = launch_of(call.kernel, call.arguments, call.name)
    programs = 1
    for size in call.grid:
        programs *= size
    sizes = {"programs": programs, "trips": trips_of(call), "warps": launch.options.get("num_warps", 4)}
    return {"kernel": call.name, "key": launch.key, "bytes": read, **sizes}, launch


def record(name: str) -> tuple[list[Row], dict[str, Launch]]:
    """What is predicted for a device: rows with their launches, equal ones counted; and what they compile to."""
    chip = CHIPS[name]
    launches: dict[str, Launch] = {}
    rows = []
    for source in (products, attention, lambda *sizes: steps(name, *sizes)):
        for row, calls in source(chip.capability, chip.processors):
            counted: Counter[str] = Counter()
            for call in calls:
                numbers, launch = described(call)
                counted[json.dumps(numbers)] += 1
                if launch is not None:
                    launches.setdefault(launch.key, launch)
            rows.append({**row, "calls": [{**json.loads(text), "count": count} for text, count in counted.items()]})
    return rows, launches


def flops_of(instruction: str) -> int:
    """Of a tensor cores' instruction, per warp; one of Hopper's is issued by each of four warps that share it."""
    group = re.match(r"[HQI]GMMA\.(?:SP\.)?(\d+)x(\d+)x(\d+)", instruction)
    if group:
        rows, columns, depth = map(int, group.groups())
        return 2 * rows * columns * depth // 4
    warp = re.match(r"[HQI]MMA\.(16)(8)(\d+)", instruction)
    return 2 * int(warp[1]) * int(warp[2]) * int(warp[3]) if warp else 0


def counted(launch: Launch, target: int) -> Row:
    """What is counted in compiled code: in the first loop with tensor cores, if there is one, and outside of it."""
    done = compiled(launch, target)
    loop: list[str] = next((body for body in done.loops if any(map(flops_of, body))), [])
    names = Counter(name.split(".")[0] for name in loop)
    return {
        "registers": done.registers,
        "shared": done.shared,
        "loop": len(loop),
        "outside": len(done.names) - len(loop),
        "barriers": names["BAR"],
        "flops": sum(map(flops_of, loop)),
        # Tiles that are on their way while one is worked on, where loads do not wait in registers.
        "ahead": max(1, launch.options.get("num_stages", 1) - 1) if names["LDGSTS"] else 1,
    }


def lacking(data: Row, recorded: dict[str, tuple[list[Row], dict[str, Launch]]]) -> Iterator[str]:
    """What the file does not have of what is launched now, by compiler."""
    for name, (rows, launches) in recorded.items():
        if data["devices"].get(name) != rows:
            yield f"{name}: launches are others than recorded"
        for version, chips in data["compilers"].items():
            known = chips.get(str(CHIPS[name].capability), {})
            missing = {launch.name for key, launch in launches.items() if key not in known}
            if missing:
                yield f"{name}: not compiled with triton {version}: {', '.join(sorted(missing))}"


def _write(data: Row) -> None:
    """One line per launch and per compiled kernel, so that changes show."""
    lines = re.sub(r"\{[^{}]*\}", lambda text: " ".join(text[0].split()), json.dumps(data, indent=1))
    STORE.write_text(lines + "\n", encoding="utf-8")


def main() -> None:
    """Record, compile what is new, keep it, or say what is missing."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help=f"keep the counts in {STORE.name} and write the page")
    parser.add_argument("--check", action="store_true", help="say what the file lacks")
    parser.add_argument("--all", action="store_true", help="compile also what is known")
    arguments = parser.parse_args()
    data: Row = json.loads(STORE.read_text()) if STORE.exists() else {"devices": {}, "compilers": {}}
    recorded = {name: record(name) for name in CHIPS}
    if arguments.check:
        said = list(lacking(data, recorded))
        if RESULT.read_text(encoding="utf-8") != page(data):
            said.append(f"{RESULT.name}: not what {STORE.name} gives")
        print("\n".join([*said, f"{len(said)} differences"]))
        sys.exit(bool(said))
    data["devices"] = {name: rows for name, (rows, _) in recorded.items()}
    had = {} if arguments.all else data["compilers"].get(triton.__version__, {})
    data["compilers"][triton.__version__] = known = {str(chip.capability): {} for chip in CHIPS.values()}
    todo = {(CHIPS[name].capability, key): one for name, (_, every) in recorded.items() for key, one in every.items()}
    for chip, key in todo:
        if key in had.get(str(chip), {}):
            known[str(chip)][key] = had[str(chip)][key]
    for (chip, key), launch in todo.items():
        if key not in known[str(chip)]:
            known[str(chip)][key] = counted(launch, chip)
            print(f"sm_{chip} {launch.name}: {known[str(chip)][key]}", flush=True)
            if arguments.write:
                _write(data)
    if arguments.write:
        _write(data)
        RESULT.write_text(page(data), encoding="utf-8")


if __name__ == "__main__":
    main()
