"""The run of all parts, with small parts in place of the real ones: what is kept when they die, and what comes back."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "evals/gpu"
BEGIN = """
import os, sys, time
from results import Absent, Results
def work(case, action):
    def run():
        print("begun", case, os.getpid(), flush=True)
        made = {}
        exec(action or "", globals(), made)
        return {"us": made.get("us", 1.0)}
    return run
"""
PART = """
results = Results({name!r}, {{"commit": os.environ.get("COMMIT", "a")}}, **{{"seconds": 60, **{options}}})
for case, action in {cases!r}.items():
    results.attempt(work(case, action), case=case)
results.finish()
"""


class Tree:
    """A repository with `run.sh` and parts of our own, and a machine that it runs on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.gpu, self.out = folder, folder / "evals/gpu", folder / "out"
        self.gpu.mkdir(parents=True)
        for name in ("run.sh", "page.py"):
            shutil.copy(GPU / name, self.gpu)
        source = (GPU / "results.py").read_text()
        assert "_ARCHIVE_EVERY_S = 5.0" in source
        (self.gpu / "results.py").write_text(source.replace("_ARCHIVE_EVERY_S = 5.0", "_ARCHIVE_EVERY_S = 0.0"))
        for name in ("torch", "triton"):
            (folder / f"{name}.py").touch()
        self.parts = ""
        self.new_machine()

    def new_machine(self) -> None:
        """One with nothing on it but what was brought."""
        self.work = self.folder / f"machine-{time.monotonic_ns()}"
        self.results = self.work / "results/rehearsal"

    def add(self, name: str, cases: dict[str, str], options: str = "{}") -> None:
        """A part with these cases; what they do beside being measured."""
        (self.gpu / f"{name}.py").write_text(BEGIN + PART.format(name=name, cases=cases, options=options))
        self.parts += f"{name} 60 {name}.py\n"

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        (self.gpu / "parts.txt").write_text("# comment\n" + self.parts)
        places = {"WORK": str(self.work), "OUT": str(self.out), "TRITON_CACHE_DIR": str(self.work / "cache")}
        environment = {**os.environ, **places, "PYTHON": sys.executable, "PYTHONPATH": str(self.folder), **variables}
        command = ["bash", str(self.gpu / "run.sh"), "--rehearse", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)

    def run(self, *words: str, **variables: str) -> tuple[int, str]:
        """Exit code and output."""
        process = self.start(*words, **variables)
        said, _ = process.communicate(timeout=60)
        return process.returncode, said

    def rows(self, name: str) -> list[dict[str, object]]:
        """What came back of a part."""
        with tarfile.open(self.out / "results.tar.gz") as tar:
            file = tar.extractfile(f"rehearsal/{name}.json")
            assert file is not None
            return json.load(file)["rows"]

    def came_back(self) -> set[str]:
        """Names of parts that have rows in the archive."""
        if not (self.out / "results.tar.gz").exists():
            self.out.mkdir(exist_ok=True)
            return set()
        with tarfile.open(self.out / "results.tar.gz") as tar:
            return {Path(name).stem for name in tar.getnames() if name.endswith(".json")}

    def said(self, name: str) -> str:
        return (self.results / f"{name}.log").read_text()


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


