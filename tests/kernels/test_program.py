"""Operations of a program against the same operations one by one: bit for bit, for any number of rows and threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantkit.kernels import cpu, ops
from quantkit.kernels.cpu.program import AngleTable, Program
from quantkit.kernels.ops.linear import build_linear
from quantkit.kernels.reference import ops as reference
from quantkit.kernels.types import AttentionOptions, HeadNorms
from quantkit.numerics.dtype import INT8
from quantkit.numerics.scheme import ActivationScheme
from tests.kernels.paged import KV_TYPES, Sequences, layout
from tests.kernels.test_linear import quantized

pytestmark = pytest.mark.skipif(cpu.library() is None, reason=cpu.status())
DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 3, 8]
# Tokens of each sequence after the step, in pages of four: inside a page, at its beginning, at its end, and far behind.
ENDS = (2, 5, 8, 31)


@pytest.fixture(params=[1, 2, 3], autouse=True)
def threads(request, monkeypatch):
    """Every program here runs with one thread and with several, however small it is."""
    monkeypatch.setattr("quantkit.kernels.cpu.program._PARALLEL_FROM", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def draw(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(program: Program, count: int) -> None:
    program.contexts[:] = 1
    program.run(count, np.zeros((count, 1), dtype=np.int32))


def close(actual, expected, dtype):
    torch.testing.assert_close(actual, expected, rtol=2**-6 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [8, 72, 100])
def test_add(dtype, rows, width):
    program = Program(8, dtype)
    x, out = draw(8, width, dtype=dtype), draw(8, width, dtype=dtype, seed=1)
    before = out.clone()
    program.add(x, out)
    run(program, rows)
    assert torch.equal(out[:rows], (before + x)[:rows])
    assert torch.equal(out[rows:], before[rows:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("adds", [False, True])
def test_norm(dtype, rows, adds):
    program = Program(8, dtype)
    x, residual = draw(8, 72, dtype=dtype), draw(8, 72, dtype=dtype, seed=1) if adds else None
    weight, out = draw(72, dtype=dtype, seed=2), torch.zeros(8, 72, dtype=dtype)
    arguments = (x[:rows], weight, 1e-5, 1.0, None if residual is None else residual[:rows])
    normed, total = ops.rms_norm(*arguments)
    plain, _ = reference.rms_norm(*arguments)
    program.norm(x, weight, 1e-5, 1.0, out, residual)
    run(program, rows)
    assert torch.equal(out[:rows], normed)
    assert not out[rows:].any()
    if residual is not None:
        assert torch.equal(residual[:rows], total)
    close(out[:rows], plain, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_a_norm_in_place(dtype):
    """Both are recorded without a meeting of the threads in between."""
    program = Program(8, dtype)
    x, stream, weight = draw(8, 40, dtype=dtype), draw(8, 40, dtype=dtype, seed=1), draw(40, dtype=dtype, seed=2)
    first, _ = ops.rms_norm(x, weight, 1e-6)
    expected, total = ops.rms_norm(first, weight, 1e-6, 0.0, stream)
    out = torch.zeros(8, 40, dtype=dtype)
    program.norm(x, weight, 1e-6, 0.0, x)
    program.norm(x, weight, 1e-6, 0.0, out, stream)
    run(program, 8)
    assert torch.equal(out, expected)
    assert torch.equal(stream, total)


LINEARS = [("dense", None), ("int4", None), ("int8", None), ("int8", "int8"), ("int4", "int8"), ("fp8", None)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("kind", "activation"), LINEARS)
def test_linears_side_by_side(dtype, rows, kind, activation):
    """One with whole panels, one with less than a panel, and one dense; a bias in the first."""

    def build(outputs, kind, seed):
        inner = None if activation is None else ActivationScheme(dtype=INT8)
        settings = {"dtype": dtype, "device": torch.device("cpu"), "bias": draw(outputs, dtype=dtype, seed=seed)}
        if kind == "dense":
            return build_linear(draw(outputs, 128, dtype=dtype, seed=seed), **settings)
        return build_linear(quantized(outputs, 128, kind, 32, kind == "fp8", seed=seed), activation=inner, **settings)

    linears = [build(128, kind, 1), build(40, kind, 2), build(65, "dense", 3)]
    x, out = draw(8, 128, dtype=dtype), torch.zeros(8, 233, dtype=dtype)
    program = Program(8, dtype)
    program.linears(linears, x, out)
    run(program, rows)
    expected = torch.cat([linear(x[:rows]) for linear in linears], 1)
    assert torch.equal(out[:rows], expected)
    assert not out[rows:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("width", [8, 96, 100])
def test_gate(dtype, rows, activation, width):
    x, out = 3 * draw(8, 2 * width, dtype=dtype), torch.zeros(8, width, dtype=dtype)
    program = Program(8, dtype)
    program.gate(x, activation, out)
    run(program, rows)
    assert torch.equal(out[:rows], ops.gated(x[:rows], activation))
    assert not out[rows:].any()
    close(out[:rows], reference.gated(x[:rows], activation), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KV_TYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("window", [None, 6])
def test_attention_with_norms_and_rotation(dtype, kind, normed, window):
    """The same outputs and the same pages as step by step, which other tests compare with the definition."""
    sequences = Sequences(layout(kind, dim=24, dtype=dtype), ENDS)
    norms = HeadNorms(query=draw(24, dtype=dtype), key=draw(24, dtype=dtype, seed=1), eps=1e-6, offset=1.0)
    options = AttentionOptions(scale=0.2, window=window, softcap=9.0, norms=norms if normed else None)
    cos, sin = draw(40, 8, dtype=torch.float32, seed=2), draw(40, 8, dtype=torch.float32, seed=3)
    caches = sequences.cache(), sequences.cache()
    for cache in caches:
        sequences.step(cache, [(n, 0, end - 1) for n, end in enumerate(ENDS)])
    spans = [(n, end - 1, end) for n, end in enumerate(ENDS)]
    batch = sequences.batch(spans)
    states = [
        torch.cat([one[n][start:end] for n, start, end in spans])
        for one in (sequences.query, sequences.key, sequences.value)
    ]
    qkv = torch.cat([one.flatten(1) for one in states], 1).contiguous()
    angles = cos[batch.positions], sin[batch.positions]
    expected = caches[0].attention[0](tuple(states), batch, options, angles)

    program, out = Program(len(ENDS), dtype), torch.zeros(len(ENDS), 4 * 24, dtype=dtype)
    table = AngleTable(cos=cos.data_ptr(), sin=sin.data_ptr())
    program.attention(qkv, caches[1].attention[0].inner, options, table, 8, 4, out)
    program.contexts[:], program.positions[:] = ENDS, [end - 1 for end in ENDS]
    program.residual_rows[:] = batch.residual_rows.numpy()
    program.run(len(ENDS), batch.page_table.numpy())
    assert torch.equal(out.view(len(ENDS), 4, 24), expected)
    assert torch.equal(caches[0]._pools[0], caches[1]._pools[0])
    for one, other in zip(caches[0]._residuals, caches[1]._residuals, strict=True):
        assert one is None or torch.equal(one.view(torch.uint8), other.view(torch.uint8))
