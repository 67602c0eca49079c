"""Cases of `tune` prepared to be run: random weights and pages in copies that outgrow the cache; what should come out.

It is the engine's own door to the kernels, `build_linear` and `paged_attention`, with a choice forced on it. What
should come out is computed by plain torch in float32, or over the dequantized cache.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import quantkit.kernels.gpu as kernels
from quantkit.benchmark.ceilings import wait_for
from quantkit.benchmark.timing import Recorded, in_turns, num_copies, record
from quantkit.benchmark.tune import Case, Open, Problem
from quantkit.benchmark.tune_cases import PageWork, ProductWork
from quantkit.kernels.gpu import configs
from quantkit.kernels.gpu.choices import Choice
from quantkit.kernels.layouts import KVLayout, KVViews, kv_scheme, layer_layout, page_bytes
from quantkit.kernels.ops.attention import paged_attention
from quantkit.kernels.ops.linear import build_linear
from quantkit.kernels.reference import attention as reference
from quantkit.kernels.types import AttentionOptions, States
from quantkit.models.cache import DEFAULT_PAGE_SIZE
from quantkit.numerics.inputs import fake_quantize_inputs
from quantkit.runtime.engine.kernel_checks import random_weight, steps

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
        known = _spilling_kernels(self._device)
        try:
            # `measuring` raises what Triton refuses; otherwise torch takes over and passes for the kernel.
            with kernels.measuring(), configs.forced(choice):
                out = self._calls[0]().float()
            wait_for(self._device)
        except Exception as error:  # compilers raise whatever they like
            wait_for(self._device)  # a kernel that broke the device has ended the run
            return f"fails with {type(error).__name__}"
        if _spilling_kernels(self._device) - known:
            self._spilling.add(choice)
        if choice in self._spilling:
            return "spills"
        unit = self._expected.square().mean().sqrt()
        right = ((out - self._expected).abs() <= _TOLERANCE * unit).all()  # false also where there is NaN
        return "" if bool(right) else "computes something else"

    def times(self, choices: Sequence[Choice], samples: int) -> list[list[float]]:
        self._recorded = {choice: item for choice, item in self._recorded.items() if choice in choices}
        for choice in choices:
            if choice not in self._recorded:
                with kernels.measuring(), configs.forced(choice):
                    self._recorded[choice] = record(self._calls, str(self._device))
        return in_turns([self._recorded[choice] for choice in choices], str(self._device), samples)

    def release(self) -> None:
        """Give the memory back; nothing can be asked after."""
        self._calls, self._recorded, self._expected = (), {}, self._expected.new_empty(0)


def opener(device: torch.device, dtype: torch.dtype) -> Open:
    """What prepares cases to be run.

    Args:
        device: where.
        dtype: of inputs and outputs.
    """
    spilling: dict[Any, set[Choice]] = {}

    @contextmanager
    def open_problem(case: Case) -> Iterator[Problem]:
        prepare: Callable[..., tuple[list[Call], Tensor]] = _product if case.kernel == "product" else _pages
        calls, expected = prepare(case.work, device, dtype)
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


def _product(work: ProductWork, device: torch.device, dtype: torch.dtype) -> tuple[list[Call], Tensor]:
    weight = random_weight(work.outputs, work.inputs, work.scheme.weight, device)
    activation = work.scheme.activation
    x = torch.randn(work.rows, work.inputs, device=device).to(dtype)
    inputs = x.float() if activation is None else fake_quantize_inputs(x.float(), activation)
    expected = inputs @ weight.dequantize().t()
    # Calls rotate through copies, so that a weight comes from memory and not from the L2 cache.
    copies = num_copies(weight.stored_bytes, str(device))
    weights = (dataclasses.replace(weight, codes=weight.codes.clone()) for _ in range(copies))
    linears = [build_linear(copy, activation=activation, dtype=dtype, device=device) for copy in weights]
    return [lambda linear=linear: linear(x) for linear in linears], expected  # type: ignore[misc]


def _pages(work: PageWork, device: torch.device, dtype: torch.dtype) -> tuple[list[Call], Tensor]:
    layout = layer_layout(
        num_heads=work.shapes.kv_heads,
        head_dim=work.shapes.head_dim,
        page_size=DEFAULT_PAGE_SIZE,
        dtype=dtype,
        scheme=kv_scheme(work.kv_cache),
    )
    pages, known = -(-work.context // DEFAULT_PAGE_SIZE), work.context - work.new
    step_of = steps(work.batch, pages, DEFAULT_PAGE_SIZE, device)
    views = _empty_views(layout, pages * work.batch, work.batch, device)
    if known:
        past = _random_states(work, work.batch * known, device, dtype)
        reference.store(*past[1:], views, step_of(0, known))
    states, step = _random_states(work, work.batch * work.new, device, dtype), step_of(known, work.context)
    options = AttentionOptions(scale=work.shapes.head_dim**-0.5)
    expected = reference.attend(states, views, step, options)
    copies = num_copies(page_bytes([layout]) * pages * work.batch, str(device)) - 1
    attentions = [paged_attention(one) for one in (views, *(_copy(views) for _ in range(copies)))]
    return [lambda attend=attend: attend(states, step, options) for attend in attentions], expected  # type: ignore[misc]


def _random_states(work: PageWork, tokens: int, device: torch.device, dtype: torch.dtype) -> States:
    """Queries, keys and values as they come out of a layer."""
    queries, keys = work.shapes.query_heads, work.shapes.kv_heads
    shapes = ((tokens, heads, work.shapes.head_dim) for heads in (queries, keys, keys))
    query, key, value = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    return query, key, value


def _empty_views(layout: KVLayout, num_pages: int, batch: int, device: torch.device) -> KVViews:
    """Pages of one layer, and the residual windows that go with them."""
    shape = batch, layout.num_heads, layout.residual_tokens, layout.head_dim
    residual = torch.zeros(shape, dtype=layout.dtype, device=device) if layout.has_residual else None
    return layout.views(torch.zeros(num_pages, layout.page_bytes, dtype=torch.uint8, device=device), residual)


def _copy(views: KVViews) -> KVViews:
    """The same elsewhere in memory."""
    residual = None if views.key_residual is None else views.key_residual.clone()
    return views.layout.views(views.pool.clone(), residual)


def _spilling_kernels(device: torch.device) -> set[int]:
    """Compiled kernels that keep registers in memory, of those that this process has loaded."""
    if device.type != "cuda":
        return set()
    index = torch.cuda.current_device() if device.index is None else device.index
    spilling = set()
    for info in pkgutil.iter_modules(kernels.__path__):
        for value in vars(importlib.import_module(f"{kernels.__name__}.{info.name}")).values():
            caches = getattr(value, "device_caches", {})
            compiled = caches[index][0].values() if index in caches else ()
            # One that was never launched does not know.
            spilling |= {id(kernel) for kernel in compiled if (getattr(kernel, "n_spills", 0) or 0) > _MOST_SPILLS}
    return spilling
