"""What processes tell each other, and that they end together."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import pytest
import torch

from quantkit.cli._output import explain
from quantkit.distributed import (
    assign_work,
    broadcast,
    exchange,
    fill,
    gather,
    joined,
    lifeline,
    rank,
    share_out,
    world,
)
from quantkit.distributed.job import shared_memory
from quantkit.errors import DataError
from tests.distributed import jobs

CPU = torch.device("cpu")


def test_alone_everything_comes_back_as_it_is():
    value = object()
    assert (rank(), world()) == (0, 1)
    assert broadcast(value) is value
    assert gather(value) == [value]
    assert share_out([1, 2], str) == ["1", "2"]
    assert assign_work([3.0, 1.0]) == [0, 0]
    rows = {"x": torch.ones(2)}
    assert exchange([rows], CPU) == [rows]


def talk(*, by_sockets=False):
    with joined(explain), torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        if by_sockets:
            patch.delattr(os, "memfd_create")
        assert (shared_memory(gather) is None) == by_sockets
        assert world() == 2
        assert gather(torch.tensor([rank()], dtype=torch.bfloat16)) == [torch.tensor([0.0]), torch.tensor([1.0])]
        told = [torch.tensor(0.5), torch.arange(6.0).view(3, 2).T[1:], torch.empty(0, 4).to(torch.float8_e4m3fn)]
        for part, own in zip(broadcast(told if rank() else None, source=1), told, strict=True):
            assert part.dtype == own.dtype and part.stride() == own.stride() and part.float().equal(own.float())
        rows = torch.arange(6.0).view(2, 3)  # sums of what lies otherwise may differ
        for laid in (rows.T, rows[:, 1:], rows.view(2, 3, 1).expand(2, 3, 2)):
            mine, other = gather(laid)[rank()], gather(laid)[1 - rank()]
            assert mine is laid and other.equal(laid)
            assert other.stride() == laid.stride()
            for other in exchange([{"laid": laid}] * 2, CPU):
                assert other["laid"].equal(laid) and other["laid"].stride() == laid.stride()
        large = gather(torch.full((100_000 * rank(),), rank()))  # one of two is told by itself
        assert [len(part) for part in large] == [0, 100_000]
        assert large[1].eq(1).all()
        assert broadcast("second" if rank() else "first", source=1) == "second"
        numbers = list(range(40))  # more than are told at once
        assert share_out(numbers, lambda number: (number, rank()), costs=[1.0] * 40) == [(n, n % 2) for n in numbers]
        time.sleep(rank())  # busy: all is taken by the one that is free
        assert share_out(numbers, lambda number: (number, rank())) == [(number, 0) for number in numbers]
        assert share_out("ab", str.upper) == ["A", "B"]
        assert assign_work([1, 5, 3, 3]) == [0, 0, 1, 1]
        outgoing = [{("a", to): torch.full((3, 1 + rank()), 10 * rank() + to), "none": torch.empty(0)} for to in (0, 1)]
        if rank():
            outgoing[0]["half"] = torch.arange(5).to(torch.float16)[1:]
        first, second = exchange(outgoing, CPU)
        assert torch.equal(first["a", rank()], torch.full((3, 1), rank()))
        assert torch.equal(second["a", rank()], torch.full((3, 2), 10 + rank()))
        assert rank() or second["half"].tolist() == [1, 2, 3, 4]
        filled = torch.full((2, 2), float(rank()))
        fill(filled, 1)
        assert filled.eq(1).all()


def fail_in_second():
    with joined(explain):
        gather(None)
        if rank() == 1:
            raise DataError("no such text")
        time.sleep(60)


def die(killed, waiting):
    with joined(explain):
        gather(None)
        if rank() == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60) if waiting else gather(None)


def wait(folder):
    """For something that does not come."""
    # The first process speaks and ends the other, which has half a minute's patience with it.
    lifeline._GLANCE = 5.0 if os.environ["RANK"] == "1" else 0.05
    jobs.hold(folder)
    with joined(explain):
        gather(None)
        jobs.get_ready(folder)
        time.sleep(60)


def test_processes_whose_launcher_is_killed_end_in_one_line(tmp_path):
    said = jobs.run_until_launcher_is_killed(tmp_path, wait)
    assert "the launcher of this job was killed; give the same command again" in said[0]
    assert (said[0].count("\n"), said[1]) == (1, "")


@pytest.mark.parametrize("by_sockets", [False, True])
def test_two_processes_talk(tmp_path, by_sockets):
    assert jobs.run(tmp_path, 2, partial(talk, by_sockets=by_sockets)) == ([0, 0], "")


def exchange_again():
    """What is larger than before, smaller, and only half of which is new."""
    with joined(explain):
        for size in (10, 100_000, 3):
            mine = torch.full((size,), rank() + size)
            found = exchange([{"own": mine}, {"other": mine + 1}] if rank() == 0 else [{"other": mine + 1}, {}], CPU)
            assert found[1 - rank()]["other"].eq(1 - rank() + size + 1).all()
        assert os.fstat(shared_memory(gather)._own).st_size > 400_000
        assert share_out([4, 5], float, owners=[0, 1]) == [4, 5]
        assert os.fstat(shared_memory(gather)._own).st_size == 0
        found = exchange([{"own": mine}, {"own": mine}], CPU)
        assert found[1 - rank()]["own"].eq(1 - rank() + 3).all()


def test_memory_grows_with_what_is_shown(tmp_path):
    assert jobs.run(tmp_path, 2, exchange_again) == ([0, 0], "")


def test_an_error_of_one_ends_all_in_one_line(tmp_path):
    codes, said = jobs.run(tmp_path, 2, fail_in_second)
    assert codes == [4, 4]
    assert said == "error: rank 1: no such text\n"


@pytest.mark.parametrize(("killed", "waiting"), [(0, False), (1, True)])
def test_a_death_ends_all_in_one_line(tmp_path, killed, waiting):
    codes, said = jobs.run(tmp_path, 2, die, killed, waiting)
    assert (codes[killed], codes[1 - killed]) == (-signal.SIGKILL, 5)
    assert said.count("\n") == 1
    assert f"rank {killed} was lost" in said
    assert "give the same command again" in said
