"""On a CUDA device: linears, operations, attention and the whole engine against the same on the CPU.

`evals/gpu/run.sh` runs them; elsewhere they are skipped. The rules themselves are tested without a GPU.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch

from quantkit.kernels import ops
from quantkit.kernels.ops.linear import build_linear, stack
from quantkit.kernels.reference import experts
from quantkit.kernels.reference import ops as reference
from quantkit.kernels.types import ActivationQuantization, AttentionOptions, HeadNorms
from quantkit.numerics.activation_quant import fake_quantize_inputs
from quantkit.numerics.affine import WeightGrid, round_to_nearest
from quantkit.numerics.dtype import DTYPES
from quantkit.numerics.scheme import ActivationScheme, WeightScheme
from tests.kernels.paged import KV_TYPES, Sequences, layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
SCHEMES = [
    ("int4", 128, True, None),
    ("int4", 128, False, None),
    ("int4", 32, True, None),
    ("int4", None, True, None),
    ("int3", 64, True, None),
    ("int2", 64, False, None),
    ("int8", None, True, None),
    ("int8", 128, True, None),
    ("int6", 128, True, None),
    ("fp8", None, True, None),
    ("fp8", 128, True, None),
    ("nvfp4", 16, True, None),
    ("mxfp4", 32, True, None),
    ("mxfp8", 32, True, None),
    ("int8", None, True, "int8"),
    ("fp8", None, True, "fp8"),
    ("int4", 128, True, "int8"),
    ("int4", 128, True, "fp8"),
    ("fp8", 128, True, "fp8"),
    ("int8", 64, False, "int8"),
]
ROWS = (0, 1, 2, 4, 5, 16, 17, 64, 65, 300)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(256, 512), (384, 1408), (100, 256), (60, 640)], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_linears(scheme, shape, dtype):
    name, group, symmetric, rounded = scheme
    kind = WeightScheme(dtype=DTYPES[name], group_size=group, symmetric=symmetric)
    torch.manual_seed(0)
    values = torch.randn(shape) * 0.1
    weight = round_to_nearest(values, WeightGrid(kind, dtype))
    bias = torch.randn(shape[0])
    activation = None if rounded is None else ActivationScheme(dtype=DTYPES[rounded])
    decoded = weight.dequantize().double()
    linear = build_linear(weight, bias=bias, activation=activation, dtype=dtype, device=CUDA)
    for count in ROWS:
        x = torch.randn(count, shape[1]).to(dtype)
        actual = linear(x.to(CUDA))
        assert actual.dtype == dtype
        assert actual.shape == (count, shape[0])
        inputs = x.double() if activation is None else fake_quantize_inputs(x.float(), activation).double()
        expected = inputs @ decoded.T + bias.double()
        bound = 2.0**-6 * (inputs.abs() @ decoded.abs().T + bias.abs()) / shape[1] ** 0.5 * 4
        assert ((actual.cpu().double() - expected).abs() <= bound).all(), f"{linear.description}, {count} rows"


@pytest.mark.parametrize("shape", [(256, 512), (60, 640), (33, 70)], ids=str)
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_inputs_with_a_calibrated_scale(name, shape):
    kind = WeightScheme(dtype=DTYPES[name])
    torch.manual_seed(0)
    values = torch.randn(shape) * 0.1
    weight = round_to_nearest(values, WeightGrid(kind, torch.bfloat16))
    weight = dataclasses.replace(weight, input_scale=torch.tensor([0.02]))
    activation = ActivationScheme(dtype=DTYPES[name], granularity="tensor", dynamic=False)
    linear = build_linear(weight, activation=activation, dtype=torch.bfloat16, device=CUDA)
    decoded = weight.dequantize().double()
    for count in ROWS:
        x = torch.randn(count, shape[1]).to(torch.bfloat16)
        inputs = fake_quantize_inputs(x.float(), activation, weight.input_scale).double()
        expected = inputs @ decoded.T
        bound = 2.0**-6 * (inputs.abs() @ decoded.abs().T) / shape[1] ** 0.5 * 4 + 1e-6
        assert ((linear(x.cuda()).cpu().double() - expected).abs() <= bound).all(), (
            f"{linear.description}, {count} rows"
        )


@pytest.mark.parametrize(
    "rounding",
    [
        ActivationQuantization(name="int8"),
        ActivationQuantization(name="fp8"),
        ActivationQuantization(name="fp8", step=0.02),
    ],
)
@pytest.mark.parametrize("width", [100, 4096, 14336])
def test_norms_and_gates_round_as_a_launch_of_its_own_would(width, rounding):
    from quantkit.kernels.gpu import ops as gpu_ops
    from quantkit.kernels.gpu.quantize_activations import quantize_rows

    torch.manual_seed(0)
    x, residual, weight = (torch.randn(*shape, device=CUDA).bfloat16() for shape in ((5, width), (5, width), (width,)))
    actual, total = gpu_ops.rms_norm(x, weight, 1e-5, 0.0, residual, rounding)
    normed, expected_total = gpu_ops.rms_norm(x, weight, 1e-5, 0.0, residual)
    assert torch.equal(total, expected_total)
    gate_up = torch.cat([x, residual], dim=1)
    pairs = [(actual, normed), (gpu_ops.gated(gate_up, "silu", rounding), gpu_ops.gated(gate_up, "silu"))]
    for rows, values in pairs:
        expected = quantize_rows(values, rounding)
        assert torch.equal(rows.codes[:5], expected.codes[:5])
        assert torch.equal(rows.scale, expected.scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [64, 1000, 4096])
def test_norms(width, dtype):
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((5, width), (5, width), (width,)))
    for offset in (0.0, 1.0):
        actual, _ = ops.rms_norm(x.cuda(), weight.cuda(), 1e-5, offset)
        torch.testing.assert_close(actual.cpu(), reference.rms_norm(x, weight, 1e-5, offset)[0])
        actual = ops.rms_norm(x.cuda(), weight.cuda(), 1e-5, offset, residual.cuda())
        expected = reference.rms_norm(x, weight, 1e-5, offset, residual)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "relu2"])
def test_gated(activation):
    x = torch.randn(5, 2 * 96).to(torch.bfloat16)
    torch.testing.assert_close(ops.gated(x.cuda(), activation).cpu(), reference.gated(x, activation))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "scheme",
    [None, ("int4", 128, True), ("int4", 32, False), ("int3", 64, True), ("int8", None, True), ("nvfp4", 16, True)],
    ids=str,
)
def test_experts(scheme, dtype):
    """Few tokens and many, through graphs and without, against the experts one by one in float64."""
    count, picks, hidden, width = 6, 2, 640, 384
    torch.manual_seed(0)
    pairs, decoded = [], []
    for rows, inputs in ((2 * width, hidden), (hidden, width)) * count:
        values = (torch.randn(rows, inputs) * inputs**-0.5).to(dtype)
        if scheme is not None:
            kind = WeightScheme(dtype=DTYPES[scheme[0]], group_size=scheme[1], symmetric=scheme[2])
            values = round_to_nearest(values.float(), WeightGrid(kind, dtype))
        decoded.append((values if scheme is None else values.dequantize()).double())
        pairs.append(build_linear(values, dtype=dtype, device=CUDA))
    stacked = stack(zip(pairs[::2], pairs[1::2], strict=True), count=count, activation="silu")
    choose = functools.partial(experts.route, num_chosen=picks, normalize=True)
    assert not isinstance(stacked, str), stacked

    def each(number):
        up, down = decoded[2 * number], decoded[2 * number + 1]
        return lambda rows: reference.gated(rows @ up.T, "silu") @ down.T

    for tokens in (1, 3, 4, 5, 33, 300, 1000):
        x, scores = torch.randn(tokens, hidden).to(dtype), torch.randn(tokens, count).to(dtype)
        shared = torch.randn(tokens, hidden).to(dtype)
        weights, chosen = experts.route(scores, picks, True)
        every = [each(number) for number in range(count)]
        expected = experts.run_each(x.double(), chosen, weights, every, shared.double())
        inputs = x.to(CUDA), scores.to(CUDA), shared.to(CUDA), None, choose
        actual = stacked(*inputs)
        close = 2e-2 if dtype == torch.bfloat16 else 4e-3
        assert (actual.cpu().double() - expected).abs().max() < close * expected.abs().max(), tokens
        assert torch.equal(stacked(*inputs), actual)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = stacked(*inputs)
        replayed.zero_()
        graph.replay()
        assert torch.equal(replayed, actual)


ATTENTION = {
    "plain": {},
    "window": {"window": 40},
    "softcap": {"softcap": 5.0},
}


@pytest.mark.parametrize("option", ATTENTION)
@pytest.mark.parametrize(
    ("dim", "dtype"), [(128, torch.bfloat16), (128, torch.float16), (64, torch.bfloat16), (80, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("kind", KV_TYPES)
def test_attention(kind, dim, dtype, option, monkeypatch):
    """Prompts, then decodes across page borders alone and beside a chunk, of sequences of unlike lengths."""
    monkeypatch.setattr(Sequences, "device", "cuda")
    made = Sequences(layout(kind, dim=dim, page_size=16, dtype=dtype), (70, 35, 300))
    cache, options = made.cache(), ATTENTION[option]
    made.step(cache, [(0, 0, 60), (1, 0, 15), (2, 0, 290)], **options)
    steps = [[(0, 60 + i, 61 + i), (1, 15 + i, 16 + i), (2, 290 + i, 291 + i)] for i in range(9)]
    for spans in [*steps, [(1, 24, 34), (0, 69, 70)]]:
        for (number, start, stop), actual in zip(spans, made.step(cache, spans, **options), strict=True):
            expected = made.expected(number, start, stop, **options)
            close = 2e-2 if dtype == torch.bfloat16 else 4e-3
            error = ((actual.double() - expected).abs().max() / expected.abs().max()).item()
            assert error < close, f"sequence {number} at {start}: off by {error:.2g}"


@pytest.mark.parametrize("option", ATTENTION)
@pytest.mark.parametrize("kind", KV_TYPES)
def test_drafts_after_a_long_prefix(kind, option, monkeypatch):
    """Few tokens over a prefix that is cut in parts: as computed, and each time the same."""
    monkeypatch.setattr(Sequences, "device", "cuda")
    made, options = Sequences(layout(kind, dim=128, page_size=16, dtype=torch.bfloat16), (3000, 40)), ATTENTION[option]
    cache = made.cache()
    made.step(cache, [(0, 0, 2900), (1, 0, 30)], **options)
    for spans in ([(0, 2900, 2905)], [(0, 2905, 2921), (1, 30, 31)], [(0, 2921, 2922)], [(0, 2922, 2924)]):
        again = [made.step(cache, spans, **options) for _ in range(3)]
        for (number, start, stop), *actual in zip(spans, *again, strict=True):
            assert torch.equal(actual[0], actual[1])
            assert torch.equal(actual[0], actual[2])
            expected = made.expected(number, start, stop, **options)
            assert (actual[0].double() - expected).abs().max() < 2e-2 * expected.abs().max()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("interleaved", "rotated"), [(False, 128), (False, 64), (True, 128), (False, 0)])
@pytest.mark.parametrize("kind", KV_TYPES)
def test_heads_are_normed_and_rotated_as_they_are_stored(kind, interleaved, rotated, normed, monkeypatch):
    """As on the CPU, where each is an operation of its own; what is read back later shows what was stored."""
    made = Sequences(layout(kind, dim=128, page_size=16, dtype=torch.bfloat16), (70, 35))
    query, key = torch.randn(2, 128).to(torch.bfloat16).unbind(0)
    turns = torch.randn(80, rotated // 2)
    outputs = []
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(Sequences, "device", device)
        cache, options = made.cache(), {"interleaved": interleaved}
        if normed:
            options["norms"] = HeadNorms(query=query.to(device), key=key.to(device), eps=1e-6, offset=0.0)
        steps = [[(0, 60 + i, 61 + i), (1, 15 + i, 16 + i)] for i in range(6)]
        outputs.append([])
        for spans in ([(0, 0, 60), (1, 0, 15)], *steps, [(1, 21, 31), (0, 66, 67)], [(0, 67, 68), (1, 31, 32)]):
            at = torch.cat([turns[start:stop] for _, start, stop in spans])
            angles = {"angles": (at.cos().to(device), at.sin().to(device))} if rotated else {}
            outputs[-1] += made.step(cache, spans, **options, **angles)
    for actual, expected in zip(outputs[1], outputs[0], strict=True):
        assert (actual.float() - expected.float()).abs().max() < 2e-2 * expected.float().abs().max()


@pytest.mark.parametrize("kv_cache", ["auto", "fp8", "int8", "int4", "k4v3", "k4v2", "k3v2"])
def test_the_engine_gives_the_cpus_text(kv_cache):
    from quantkit.runtime.llm import LLM
    from quantkit.runtime.types import SamplingParams

    prompts = ["Once upon a time", "The little dog", "One day, a girl named Lily"]
    texts = []
    for device in ("cpu", "cuda"):
        llm = LLM(device=device, dtype="float32", kv_cache=kv_cache, max_length=256)
        texts.append([done.text for done in llm.generate(prompts, SamplingParams(max_tokens=60))])
        alone = [llm.generate([prompt], SamplingParams(max_tokens=60))[0].text for prompt in prompts]
        assert alone == texts[-1]
    assert texts[0] == texts[1]


def test_arrays_sent_one_after_another_do_not_overwrite_each_other():
    """The host goes on at once; what it writes next must not reach what is still being copied."""
    from quantkit.kernels.transfer import send

    busy = torch.randn(4096, 4096, device=CUDA)
    for _ in range(20):
        busy = busy @ busy.T / 4096
    numbers = np.empty(100_000, dtype=np.int64)
    actual = []
    for value in range(50):
        numbers.fill(value)
        actual.append(send(CUDA, numbers, numbers[:5])[0])
    assert [(int(tensor.min()), int(tensor.max())) for tensor in actual] == [(value, value) for value in range(50)]


@pytest.mark.parametrize("size", [320, 5000, 128_256])
def test_draws_are_the_cpus(size):
    """Rows of all kinds in one batch, drawn on both devices; the host reads only the tokens."""
    from quantkit.kernels.reference import sampling
    from quantkit.kernels.reference.sampling import Draw

    kinds = [
        {"top_k": None, "top_p": 1.0, "min_p": 0.0},
        {"top_k": 1, "top_p": 1.0, "min_p": 0.0},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.0},
        {"top_k": 3000, "top_p": 1.0, "min_p": 0.0},
        {"top_k": None, "top_p": 0.9, "min_p": 0.0},
        {"top_k": None, "top_p": 0.05, "min_p": 0.0},
        {"top_k": 50, "top_p": 0.95, "min_p": 0.1},
    ]
    torch.manual_seed(0)
    draws = [None] + [
        Draw(number * 0x1234567 - 2**60, temperature, **kind)
        for number, kind in enumerate(kinds * 6)
        for temperature in (0.3, 1.0, 3.0)
    ]
    logits = 3 * torch.randn(len(draws), size)
    there = logits.to(CUDA)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = sampling.choose(there, draws)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = sampling.choose(logits, draws)
    # Sums are added in another order: at the border of top-p a token may be in here and out there.
    assert (actual.cpu() == expected).float().mean() >= 0.98
    assert torch.equal(sampling.choose(there, draws), actual)
    # Zeros are equal whatever their sign, and a NaN wins.
    odd = torch.full((3, size), -1.0)
    odd[0, [9, 300]], odd[1, [9, 300]] = torch.tensor([-0.0, 0.0]), torch.tensor([0.0, -0.0])
    odd[2, 17] = torch.nan
    assert sampling.choose(odd.to(CUDA), [draws[1], None, draws[5]]).tolist()[1:] == [9, 17]
    assert sampling.choose(odd.to(CUDA), [None, None, draws[4]]).tolist() == [9, 9, 17]


def test_graphs_of_decode_steps_give_what_eager_steps_give(monkeypatch):
    """Nothing in a step waits for the host, and a replay reads new tokens and positions from the same memory."""
    monkeypatch.setattr(Sequences, "device", "cuda")
    made = Sequences(layout("int8", dim=64, page_size=16, dtype=torch.bfloat16), (70, 35))
    spans = [(0, 60, 61), (1, 30, 31)]
    cache = made.cache()
    made.step(cache, [(0, 0, 60), (1, 0, 30)])
    batch = made.batch(spans)
    states = [
        torch.cat([source[number][start:stop] for number, start, stop in spans]).cuda()
        for source in (made.query, made.key, made.value)
    ]
    eager = cache.attention[0](states, batch, AttentionOptions(scale=0.125))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = cache.attention[0](states, batch, AttentionOptions(scale=0.125))
    replayed.zero_()
    graph.replay()
    assert torch.equal(replayed, eager)
    later = made.batch([(0, 61, 62), (1, 31, 32)])
    expected = [made.expected(number, start, stop) for number, start, stop in ((0, 61, 62), (1, 31, 32))]
    for target, source in zip(states, (made.query, made.key, made.value), strict=True):
        target.copy_(torch.stack([source[0][61], source[1][31]]))
    batch.positions.copy_(later.positions)
    batch.slots.copy_(later.slots)
    graph.replay()
    for actual, other in zip(replayed.cpu(), expected, strict=True):
        assert (actual.double() - other[0]).abs().max() < 2e-2 * other.abs().max()


def test_bfloat16_decodes_on_the_gpu():
    """The engine in the dtype that the kernels are for: finite logits near the CPU's float32 ones."""
    from quantkit.runtime.llm import LLM

    told = "Once upon a time there was a little girl called Lily. She had a red ball and a small dog. One day they "
    told += (
        "went to the park to play. The dog ran after the ball, and Lily laughed and clapped her hands. Then it rained."
    )
    cpu = LLM(device="cpu", dtype="float32")
    ids = [cpu.encode(told)]
    exact = cpu.score(ids)[0]
    for kind in KV_TYPES:
        actual = LLM(device="cuda", dtype="bfloat16", kv_cache=kind).score(ids, chunk_size=1)[0].cpu()
        agreement = (actual.argmax(-1) == exact.argmax(-1)).float().mean().item()
        assert agreement >= 0.8, f"{kind}: {agreement:.0%} of the tokens agree"
