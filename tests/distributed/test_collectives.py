"""What processes tell each other."""

from __future__ import annotations

import time

import torch

from quantkit.cli._output import explain
from quantkit.distributed import assign_work, broadcast, exchange, fill, gather, joined, rank, share_out, world
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


def talk():
    with joined(explain), torch.inference_mode():
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


def test_two_processes_talk(tmp_path):
    assert jobs.run(tmp_path, 2, talk) == ([0, 0], "")
