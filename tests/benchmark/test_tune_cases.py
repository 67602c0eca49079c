"""Cases of models and presets: launches find again what is written for them, and what runs is checked and timed."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from quantkit.benchmark import tune_problems as problems
from quantkit.benchmark.options import TuneOptions
from quantkit.benchmark.tune import search_choices
from quantkit.benchmark.tune_cases import (
    Shapes,
    cases_of,
    shapes_of_model,
    shapes_of_preset,
)
from quantkit.errors import InputError
from quantkit.kernels import gpu as gpu_kernels
from quantkit.kernels.gpu import choices, configs, packing, tuned
from quantkit.kernels.gpu.choices import Cublas, Decode, Prefill, Tile
from quantkit.kernels.layouts import kv_scheme, layer_layout
from quantkit.numerics.dtype import DTYPES, INT4, INT8
from quantkit.numerics.scheme import ActivationScheme, LinearScheme, WeightScheme
from quantkit.runtime.engine.kernel_checks import random_weight
from tests.helpers import make_model
from tests.kernels.gpu.interpreter import needs_triton

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
OPTIONS = {"rows": (1, 4, 16, 64), "batches": (1, 8), "context": 200, "kv_types": ("auto", "int4")}
INT4_G32 = LinearScheme(weight=WeightScheme(dtype=INT4, group_size=32))
TINY = Shapes(linears=((48, 128, INT4_G32),), query_heads=4, kv_heads=2, head_dim=32)


def find_cases(shapes, chip=90, **changes):
    return cases_of(shapes, TuneOptions(**{**OPTIONS, **changes}), chip)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("QUANTKIT_TUNE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(configs, "capability", lambda device: 90)
    configs.forget()
    yield "GPU"
    configs.forget()


def write(device, cases, choice_of):
    entries = tuple(
        tuned.TunedChoice(
            kernel=case.kernel,
            kind=case.kind,
            sizes=case.sizes,
            choice=choice_of[case.kernel],
            microseconds=1.0,
            default_microseconds=2.0,
            ratio=2.0,
        )
        for case in cases
    )
    table = tuned.TunedTable(device=device, capability=90, versions={}, entries=entries)
    tuned.write(tuned.user_file(device), table)


SCHEMES = [
    INT4_G32,
    LinearScheme(weight=WeightScheme(dtype=INT4, group_size=128, symmetric=False)),
    LinearScheme(weight=WeightScheme(dtype=INT8)),
    LinearScheme(weight=WeightScheme(dtype=DTYPES["fp8"])),
    LinearScheme(weight=WeightScheme(dtype=DTYPES["nvfp4"], group_size=16)),
    LinearScheme(weight=WeightScheme(dtype=DTYPES["mxfp4"], group_size=32)),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=LinearScheme.describe)
def test_products_find_what_is_written_for_them(gpu, scheme):
    shapes = Shapes(linears=((48, 512, scheme),), query_heads=4, kv_heads=2, head_dim=32)
    cases = [case for case in find_cases([shapes]) if case.kernel == "product"]
    assert [case.sizes["rows"] for case in cases] == [1, 4, 16, 64]
    packed = packing.pack(random_weight(48, 512, scheme.weight, CPU), CPU)
    for case in cases:
        assert configs.product(packed, case.sizes["rows"], CUDA) == case.default
    odd = Tile(block_m=16, block_n=16, warps=1, stages=1, programs=1)
    write(gpu, cases, {"product": odd})
    configs.forget()
    for count in (1, 2, 4, 5, 16, 33, 64):
        assert configs.product(packed, count, CUDA) == odd
    assert configs.product(packed, 20, CUDA) == choices.default_tile(20, 90)  # 32 rows were not measured
    assert configs.product(packed, 65, CUDA) == choices.default_tile(65, 90)
    assert configs.product(packed, choices.TILE_LIMIT + 1, CUDA) == Cublas()


@pytest.mark.parametrize("kv_cache", ["auto", "fp8", "int8", "int4"])
def test_page_reads_find_what_is_written_for_them(gpu, kv_cache):
    cases = find_cases([TINY], rows=(), kv_types=(kv_cache,))
    assert [(case.kernel, case.sizes) for case in cases] == [
        ("decode", {"heads": 2}),
        ("decode", {"heads": 16}),
        ("prefill", {}),
    ]
    shape = layer_layout(num_heads=2, head_dim=32, page_size=64, dtype=torch.bfloat16, scheme=kv_scheme(kv_cache))
    views = shape.views(torch.empty(1, shape.page_bytes, dtype=torch.uint8), None)
    assert configs.decode(views, 1, 4, CUDA) == cases[0].default
    assert configs.prefill(views, 4, CUDA) == cases[2].default
    decode = Decode(tile=16, warps=1, stages=1, programs=1, least_tiles=1, most_splits=1)
    prefill = Prefill(rows=16, tile=16, warps=1, stages=1)
    write(gpu, cases, {"decode": decode, "prefill": prefill})
    configs.forget()
    assert configs.decode(views, 1, 4, CUDA) == configs.decode(views, 8, 4, CUDA) == decode
    assert configs.prefill(views, 4, CUDA) == prefill


def test_presets():
    preset = shapes_of_preset("8B")
    assert {(rows, width) for rows, width, _ in preset.linears} == {
        (6144, 4096),
        (4096, 4096),
        (28672, 4096),
        (4096, 14336),
    }
    assert preset.linears[0][2].describe() == "int4 g128"
    assert shapes_of_preset("70B", bits=8, group=None).linears[0][2].describe() == "int8 channel"
    assert shapes_of_preset("1B", symmetric=False).linears[0][2].describe() == "int4 g128 asym"
    with pytest.raises(InputError, match=r"unknown shapes '8b' .*8B.*there are: 1B, 8B, 70B"):
        shapes_of_preset("8b")
    with pytest.raises(InputError, match="weights of 3 bits"):
        shapes_of_preset("8B", bits=3)


def test_what_a_single_user_waits_for_comes_first():
    cases = find_cases([shapes_of_preset("8B")], batches=(1, 8))
    assert [case.kernel for case in cases] == ["product"] * 4 + ["decode"] * 4 + ["product"] * 12 + ["prefill"] * 2
    assert [case.sizes["rows"] for case in cases if case.kernel == "product"] == [1] * 4 + [4] * 4 + [16] * 4 + [64] * 4
    assert len({case.key for case in cases}) == len(cases)
    assert len(find_cases([shapes_of_preset("8B"), shapes_of_preset("8B")])) == len(cases)
    assert Cublas() in cases[-3].candidates
    with pytest.raises(InputError, match="products of 300 rows"):
        find_cases([shapes_of_preset("8B")], rows=(300,))


def test_rounded_inputs_are_tuned_as_far_as_the_packed_kernel_goes():
    scheme = LinearScheme(weight=WeightScheme(dtype=INT8), activation=ActivationScheme(dtype=INT8))
    cases = find_cases([Shapes(linears=((64, 128, scheme),), query_heads=4, kv_heads=2, head_dim=32)])
    products = [case for case in cases if case.kernel == "product"]
    assert [case.sizes["rows"] for case in products] == [1, 4, 16]
    assert all("unpacked" in case.kind for case in products)
    assert not any(Cublas() in case.candidates for case in products)


def test_which_weights_with_rounded_inputs_stay_as_they_are():
    def kinds(weight, chip, **rounded):
        scheme = LinearScheme(weight=weight, activation=ActivationScheme(dtype=DTYPES["fp8"], **rounded))
        one = Shapes(linears=((64, 128, scheme),), query_heads=4, kv_heads=2, head_dim=32)
        return {case.kind for case in find_cases([one], chip=chip) if case.kernel == "product"}

    fp8 = WeightScheme(dtype=DTYPES["fp8"])
    assert kinds(fp8, 90) == {"e4m3, per output, span 32, unpacked"}
    assert kinds(fp8, 80) == {"e4m3, per output, span 32"}
    assert kinds(fp8, 90, granularity="tensor", dynamic=False) == {"e4m3, per output, span 32, unpacked"}
    assert kinds(WeightScheme(dtype=INT4, group_size=32), 90) == {"4 bits, groups of 32, span 16"}


def test_a_checkpoint_is_read_by_its_headers(models, monkeypatch):
    from quantkit.checkpoints.reader import CheckpointReader

    def refuse(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(CheckpointReader, "tensor", refuse)
    shapes = shapes_of_model(models / "out")
    assert {scheme.describe() for _, _, scheme in shapes.linears} == {"int4 g32"}
    sizes = [rows * width for rows, width, _ in shapes.linears]
    assert sizes == sorted(sizes, reverse=True)
    assert len({(rows, width) for rows, width, _ in shapes.linears}) == len(sizes)
    hidden = shapes.query_heads * shapes.head_dim
    assert ((shapes.query_heads + 2 * shapes.kv_heads) * shapes.head_dim, hidden) in [
        size[:2] for size in shapes.linears
    ]
    assert shapes_of_model(models / "llama").linears == ()


def test_a_model_that_only_transformers_runs_is_refused(tmp_path):
    folder = make_model(tmp_path, "gpt2", n_embd=64, n_layer=2, n_head=4)
    with pytest.raises(InputError):
        shapes_of_model(folder)


# ---- running, on the CPU, where choices change nothing


@pytest.mark.parametrize("kernel", ["product", "decode", "prefill"])
@pytest.mark.parametrize("kv_cache", ["auto", "int8", "int4"])
def test_cases_run_and_wrong_results_are_seen(kernel, kv_cache, monkeypatch):
    torch.manual_seed(0)
    case = next(case for case in find_cases([TINY], kv_types=(kv_cache,)) if case.kernel == kernel)
    with problems.opener(CPU, torch.float32)(case) as problem:
        assert problem.check(case.default) == ""
        times = problem.times([case.default, *case.candidates[:2]], 3)
        assert [len(samples) for samples in times] == [3, 3, 3]
        assert all(sample > 0 for samples in times for sample in samples)
        problem._expected[..., 0] += 1.0
        assert problem.check(case.default) == "computes something else"
        problem._expected[..., 0] = float("nan")
        assert problem.check(case.default) == "computes something else"
        monkeypatch.setattr(problem, "_calls", [lambda: 1 / 0])
        assert problem.check(case.default) == "fails with ZeroDivisionError"
    assert problem._calls == ()


@needs_triton
def test_what_triton_refuses_is_no_choice_and_torch_is_not_timed_in_its_place(monkeypatch):
    from triton.runtime.errors import OutOfResources

    def refused():
        raise OutOfResources(2, 1, "shared memory")

    case = find_cases([TINY])[0]
    with problems.opener(CPU, torch.float32)(case) as problem:
        expected = problem._expected
        call = partial(gpu_kernels.attempt, "quantized_linear", CPU, refused)
        monkeypatch.setattr(problem, "_calls", [lambda: expected if call() is None else None])
        assert problem.check(case.default) == "fails with OutOfResources"
    assert gpu_kernels.why_replaced("quantized_linear", CPU) is None


def test_a_search_from_end_to_end():
    torch.manual_seed(0)
    case = find_cases([TINY])[0]
    with problems.opener(CPU, torch.float32)(case) as problem:
        outcome = search_choices(case, problem)
    assert outcome.entry.microseconds > 0
    assert outcome.dropped == {}
    assert isinstance(outcome.entry.choice, Tile)


def test_choices_that_spill_are_remembered_for_all_shapes_of_a_kind(monkeypatch):
    cases = find_cases([TINY])
    seen = iter([set(), {1}, {1}, {1}, {1}, {1}])
    monkeypatch.setattr(problems, "_spilling_kernels", lambda device: next(seen))
    open_problem = problems.opener(CPU, torch.float32)
    with open_problem(cases[0]) as problem:
        assert problem.check(cases[0].candidates[0]) == "spills"
    with open_problem(cases[0]) as problem:
        assert problem.check(cases[0].candidates[0]) == "spills"
        assert problem.check(cases[0].candidates[1]) == ""
