"""How OpenMP's waiting threads behave beside other busy processes; what those take of the cores is pretended."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

import quantkit
from quantkit import native
from quantkit.runtime.llm import LLM


class FakeOpenMP:
    """Counts the threads that it is asked for."""

    def __init__(self):
        self.omp_get_level = None
        self.started = []

    def GOMP_parallel(self, function, data, count, flags):
        self.started.append(count.value)


@pytest.mark.parametrize(
    ("cores", "threads", "others", "started"),
    [
        (2, 2, 1.0, [2]),
        (2, 2, 0.2, []),  # what a quiet machine does beside
        (2, 1, 2.0, []),  # one thread waits for nobody
        (8, 2, 5.9, []),  # neighbours on cores that are free
        (8, 2, 6.5, [8]),
        (2, 4, 1.0, [2]),  # more threads than cores
    ],
)
def test_idle_threads_are_kept_while_others_need_the_cores(cores, threads, others, started):
    openmp = FakeOpenMP()
    watcher = native.Watcher(openmp, frozenset(range(cores)))
    watcher.expect(threads)
    watcher.observe(others)
    watcher.observe(others)  # once is enough
    ends = time.monotonic() + 10
    while len(openmp.started) < len(started) and time.monotonic() < ends:
        time.sleep(0.01)
    assert openmp.started == started
    assert watcher.crowded == bool(started)
    watcher.observe(0.0)
    assert not watcher.crowded


def test_between_the_two_bounds_nothing_changes():
    watcher = native.Watcher(FakeOpenMP(), frozenset(range(2)))
    watcher.expect(2)
    watcher.observe(0.2)
    assert not watcher.crowded
    watcher.observe(0.3)
    watcher.observe(0.2)
    assert watcher.crowded


# A thread that waits spins for milliseconds, so pauses between products take CPU time. Another process: of this one,
# nobody knows how many threads OpenMP has.
SPINNING = """
import os, time
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:2])  # OpenMP counts the cores when it is loaded
import torch
from quantkit import native
native._INTERVAL_S = 3600  # nothing but what is pretended here
torch.set_num_threads(2)
a = torch.ones(1 << 20)

def spent():
    torch.add(a, 1)
    started = time.process_time()
    for _ in range(10):
        torch.add(a, 1)
        time.sleep(0.02)
    return time.process_time() - started

native.watch_neighbours(2)
for others in (0.0, 99.0, 0.0):
    native._watcher.observe(others)
    time.sleep(0.2)
    print(spent())
"""


def run_python(code, **variables):
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in names} | variables
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_openmp_stops_spinning_and_begins_again():
    assert len(os.sched_getaffinity(0)) > 1, "with one core it never spins"
    alone, beside, again = map(float, run_python(SPINNING).split())
    assert beside < 0.5 * alone
    assert beside < 0.5 * again


@pytest.fixture
def watched(monkeypatch):
    """Numbers of threads that watchers are told, none of which runs."""
    told = []
    monkeypatch.setattr(native, "_watcher", None)
    monkeypatch.setattr(native.Watcher, "run", lambda self: None)
    monkeypatch.setattr(native.Watcher, "expect", lambda self, count: told.append(count))
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return told


def quantize_from_python(model, output):
    quantkit.quantize(model, "awq-int4", output, overrides={"calibration.samples": 1, "weights.group_size": 32})


def quantize_from_the_command_line(model, output):
    from quantkit.cli import main

    changes = ["--samples", "1", "--set", "weights.group_size=32"]
    main(["quantize", str(model), "--recipe", "awq-int4", *changes, "-o", str(output)], standalone_mode=False)


def load_to_run(model, output):
    LLM(model, threads=2)


@pytest.mark.parametrize("work", [quantize_from_python, quantize_from_the_command_line, load_to_run])
def test_whatever_computes_is_watched(watched, tiny_llama, tmp_path, work):
    import torch

    torch.set_num_threads(2)
    work(tiny_llama, tmp_path / "out")
    assert watched and set(watched) == {2}


@pytest.mark.parametrize(
    ("variables", "is_watched"), [({}, True), ({"OMP_WAIT_POLICY": "active"}, False), ({"GOMP_SPINCOUNT": "9"}, False)]
)
def test_what_the_user_says_of_waiting_holds(watched, monkeypatch, variables, is_watched):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    native.watch_neighbours(2)
    assert bool(watched) == is_watched


def test_busy_seconds_grow_by_what_is_computed():
    cores = frozenset(os.sched_getaffinity(0))
    before, ends = native.busy_seconds(cores), time.process_time() + 0.3
    while time.process_time() < ends:
        pass
    assert native.busy_seconds(cores) - before > 0.2
    assert native.busy_seconds(frozenset()) == 0
