"""A function in a child: its exit code, and no wait for processes that it leaves behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[2] / "evals")]

from processes import run_forked  # noqa: E402


def leave_a_sleeper(path):
    sleeper = os.fork()
    if sleeper == 0:
        time.sleep(600)
    path.write_text(str(sleeper))
    os.write(1, b"done\n")  # print would write to what pytest captures


def is_running(process):
    state = Path(f"/proc/{process}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_process_that_the_child_leaves_is_neither_waited_for_nor_kept(tmp_path):
    began, out, number = time.monotonic(), tmp_path / "out", tmp_path / "number"
    code, _ = run_forked(lambda: leave_a_sleeper(number), stdout=out, stderr=out, limit_s=300)
    assert (code, out.read_text()) == (0, "done\n")
    assert time.monotonic() - began < 60
    until = time.monotonic() + 60
    while is_running(number.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_running(number.read_text())


@pytest.mark.parametrize(
    ("work", "limit", "code"),
    [
        (lambda: None, None, 0),
        (lambda: sys.exit(4), None, 4),
        (lambda: 1 / 0, None, 1),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), None, -signal.SIGTERM),
        (lambda: time.sleep(600), 0.5, None),
    ],
)
def test_the_exit_code_is_the_childs(tmp_path, work, limit, code):
    ended, _ = run_forked(work, stdout=tmp_path / "out", stderr=tmp_path / "out", limit_s=limit)
    assert ended == code