KILL = "os.kill(os.getpid(), 9)"
# A full disk, and a kernel that never comes back and does not let Python go on.
FULL = "'FIXED' in os.environ or os.symlink('/dev/full', os.environ['RESULTS'] + '/second.tmp')"
HANG = "import ctypes; ctypes.PyDLL(None).sleep(60)"
FAULTS = {
    "hangs": (HANG, "its process ended with 1"),
    "returns NaN": ("us = float('nan')", "not a finite number: us"),
    "is refused": ("raise ValueError('no such kernel')", "ValueError: no such kernel"),
    "kills its process": (KILL, "its process ended with SIGKILL"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_its_own_row(tree, fault):
    action, said = FAULTS[fault]
    tree.add("first", {"a": "", "b": ""})
    tree.add("second", {"a": "", "b": action, "c": ""}, options='{"row_seconds": 0.5}')
    tree.add("third", {"a": ""})
    assert tree.run("--short")[0] == 1
    assert [row["case"] for row in tree.rows("first")] == ["a", "b"]
    assert [row.get("error") for row in tree.rows("second")] == [None, said, None]
    assert tree.rows("third") == [{"case": "a", "us": 1.0}]


def test_a_full_disk_costs_what_was_not_written_yet(tree):
    tree.add("first", {"a": ""})
    tree.add("second", {"a": "", "b": FULL, "c": ""})
    tree.add("third", {"a": ""})
    code, said = tree.run()
    assert (code, "second.json is not written: [Errno 28] No space left on device" in said) == (1, True)
    assert [[row["case"] for row in tree.rows(name)] for name in ("first", "second", "third")] == [["a"], ["a"], ["a"]]
    (tree.results / "second.tmp").unlink()
    tree.out.joinpath("results.tar.tmp").symlink_to("/dev/full")
    code, said = tree.run("second", FIXED="1")
    assert (code, "results.tar.gz is not written: [Errno 28]" in said) == (0, True)
    assert [row["case"] for row in json.loads((tree.results / "second.json").read_text())["rows"]] == ["a", "b", "c"]
    assert tree.rows("first") == [{"case": "a", "us": 1.0}]


@pytest.mark.parametrize("seed", range(3))
def test_a_kill_at_any_moment_costs_a_row_at_most(tree, seed):
    names, cases = ("first", "second", "third"), dict.fromkeys("abc", "time.sleep(0.1)")
    for name in names:
        tree.add(name, cases)
    call = tree.start()
    time.sleep(random.Random(seed).uniform(0.3, 2.5))
    os.killpg(call.pid, signal.SIGKILL)  # of the call, and of what it has begun in its session
    for log in tree.results.glob("*.log"):
        for line in log.read_text().splitlines():
            if line.startswith("begun"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(line.split()[-1]), signal.SIGKILL)
    call.communicate()
    before = {name: tree.rows(name) for name in names if name in tree.came_back()}
    shutil.copytree(tree.out, tree.folder / ".gpu", dirs_exist_ok=True)
    tree.new_machine()
    tree.run()
    after = {name: tree.rows(name) for name in names}
    assert [[row["case"] for row in after[name]] for name in names] == [list("abc")] * 3
    assert sum("error" in row for name in names for row in after[name]) <= 1
    assert all(after[name][: len(rows)] == rows for name, rows in before.items())


def test_a_part_that_is_killed_costs_what_it_was_at(tree):
    tree.add("first", {"a": "", "b": KILL, "c": "", "d": KILL})
    tree.add("second", {"a": ""})
    code, said = tree.run()
    assert code == 1
    assert "== first: unfinished after" in said
    assert "its process ended with SIGKILL, at case b" in said
    died = "its process ended with SIGKILL"
    expected = [{"case": "a", "us": 1.0}, {"case": "b", "error": died}, {"case": "c", "us": 1.0}]
    assert tree.rows("first") == [*expected, {"case": "d", "error": died}]
    assert tree.said("first").count("begun a") == 1
    assert tree.rows("second") == [{"case": "a", "us": 1.0}]
    assert sorted(path.name for path in tree.out.iterdir()) == ["results.tar.gz"]


def test_a_call_that_is_killed_is_taken_up_on_another_machine(tree):
    """Whatever was measured is in the archive; what was under way is an error, because it may be what killed."""
    tree.add("first", {"a": "", "b": "time.sleep(60)", "c": ""})
    call = tree.start()
    while not (log := tree.results / "first.log").exists() or "begun b" not in log.read_text().rpartition(" ")[0]:
        time.sleep(0.02)
    os.kill(call.pid, signal.SIGKILL)
    os.kill(int(log.read_text().split()[-1]), signal.SIGKILL)
    call.communicate()
    assert tree.rows("first") == [{"case": "a", "us": 1.0}]
    shutil.copytree(tree.out, tree.folder / ".gpu")
    tree.new_machine()
    code, _ = tree.run()
    assert code == 1
    assert [(row["case"], "error" in row) for row in tree.rows("first")] == [("a", False), ("b", True), ("c", False)]
    assert tree.said("first").count("begun a") == 1


def test_what_was_brought_from_another_gpu_comes_back_too_and_what_is_broken_stops_nothing(tree):
    brought, other = tree.folder / ".gpu", tree.folder / "brought/other-gpu"
    for folder in (brought, other):
        folder.mkdir(parents=True)
    (other / "smoke.json").write_text("{}")
    with tarfile.open(brought / "results.tar.gz", "w:gz") as tar:
        tar.add(other, "other-gpu")
    (brought / "kernels-0.tar.gz").write_bytes((brought / "results.tar.gz").read_bytes()[:50])
    tree.add("first", {"a": ""})
    code, said = tree.run()
    assert (code, "not taken up: .gpu/kernels-0.tar.gz" in said) == (0, True)
    (tree.results.parent / "other-gpu/smoke.json").write_text("newer")
    code, said = tree.run()
    assert (code, said.count("begun a")) == (0, 0)
    with tarfile.open(tree.out / "results.tar.gz") as tar:
        names = {"other-gpu/smoke.json", "rehearsal/first.json"}
        assert names <= set(tar.getnames())
        assert tar.extractfile("other-gpu/smoke.json").read() == b"newer"


def test_what_is_named_is_tried_again_where_it_failed(tree):
    tree.add("first", {"a": "", "b": "assert 'FIXED' in os.environ, 'no luck'"})
    tree.add("second", {"a": ""})
    assert tree.run()[0] == 1
    assert tree.rows("first")[1] == {"case": "b", "error": "AssertionError: no luck"}
    assert tree.run(FIXED="1")[0] == 1
    assert tree.said("second").count("begun") == 1
    code, said = tree.run("first", FIXED="1", COMMIT="b")
    assert (code, "second" in said) == (0, False)
    assert tree.rows("first") == [{"commit": "a", "case": "a", "us": 1.0}, {"case": "b", "us": 1.0}]
    assert tree.run("third")[0] == 64


def test_a_lost_device_has_the_rest_done_by_a_new_process(tree):
    cases = {"a": "", "b": "raise RuntimeError('illegal memory access')", "c": ""}
    tree.add("first", cases, options='{"is_lost": lambda: True}')
    code, said = tree.run()
    assert code == 1
    errors = [row.get("error") for row in tree.rows("first")]
    assert errors == [None, "RuntimeError: illegal memory access", None]
    assert said.count("== first: at most") == 2


def test_parts_that_no_call_has_begun_come_first(tree):
    """A part whose time is over goes on, in this call if it can, and repeats nothing."""
    tree.add("first", {"a": "", "b": ""}, options="{'seconds': 60 if 'LONG' in os.environ else -1}")
    tree.add("second", {"a": ""})
    code, said = tree.run()
    assert (code, tree.rows("first")) == (1, [])
    assert said.index("== second: done") < said.rindex("== first: at most")
    code, said = tree.run(LONG="1")
    assert (code, "second: at most" in said) == (0, False)
    assert [row["case"] for row in tree.rows("first")] == ["a", "b"]


def test_a_part_that_cannot_begin_is_said_in_a_line_and_not_tried_for_ever(tree):
    tree.add("first", {})
    (tree.gpu / "first.py").write_text("import nothing_of_this_name")
    tree.add("second", {"a": ""})
    code, said = tree.run()
    assert code == 1
    assert tree.rows("second") == [{"case": "a", "us": 1.0}]
    assert said.count("== first: at most") == 1
    (dead,) = [line for line in said.splitlines() if line.startswith("== first: dead after")]
    why = "its process ended with 1: ModuleNotFoundError: No module named 'nothing_of_this_name'"
    assert dead.endswith(why)
    assert (tree.results / "state").read_text().splitlines() == [f"first dead {why}", "second done"]


def test_a_call_ends_with_its_budget(tree):
    tree.add("first", {"a": ""})
    begun = time.monotonic()
    code, said = tree.run(BUDGET="1")
    assert (code, "at most" in said) == (1, False)
    assert time.monotonic() - begun < 20


def test_a_part_whose_time_is_over_has_done_nothing_wrong(tmp_path):
    """It is told to stop: what was under way is measured by the next call."""
    part = BEGIN + PART.format(name="first", cases={"a": "", "b": "time.sleep(600)"}, options='{"row_seconds": 600}')
    environment = {**os.environ, "PYTHONPATH": str(GPU), "RESULTS": str(tmp_path)}
    pipe = {"stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", part], env=environment, **pipe)
    assert process.stdout is not None
    while "begun b" not in process.stdout.readline():
        pass
    assert json.loads((tmp_path / "first.json").read_text())["running"] == {"case": "b"}
    process.terminate()
    process.communicate()
    assert process.returncode == 75
    assert json.loads((tmp_path / "first.json").read_text())["rows"] == [{"case": "a", "us": 1.0}]


def add_wheel(tree, name):
    (tree.folder / ".gpu").mkdir(exist_ok=True)
    with zipfile.ZipFile(tree.folder / f".gpu/{name}.whl", "w") as wheel:
        wheel.writestr(f"{name.partition('-')[0]}.py", "")


def test_wheels_are_on_the_path_of_parts(tree):
    for name in ("brought-1.0-py3-none-any", "stable-1.0-cp36-abi3-linux"):
        add_wheel(tree, name)
    tree.add("first", {"a": "import brought, stable"})
    assert tree.run()[0] == 0


def test_wheels_for_another_python_are_all_left_out(tree):
    """One of them would meet the others in versions that are installed here."""
    for name in ("brought-1.0-py3-none-any", "theirs-1.0-cp30-cp30-linux"):
        add_wheel(tree, name)
    tree.add("first", {"a": "import importlib.util as u; assert not (u.find_spec('brought') or u.find_spec('theirs'))"})
    code, said = tree.run()
    assert (code, "theirs-1.0-cp30-cp30-linux.whl is not for cp3" in said) == (0, True)
