"""Cases of `tune` made to run: random weights and pages in copies that outgrow the cache, and what should come out.

It is the engine's own door to the kernels, `make_linear` and `ops.attention`, with a choice forced on it. What should
come out is computed by plain torch in float32, or over the decoded cache.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import quantkit.kernels.gpu as kernels
from quantkit.benchmark.timing import Recorded, in_turns, num_copies, record
from quantkit.benchmark.tune import Case, Open, Problem
from quantkit.benchmark.tune_cases import Pages, Product, random_weight
from quantkit.kernels import attention as plain
from quantkit.kernels import ops
from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.gpu import configs
from quantkit.kernels.gpu.choices import Choice
from quantkit.kernels.layouts import KVLayout, KVViews, kv_scheme, make_layout, page_bytes
from quantkit.kernels.linear import make_linear
from quantkit.numerics.inputs import fake_quantize_inputs

_TOLERANCE = 0.05  # of what comes out, in units of its root mean square; a tile left out is more
_MOST_SPILLS = 8  # registers; the assembler puts a few aside to fit one more block on a processor

Call = Callable[[], Tensor]


class Measured:
    """A `tune.Problem` on a device.

    Args:
        calls: the same work on each copy of its operands.
        expected: what each gives.
        device: where.
        spilling: choices that are known to spill; *grows*.
    """

    def __init__(self, calls: Sequence[Call], expected: Tensor, device: torch.device, spilling: set[Choice]) -> None:
        self._calls, self._expected, self._device = calls, expected.float(), device
        self._spilling = spilling
        self._recorded: dict[Choice, Recorded] = {}

    def check(self, choice: Choice) -> str:
        """See `Problem`."""
        known = _spilling_kernels(self._device)
        try:
            with configs.forced(choice):
                found = self._calls[0]().float()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except Exception as error:  # compilers raise whatever they like
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # a kernel that broke the device has ended the run
            return f"fails with {type(error).__name__}"
        if _spilling_kernels(self._device) - known:
            self._spilling.add(choice)
        if choice in self._spilling:
            return "spills"
        unit = self._expected.square().mean().sqrt()
        right = ((found - self._expected).abs() <= _TOLERANCE * unit).all()  # false also where there is NaN
        return "" if bool(right) else "computes something else"

    def times(self, choices: Sequence[Choice], samples: int) -> list[list[float]]:
        """See `Problem`."""
        self._recorded = {choice: item for choice, item in self._recorded.items() if choice in choices}
        for choice in choices:
            if choice not in self._recorded:
                with configs.forced(choice):
                    self._recorded[choice] = record(self._calls, str(self._device))
        return in_turns([self._recorded[choice] for choice in choices], str(self._device), samples)

    def release(self) -> None:
        """Give the memory back; nothing can be asked after."""
        self._calls, self._recorded, self._expected = (), {}, self._expected.new_empty(0)


def opener(device: torch.device, dtype: torch.dtype) -> Open:
    """What makes cases ready to run.

    Args:
        device: where.
        dtype: of inputs and outputs.
    """
    spilling: dict[Any, set[Choice]] = {}

    @contextmanager
    def open_problem(case: Case) -> Iterator[Problem]:
        calls, expected = (
            _product(case.work, device, dtype) if isinstance(case.work, Product) else _pages(case.work, device, dtype)
        )
        # Other shapes of the same kind and number of rows run the same code.
        code = case.kernel, case.kind, case.sizes.get("rows")
        problem = Measured(calls, expected, device, spilling.setdefault(code, set()))
        del calls, expected
        try:
            yield problem
        finally:
            problem.release()
            if device.type == "cuda":
                torch.cuda.empty_cache()

    return open_problem


def _product(work: Product, device: torch.device, dtype: torch.dtype) -> tuple[list[Call], Tensor]:
    weight = random_weight(work.outputs, work.inputs, work.scheme.weight, device)
    activation = work.scheme.activation
    x = torch.randn(work.rows, work.inputs, device=device).to(dtype)
    inputs = x.float() if activation is None else fake_quantize_inputs(x.float(), activation)
    expected = inputs @ weight.dequantize().t()
    linears = []
    for _ in range(num_copies(weight.stored_bytes, str(device))):
        copy = dataclasses.replace(weight, codes=weight.codes.clone())
        linears.append(make_linear(copy, activation=activation, dtype=dtype, device=device))
    return [lambda linear=linear: linear(x) for linear in linears], expected  # type: ignore[misc]


def _pages(work: Pages, device: torch.device, dtype: torch.dtype) -> tuple[list[Call], Tensor]:
    layout = make_layout(
        num_heads=work.kv_heads,
        head_dim=work.head_dim,
        page_size=work.page_size,
        dtype=dtype,
        scheme=kv_scheme(work.kv_cache),
    )
    table = _page_table(work)
    before, step = (
        _batch(work, table, *span, device)
        for span in ((0, work.context - work.new), (work.context - work.new, work.context))
    )
    pool = _Pool(layout, table.numel(), work.batch, device)
    _fill(pool.views, before, work, device, dtype)
    query, key, value = (
        torch.randn(work.batch * work.new, heads, work.head_dim, device=device).to(dtype)
        for heads in (work.query_heads, work.kv_heads, work.kv_heads)
    )
    options = plain.AttentionOptions(scale=work.head_dim**-0.5)
    expected = plain.attend(query, key, value, pool.views, step, options)
    pools = [pool]
    pools += [pool.copy() for _ in range(num_copies(page_bytes([layout]) * table.numel(), str(device)) - 1)]
    attentions = [ops.attention(one.views) for one in pools]
    return [lambda attend=attend: attend(query, key, value, step, options) for attend in attentions], expected  # type: ignore[misc]


class _Pool:
    """Pages of one layer, and the tails that go with them."""

    def __init__(self, layout: KVLayout, num_pages: int, batch: int, device: torch.device) -> None:
        self._layout = layout
        self._pages = torch.zeros(num_pages, layout.page_bytes, dtype=torch.uint8, device=device)
        self._tail: Tensor | None = None
        if layout.has_tail:
            shape = batch, layout.num_heads, layout.tail_tokens, layout.head_dim
            self._tail = torch.zeros(shape, dtype=layout.dtype, device=device)
        self.views: KVViews = layout.views(self._pages, self._tail)

    def copy(self) -> _Pool:
        """The same elsewhere in memory."""
        made = _Pool(self._layout, len(self._pages), 0, self._pages.device)
        made._pages.copy_(self._pages)
        made._tail = None if self._tail is None else self._tail.clone()
        made.views = self._layout.views(made._pages, made._tail)
        return made


def _page_table(work: Pages) -> Tensor:
    """(B, P) int32, all pages in disorder."""
    pages = -(-work.context // work.page_size)
    order = torch.randperm(work.batch * pages, generator=torch.Generator().manual_seed(0))
    return order.view(work.batch, pages).to(torch.int32)


def _batch(work: Pages, table: Tensor, start: int, stop: int, device: torch.device) -> ForwardBatch:
    """A step in which every sequence gets the tokens start..stop."""
    new, positions = stop - start, torch.arange(start, stop)
    slots = table[:, positions // work.page_size].long() * work.page_size + positions % work.page_size
    return ForwardBatch(
        token_ids=torch.zeros(work.batch * new, dtype=torch.int64, device=device),
        positions=positions.repeat(work.batch).to(device),
        query_starts=(torch.arange(work.batch + 1, dtype=torch.int32) * new).to(device),
        page_table=table.to(device),
        slots=slots.flatten().to(device),
        tail_rows=torch.arange(work.batch, device=device),
        logit_rows=torch.arange(work.batch, device=device),
        query_lengths=(new,) * work.batch,
        context_lengths=(stop,) * work.batch,
        sequence_ids=tuple(range(work.batch)),
    )


def _fill(views: KVViews, before: ForwardBatch, work: Pages, device: torch.device, dtype: torch.dtype) -> None:
    """What came before the step: keys and values as they come out of a layer."""
    if len(before.token_ids):
        key, value = (
            torch.randn(len(before.token_ids), work.kv_heads, work.head_dim, device=device).to(dtype) for _ in range(2)
        )
        plain.store(key, value, views, before)


def _spilling_kernels(device: torch.device) -> set[int]:
    """Compiled kernels that keep registers in memory, of those that this process has loaded."""
    if device.type != "cuda":
        return set()
    index = torch.cuda.current_device() if device.index is None else device.index
    found = set()
    for info in pkgutil.iter_modules(kernels.__path__):
        for value in vars(importlib.import_module(f"{kernels.__name__}.{info.name}")).values():
            caches = getattr(value, "device_caches", {})
            compiled = caches[index][0].values() if index in caches else ()
            # One that was never launched does not know.
            found |= {id(kernel) for kernel in compiled if (getattr(kernel, "n_spills", 0) or 0) > _MOST_SPILLS}
    return found
