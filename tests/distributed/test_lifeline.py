"""How processes come together, and that none is left behind."""

from __future__ import annotations

import socket
import time
from datetime import timedelta

import pytest

from quantkit.cli._output import explain
from quantkit.distributed import gather, job, joined, lifeline, rank
from quantkit.errors import InputError, ResourceError
from tests.distributed import jobs


@pytest.fixture
def first_of_two(monkeypatch):
    """This process is to meet another one at a port."""
    port = jobs.free_port()
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    return port


def test_a_port_in_use_is_said(first_of_two):
    with socket.create_server(("", first_of_two)), pytest.raises(InputError, match=f"cannot meet .*{first_of_two}"):
        job._meet(lifeline.Lifeline(0, 2))


def test_who_does_not_come_is_waited_for_no_longer_than_the_patience(first_of_two, monkeypatch):
    monkeypatch.setattr(job, "START", timedelta(seconds=1))
    with pytest.raises(ResourceError, match="not all processes of this job came together"):
        job._meet(lifeline.Lifeline(0, 2))


def meet_among_strangers():
    lifeline._KNOCK = 0.1
    connect, strangers = lifeline.Lifeline.connect, []

    def connect_later(line, store):
        if line.rank:
            for words in (b"", b"\xff\n"):  # nothing, and what is no text
                port = int(store.get("lifeline").split()[0])
                strangers.append(socket.create_connection(("localhost", port)))
                strangers[-1].sendall(words)
        connect(line, store)

    lifeline.Lifeline.connect = connect_later
    with joined(explain):
        assert gather(rank()) == [0, 1]


def test_strangers_hold_nobody_up(tmp_path):
    assert jobs.run(tmp_path, 2, meet_among_strangers) == ([0, 0], "")


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
        (0.3, True, [1, 4], ""),  # the first raises, and its command tells that
        (60, False, [4, 4], "error: rank 1: no such folder\n"),
        (0.3, False, [4, 4], "error: rank 1: no such folder\n"),  # about to end well
    ],
)
def test_an_error_is_of_the_rank_that_has_it_unless_the_first_has_it_too(tmp_path, first_after, also, codes, said):
    assert jobs.run(tmp_path, 2, fail, first_after, also) == (codes, said)


def work_on(folder):
    """After the job, as who verifies does."""
    lifeline._GLANCE = 0.05
    jobs.hold(folder)
    with joined(explain):
        gather(None)
    jobs.get_ready(folder)
    time.sleep(60)


def test_who_works_on_after_the_job_ends_with_its_launcher(tmp_path):
    assert "the launcher of this job was killed" in jobs.run_until_launcher_is_killed(tmp_path, work_on)[0]
