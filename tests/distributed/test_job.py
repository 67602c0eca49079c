"""How processes come together, that they end together, and that none is left behind."""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest

from quantkit.cli._output import explain
from quantkit.distributed import gather, job, joined, launch, rank
from quantkit.errors import InputError, ResourceError
from quantkit.machine.system import python
from tests import forked
from tests.distributed import jobs


@pytest.fixture
def first_of_two(monkeypatch):
    """This process is to meet another one at a port."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    return port


def test_a_port_in_use_is_said(first_of_two):
    with socket.create_server(("", first_of_two)), pytest.raises(InputError, match=f"cannot connect .*{first_of_two}"):
        job._meet()


def test_who_does_not_come_is_waited_for_no_longer_than_the_patience(first_of_two, monkeypatch):
    monkeypatch.setattr(job, "START", timedelta(seconds=1))
    with pytest.raises(ResourceError, match="not all processes of this job connected"):
        job._meet()


def fail(first_after, also):
    """The second process at once, the first a little later, likewise or not at all."""
    with joined(explain):
        if rank() == 1:
            raise InputError("no such folder")
        time.sleep(first_after)
        if also:
            raise InputError("no such folder")


@pytest.mark.parametrize(
    ("first_after", "also", "codes", "said"),
    [
        (0.3, True, [1, -signal.SIGTERM], ""),  # the first raises, and its command tells that
        (60, False, [-signal.SIGTERM, 4], "error: rank 1: no such folder\n"),
        (0.3, False, [-signal.SIGTERM, 4], "error: rank 1: no such folder\n"),  # about to end well
    ],
)
def test_an_error_is_of_the_rank_that_has_it_unless_the_first_has_it_too(tmp_path, first_after, also, codes, said):
    assert jobs.run(tmp_path, 2, fail, first_after, also) == (codes, said)


DIE = """
import os, signal, time
from quantkit.cli._output import explain
from quantkit.distributed import gather, joined, rank
with joined(explain):
    gather(None)
    if rank() == {killed}:
        os.kill(os.getpid(), signal.SIGKILL)
    {then}
"""


@pytest.mark.parametrize(("killed", "then"), [(0, "gather(None)"), (1, "time.sleep(60)")])
def test_a_death_ends_all_in_one_line(capfd, monkeypatch, killed, then):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert launch(2, python(DIE.format(killed=killed, then=then))) == 5
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert f"rank {killed} was killed by signal 9; run the same command again" in said


def lose():
    with joined(explain):
        gather(None)
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        os.environ.pop("TORCHELASTIC_RUN_ID")  # by hand: nobody ends the first one
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        gather(None)


def test_a_death_is_noticed_where_nobody_else_ends_the_others(tmp_path):
    codes, said = jobs.run(tmp_path, 2, lose)
    assert codes == [5, -signal.SIGKILL]
    assert said.startswith("error: lost contact with the other processes") and said.count("\n") == 1


def work_on(folder):
    """Wait for something that does not come, after the job, as who verifies does."""
    with joined(explain):
        gather(None)
    (folder / f"{os.getpid()}.ready").touch()
    time.sleep(60)


def test_processes_whose_launcher_is_killed_end(tmp_path):
    assert forked.run(jobs.launch_and_die, tmp_path, work_on) == -signal.SIGKILL
    pids, end = [path.stem for path in tmp_path.glob("*.ready")], time.monotonic() + 20
    while any(_runs(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert len(pids) == 2 and not any(_runs(pid) for pid in pids)


def _runs(pid: str) -> bool:
    status = Path("/proc", pid, "stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"
