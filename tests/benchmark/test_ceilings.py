"""Limits of this machine are plausible, and a step's bytes and operations are as counted by hand for a small model."""

from __future__ import annotations

import pytest
import torch

from quantkit.benchmark import ceilings
from quantkit.benchmark.ceilings import (
    Ceilings,
    Cost,
    break_even_rows,
    decode_record,
    gemm_rate,
    linear_kinds,
    measure_ceilings,
    memory_bandwidth,
    model_cost,
    prefill_record,
)
from quantkit.models.kv_sizes import BF16
from quantkit.models.layer_state_sizes import AttentionShape
from quantkit.results import SWEEP_NAME, BenchmarkRun
from quantkit.runtime.model.loader import load_model
from tests.benchmark.test_steps import timing, workload
from tests.helpers import make_model

# The tiny Llama: width 64, 4 query heads on 2 key/value heads of 16, MLP 96, 2 layers, 260 tokens.
LINEARS = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 96 * 64)
HEAD = 260 * 64


def test_limits_are_those_of_a_machine(monkeypatch):
    monkeypatch.setattr(ceilings, "_BUFFER_BYTES", 1 << 24)
    monkeypatch.setattr(ceilings, "_GEMM_ROWS", 256)
    ceilings_here = measure_ceilings(torch.device("cpu"), (torch.float32,), repeats=2)
    assert ceilings_here.threads == torch.get_num_threads()
    assert 1e8 < ceilings_here.bytes_per_s < 1e13
    assert 1e8 < ceilings_here.flops_per_s["float32"] < 1e15


