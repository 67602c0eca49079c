"""The page of predicted times: what the counts give, by arithmetic that is right on numbers that can be checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantkit.planning.devices import find_device

GPU = Path(__file__).resolve().parents[2] / "evals/gpu"
sys.path.insert(0, str(GPU))
import prediction  # noqa: E402 - lies beside its scripts

sys.path.remove(str(GPU))

CODE = {"registers": 128, "shared": 20480, "loop": 100, "outside": 50, "barriers": 2, "flops": 4096, "ahead": 2}
CALL = {"kernel": "tile_kernel", "bytes": 264 * 20 * 4096, "programs": 264, "trips": 20, "warps": 4}


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return json.loads(prediction.STORE.read_text(encoding="utf-8"))


def test_the_page_is_what_the_counts_give(data):
    page = prediction.PAGE.read_text(encoding="utf-8")
    assert page == prediction.page(data), "run: python evals/gpu/prediction.py"
    assert page.startswith("# Predicted times of the GPU kernels: arithmetic, not measurements\n")


@pytest.mark.slow
def test_the_counts_are_those_of_what_is_launched_now():
    """Of each compiler that has any: keys of launches do not depend on the one that is installed."""
    pytest.importorskip("triton.language")
    environment = {**os.environ, "PYTHONPATH": str(GPU.parents[1]), "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(GPU / "predict.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "0 differences\n", done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize(("name", "hertz"), [("h100", 1.83e9), ("a100", 1.41e9), ("l4", 2.04e9), ("4090", 2.52e9)])
def test_multiprocessors_make_the_peak_of_the_data_sheet_at_the_makers_clock(name, hertz):
    assert prediction.clock(name) == pytest.approx(hertz, rel=0.005)


def test_the_three_terms_of_a_launch():
    """Two programs of four warps on each of 132 multiprocessors, 20 times through a loop of 100 instructions."""
    one = prediction.times(CALL, CODE, "h100")
    bandwidth, peak = find_device("h100").bandwidth, find_device("h100").peak("bf16")
    assert one.blocks == 2
    assert one.in_flight == 2 * 2 * 4096  # two tiles ahead in each of two programs
    little = 132 * one.in_flight / prediction.LATENCY
    assert little > prediction.COPY_SHARE * bandwidth  # enough is in flight
    assert one.memory == pytest.approx(CALL["bytes"] / (prediction.COPY_SHARE * bandwidth))
    assert one.issue == pytest.approx(2 * 4 * (50 + 20 * 100) / (4 * prediction.clock("h100")))
    assert one.tensor == pytest.approx(264 * 4 * 20 * 4096 / (prediction.PRODUCT_SHARE * peak))
    assert one.seconds == one.memory + prediction.LAUNCH
    assert one.instructions == 264 * 4 * (50 + 20 * 100)


def test_too_little_in_flight_is_slower_than_a_copy():
    """By Little's law a tile takes the latency where nothing is asked for ahead, whatever the bandwidth."""
    one = prediction.times({**CALL, "programs": 132}, {**CODE, "ahead": 1}, "h100")
    assert one.memory == pytest.approx(20 * prediction.LATENCY)
    assert one.bound_by == "memory"


@pytest.mark.parametrize(
    ("change", "blocks"), [({}, 4), ({"registers": 129}, 3), ({"shared": 100 * 1024}, 2), ({"registers": 16}, 10)]
)
def test_blocks_that_a_multiprocessor_holds(change, blocks):
    """65,536 registers in portions of 8 per thread, 228 KiB less 1 KiB for each block, 64 warps."""
    assert prediction.resident(prediction.CHIPS["h100"], {**CODE, **change}, 4) == blocks


def test_the_main_loop_that_was_counted_does_the_product(data):
    """Operations of the tensor cores in all trips of all programs are those of the product, rows padded to a tile."""
    for version, chips in data["compilers"].items():
        for row in data["devices"]["h100"]:
            if row["group"] != "product" or row["kind"] == "bf16":
                continue
            (call,) = row["calls"]
            done = call["programs"] * call["warps"] * call["trips"] * chips["90"][call["key"]]["flops"]
            rows = max(8, int(row["name"].rpartition("= ")[2]))
            assert done == 2 * row["numbers"] * rows, (version, row["name"])


def test_a_prediction_is_never_below_the_floor(data):
    for version, chips in data["compilers"].items():
        for name, rows in data["devices"].items():
            codes = chips[str(prediction.CHIPS[name].capability)]
            for row in rows:
                read = sum(call["count"] * call["bytes"] for call in row["calls"])
                floor = row.get("floor", read / find_device(name).bandwidth)
                assert prediction.seconds(row, codes, name) > floor, (version, name, row["name"], row["kind"])
