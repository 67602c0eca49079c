"""Checks of a first run: kernels that are right pass with room to spare, one wrong number in any family does not."""

from __future__ import annotations

import os

import pytest

from quantkit import LLM, SamplingParams
from quantkit.kernels import gpu, ops
from quantkit.kernels.gpu import experts as gpu_experts
from quantkit.kernels.gpu import head as gpu_head
from quantkit.kernels.gpu import ops as gpu_ops
from quantkit.kernels.gpu import paged_decode, w4a16
from quantkit.kernels.gpu import sampling as gpu_sampling
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine import first_run
from quantkit.runtime.engine.first_run import TOLERANCE
from quantkit.runtime.engine.kernel_checks import checks_of
from tests.helpers import edit_config, make_model
from tests.kernels.gpu.interpreted.packed import CPU

SCHEME = {
    "quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False, "checkpoint_format": "gptq",
}  # fmt: skip


@pytest.fixture
def checks(monkeypatch, mixture):
    """The checks of a mixture of experts by family, on a pretended device."""
    monkeypatch.setenv("QUANTKIT_TRITON", "1")  # and what it was, afterwards
    monkeypatch.setenv("QUANTKIT_NATIVE", "1")
    monkeypatch.setattr(gpu, "is_used", lambda device: os.environ["QUANTKIT_TRITON"] == "1")
    monkeypatch.setattr(ops, "_on_gpu", lambda x: gpu.module("ops", x.device))
    config = EngineConfig(dtype="fp16", kv_cache="int4", page_size=16, head_dtype="int8")
    return {check.family: check for check in checks_of(mixture, config, CPU)}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = make_model(
        tmp_path_factory.mktemp("model"),
        "qwen3_moe",
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts_per_tok=1,
    )
    edit_config(folder, quantization_config=SCHEME)
    return folder


PLANTED = {
    "sampling": (gpu_sampling, "choose"),
    "ops": (gpu_ops, "gated"),
    "head": (gpu_head, "logits"),
    "quantized_linear": (w4a16, "multiply"),
    "experts": (gpu_experts, "open_rows"),
    "attention": (paged_decode, "attend_tokens"),  # writes into its last argument
}


SLOW = {"quantized_linear", "experts", "attention"}


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=pytest.mark.slow) if one in SLOW else one for one in PLANTED]
)
def test_one_number_that_is_wrong_is_found(checks, monkeypatch, family):
    module, name = PLANTED[family]
    launch = getattr(module, name)

    def wrong(*given):
        result = launch(*given)
        numbers = given[-1] if result is None else result[0] if isinstance(result, tuple) else result
        numbers.view(-1)[0] = numbers.abs().max() + 1
        return result

    with monkeypatch.context() as patch:
        patch.setattr(module, name, wrong)
        assert not checks[family].error(CPU) <= TOLERANCE
    assert checks[family].error(CPU) < TOLERANCE / 10


def test_every_family_has_a_check(checks):
    assert set(checks) == set(gpu.FAMILIES) == set(PLANTED)


PRETENDED = """
import os
from quantkit.kernels import gpu, ops
from quantkit.kernels.gpu import ops as kernels
gpu.is_used = lambda device: os.environ["QUANTKIT_TRITON"] != "0"
ops._on_gpu = lambda x: gpu.module("ops", x.device)
right = kernels.gated
kernels.gated = lambda *given: right(*given) + 1
"""


@pytest.mark.slow
def test_a_model_is_run_by_torch_where_a_kernel_is_wrong(family_models, monkeypatch, tmp_path):
    """The whole way: a load finds it in a child, and tokens are those of a run without kernels."""
    path, settings = family_models["llama"], {"device": "cpu", "dtype": "fp32", "threads": 1}
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    expected = LLM(path, **settings).generate([[5, 6, 7]], params)[0].token_ids
    monkeypatch.delenv("QUANTKIT_TRITON", raising=False)
    monkeypatch.setattr(gpu, "_replaced", {})
    monkeypatch.setattr(gpu, "is_used", lambda device: True)
    monkeypatch.setattr(ops, "_on_gpu", lambda x: gpu.module("ops", x.device))
    monkeypatch.setattr(gpu_ops, "gated", lambda *given: 1 / 0)
    monkeypatch.setattr(first_run, "_SECONDS", 100.0)
    monkeypatch.setattr(first_run, "_CHILD", first_run._CHILD.replace("main()", f"exec({PRETENDED!r}); main()"))
    monkeypatch.setattr(first_run, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(first_run, "identity", lambda device: {})
    llm = LLM(path, **settings)
    assert {family for family in gpu.FAMILIES if gpu.why_replaced(family, CPU)} == {"ops"}
    assert "silu, float32: " in first_run.describe_kernels(CPU)
    assert llm.generate([[5, 6, 7]], params)[0].token_ids == expected