def test_seconds_decide(monkeypatch):
    monkeypatch.setattr(ceilings, "_BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr(ceilings, "_GEMM_ROWS", 64)
    monkeypatch.setattr(ceilings, "_shortest", lambda work, device, repeats: 0.5)
    assert memory_bandwidth(torch.device("cpu")) == 2 * (1 << 20)
    assert gemm_rate(torch.device("cpu"), torch.float32) == 2 * 2 * 64**3


def cost_of(folder, kv=None, **options):
    model = load_model(folder, **options)
    return model, model_cost(model, model.layouts(kv or "auto", 64))


def test_a_dense_model(tiny_llama):
    model, cost = cost_of(tiny_llama)
    assert (cost.parameters, cost.head_parameters) == (LINEARS, HEAD)
    assert cost.read_bytes == model.stored_bytes
    assert cost.product == "float32"
    assert cost.kv_token_bytes == 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, channels, bytes
    assert cost.decode_bytes(3, 100) == model.stored_bytes + 3 * 101 * 512
    pair = 2 * 4 * 16 * 2  # two operations in score and mix, 4 heads, 16 channels, twice
    assert cost.decode_flops(3, 100) == 3 * (2 * (LINEARS + HEAD) + 2 * 101 * pair)
    assert cost.prefill_flops(10) == 2 * 10 * LINEARS + 2 * HEAD + 2 * 10 * 10 / 2 * pair
    assert cost.prefill_bytes(10, 512) == model.stored_bytes + 10 * 512
    assert cost.prefill_bytes(10, 4) == 3 * model.stored_bytes + (4 + 8) * 512 + 10 * 512  # chunks of 4, 4 and 2


def test_a_quantized_cache_is_smaller(tiny_llama):
    _, cost = cost_of(tiny_llama, "int8")
    # A code per channel; for keys a 16-bit scale and zero per channel and page, for values a scale per token and head.
    assert cost.kv_token_bytes == 2 * 2 * (16 + 16 * 4 / 64) + 2 * 2 * (16 + 2)


def test_a_window_is_all_that_is_read(family_models):
    _, cost = cost_of(family_models["mistral"])
    assert {layer.window for layer, _ in cost.layers} == {32}
    assert cost.kv_bytes(20) == 20 * 512
    assert cost.kv_bytes(200) == 32 * 512
    assert cost.prefill_flops(200) - cost.prefill_flops(199) == 2 * LINEARS + 2 * 32 * 256


def test_experts_are_read_as_tokens_pick_them(tmp_path):
    folder = make_model(
        tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=2, dtype=torch.float32, sliding_window=None
    )
    model, cost = cost_of(folder)
    expert = 3 * 96 * 64
    attention = 64 * 64 + 2 * 32 * 64 + 64 * 64
    assert cost.parameters == 2 * (attention + 4 * 64 + 2 * expert)  # the router, and two experts of four
    assert cost.weight_bytes(1) == model.stored_bytes
    all_read = cost.weight_bytes(1000)
    assert all_read == pytest.approx(model.stored_bytes + cost.expert_bytes)  # the other half too
    assert cost.weight_bytes(1) < cost.weight_bytes(2) < all_read


def test_what_transformers_runs_is_counted_by_its_bytes(tiny_llama):
    model, cost = cost_of(tiny_llama, backend="transformers")
    assert cost.read_bytes == model.stored_bytes
    assert cost.parameters == model.stored_bytes // 4
    assert cost.kv_token_bytes == 0
    assert linear_kinds(model) == {}


def test_linears_by_kind(tiny_llama):
    kinds = linear_kinds(load_model(tiny_llama))
    assert sum(kinds.values()) == 2 * 4 + 1
    assert all("float32" in kind for kind in kinds)


def test_break_even_of_the_design_notes():
    """16-bit weights on a machine with 4.3 TB/s and 780 TFLOP/s: from 181 rows on; with 4.125 bits from 47 on."""
    assert break_even_rows(2, 2, 4.3e12, 780e12) == pytest.approx(181.4, abs=0.1)
    assert break_even_rows(4.125 / 8, 2, 4.3e12, 780e12) == pytest.approx(46.8, abs=0.1)


WEIGHTS = {"read_bytes": 1000, "parameters": 400, "head_parameters": 100, "head_bytes": 200}
COST = Cost(
    **WEIGHTS,
    expert_bytes=0,
    # 10 bytes and 20 operations for each token in the cache.
    layers=((AttentionShape(num_heads=2, key_dim=3, value_dim=2), BF16),),
    product="bfloat16",
)
CEILINGS = Ceilings(device="cpu", threads=1, bytes_per_s=1e5, flops_per_s={"bfloat16": 1e6})


def test_records_of_a_run():
    run = BenchmarkRun(
        workload=workload("closed-1", 1),
        requests=(timing(0, 10, 0.0, 0.2, 0.02, 0.02), timing(1, 10, 1.0, 1.4, 0.02, 0.05)),
    )
    decode = decode_record(run, COST, CEILINGS)
    assert (decode.batch, decode.context, decode.seconds) == (1, 12, pytest.approx(0.02))
    assert decode.bytes_moved == 1000 + 13 * 10
    assert decode.flops == 1000 + 13 * 20
    assert decode.mbu == pytest.approx(1130 / 0.02 / 1e5)
    assert decode.bound_by == "memory"
    prefill = prefill_record(run, COST, CEILINGS, 512)
    assert (prefill.num_tokens, prefill.seconds) == (10, pytest.approx(0.3))
    assert prefill.flops == 2 * 10 * 400 + 200 + 20 * 10 * 10 / 2


def test_runs_that_show_nothing_have_no_record():
    crowd = BenchmarkRun(workload=workload(), requests=(timing(0, 10, 0.0, 0.2, 0.02),))
    assert prefill_record(crowd, COST, CEILINGS, 512) is None
    short = BenchmarkRun(workload=workload("closed-1", 1), requests=(timing(0, 10, 0.0, 0.2),))
    assert decode_record(short, COST, CEILINGS) is None
    sweep = BenchmarkRun(workload=workload(SWEEP_NAME, 1), requests=(timing(0, 10, 0.0, 0.2, 0.02),))
    assert decode_record(sweep, COST, CEILINGS) is None
