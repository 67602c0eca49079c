"""quantkit where Python is that of macOS or Windows, as far as this machine can pretend: see `other_system`."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import quantkit
from quantkit.machine import system
from tests.other_system import NO_MODULES_OF_WINDOWS, lacks
from tests.test_layers import read_package

ROOT = Path(__file__).parents[1]
# Reached on Linux only.
ALLOWED = {("quantkit.native", "sysconf")}


def run(name: str, *commands: list[object]) -> list[tuple[int, str, str]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.other_system", name],
        input=json.dumps([[str(word) for word in command] for command in commands]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return [tuple(result) for result in json.loads(done.stdout)]


@pytest.mark.parametrize("name", ["win32", pytest.param("darwin", marks=pytest.mark.slow)])
def test_the_commands_run(name, tmp_path):
    made, gguf = tmp_path / "made", tmp_path / "made.gguf"
    results = run(
        name,
        ["--help"],
        ["plan", "--recipe", "rtn-int4"],
        ["quantize", "--recipe", "rtn-int4", "-o", made],
        ["inspect", made],
        ["generate", made, "--prompt", "Sums:42+37=", "--max-tokens", "2"],
        ["convert", made, "--to", "gguf", "-o", gguf],
        ["quantize", "--recipe", "rtn-int4", "-o", tmp_path / "several", "--nproc", "2"],
    )
    *good, several = results
    assert [code for code, _, _ in good] == [0] * len(good), results
    assert all(stdout for _, stdout, _ in good)
    assert good[2][2].count("quantkit's C kernels are off: there are none for") == 1
    reason = f"work in several processes (--nproc, torchrun) needs Linux, and this is {name}"
    assert several == (5, "", f"error: {reason}; leave it out, or on Windows use WSL 2\n")
    # No stage is left behind, and the bytes are those that Linux writes.
    assert {path.name for path in tmp_path.iterdir()} == {"made", "made.gguf"}
    quantkit.quantize(None, "rtn-int4", tmp_path / "linux")
    for path in made.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "linux" / path.name).read_bytes()


LOCKS = """
import os, sys
from pathlib import Path
from tests.other_system import pretend
pretend("win32", ("torch",))
from quantkit.errors import OutputError
from quantkit.machine.system import folder_lock, lock
from quantkit.output.staging import open_stage
folder = Path(sys.argv[1])
output = folder / "out.json"
try:
    with open_stage(output, "convert", overwrite=False, resumable=True) as stage:
        (stage.work.path / "half").touch()
        try:
            with open_stage(output, "convert", overwrite=False, resumable=True):
                print("both run")
        except OutputError as error:
            print(error)
        1 / 0
except ZeroDivisionError:
    print(sorted(path.name for path in (folder / "out.json.partial").iterdir()))
with open_stage(output, "convert", overwrite=False, resumable=True) as stage:
    print(stage.work.known["kind"])
    (stage.work.path / "half").rename(stage.work.path / "whole")
    stage.promote(stage.work.path / "whole")
print([path.name for path in folder.iterdir()])
with folder_lock(folder):
    print([path.name for path in folder.iterdir()])
"""


def test_locks_of_windows_exclude_a_second_run_and_unfinished_work_is_continued(tmp_path):
    partial = tmp_path / "out.json.partial"
    done = subprocess.run(
        [sys.executable, "-c", LOCKS, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines() == [
        f"another run is writing {partial}; wait for it or choose another --output",
        "['.quantkit-work', 'half']",
        "convert",
        "['out.json']",
        "['out.json']",
    ], done.stderr


def test_a_lock_waits_for_another_or_says_that_it_is_taken(tmp_path):
    path = tmp_path / "file"
    with path.open("wb") as one, path.open("wb") as other:
        system.lock(one.fileno(), wait=False)
        with pytest.raises(BlockingIOError):
            system.lock(other.fileno(), wait=False)
        waiting = threading.Thread(target=system.lock, args=(other.fileno(),), kwargs={"wait": True})
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        one.close()
        waiting.join(60)
        assert not waiting.is_alive()


def of_one_system(text: str) -> set[str]:
    """Modules and functions in a file that Python has on some systems only."""
    names = lacks("win32")
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & {*NO_MODULES_OF_WINDOWS, "msvcrt"}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module)} & {*NO_MODULES_OF_WINDOWS, "msvcrt"}
            found |= {alias.name for alias in node.names} & names.get(str(node.module), set())
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found |= {node.attr} & names.get(node.value.id, set())
            found |= {"sys.platform"} if (node.value.id, node.attr) == ("sys", "platform") else set()
    return found


def test_calls_of_one_system_are_in_one_room():
    others = {"quantkit.errors", "quantkit.cli._output"}  # name the system in a message; set the code page
    found = {(name, what) for name, text in read_package().items() for what in of_one_system(text)}
    assert any(name == "quantkit.machine.system" for name, _ in found)
    outside = {(name, what) for name, what in found if name != "quantkit.machine.system"} - ALLOWED
    assert {name for name, what in outside if what == "sys.platform"} == others
    assert not {pair for pair in outside if pair[1] != "sys.platform"}


@pytest.mark.parametrize(
    ("text", "what"),
    [("import fcntl", "fcntl"), ("import os\nos.fork()", "fork"), ("from signal import SIGKILL", "SIGKILL")],
)
def test_a_planted_call_is_found(text, what):
    assert of_one_system(text) == {what}
