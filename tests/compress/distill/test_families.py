"""Models whose files, experts or dtypes are special: what is measured is what the new checkpoint holds."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import quantkit
from quantkit import DistillOptions, distill
from quantkit.compress.convert.source import open_source
from quantkit.errors import SchemeError
from tests.helpers import edit_config, load_tensors, make_model

QUICK = {"samples": 10, "sequence_length": 32, "steps": 6, "check_every": 2, "batch_size": 1, "learning_rate": 0.01}
INT3 = {"weights.dtype": "int3", "weights.group_size": 16}


class Killed(Exception):
    """Stands for a kill."""


@pytest.fixture
def options(text_file):
    return DistillOptions(data=str(text_file), patience=9, **QUICK)


def check(model, checkpoint, folder, options):
    """Distill; all linears have new scales, and the new checkpoint's KL is the one that was measured."""
    result = distill(checkpoint, model, folder / "new", options, device="cpu")
    assert 0 < result.kl_after < result.kl_before
    before, after = open_source(checkpoint), open_source(folder / "new")
    same = [name for name in before.linears if torch.equal(before.weight(name).scale, after.weight(name).scale)]
    again = distill(folder / "new", model, folder / "again", options, device="cpu")
    assert again.kl_before == pytest.approx(result.kl_after, rel=1e-4)
    return same


@pytest.mark.parametrize("family", ["granite", "phi3", "nemotron_h", "qwen3_next", "gemma3_text", "olmo2"])
def test_families(family, tmp_path, options):
    model = make_model(tmp_path / "model", family)
    quantkit.quantize(model, "rtn-int4", tmp_path / "out", overrides=INT3, device="cpu")
    assert check(model, tmp_path / "out", tmp_path, options) == []


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v2", "qwen3_moe"])
def test_experts(family, tmp_path, options):
    model = make_model(tmp_path / "model", family)
    quantkit.quantize(model, "rtn-int4", tmp_path / "out", overrides=INT3, device="cpu")
    untouched = check(model, tmp_path / "out", tmp_path, options)
    assert all("expert" in name for name in untouched)  # experts that no token has reached

    def kill(text):
        if text.startswith("step 2"):
            raise Killed

    with pytest.raises(Killed):
        distill(tmp_path / "out", model, tmp_path / "resumed", options, device="cpu", progress=kill)
    distill(tmp_path / "out", model, tmp_path / "resumed", options, device="cpu")
    whole, resumed = load_tensors(tmp_path / "new"), load_tensors(tmp_path / "resumed")
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_a_checkpoint_without_the_prefix_of_the_model(tiny_llama, tmp_path, options):
    quantkit.quantize(tiny_llama, "rtn-int4", tmp_path / "out", overrides=INT3, device="cpu")
    tensors = {name.removeprefix("model."): value for name, value in load_tensors(tmp_path / "out").items()}
    for file in (tmp_path / "out").glob("model*.safetensors*"):
        file.unlink()
    save_file(tensors, tmp_path / "out/model.safetensors", {"format": "pt"})
    assert check(tiny_llama, tmp_path / "out", tmp_path, options) == []


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_the_original_may_have_another_dtype(dtypes, tmp_path, options):
    for dtype in set(dtypes):
        make_model(tmp_path / dtype, dtype=getattr(torch, dtype))
    quantkit.quantize(tmp_path / dtypes[1], "rtn-int4", tmp_path / "out", overrides=INT3, device="cpu")
    check(tmp_path / dtypes[0], tmp_path / "out", tmp_path, options)


def test_int4_with_fp8_activations_keeps_scales_for_8_bit_kernels(tmp_path, options):
    model = make_model(tmp_path / "model", dtype=torch.bfloat16)
    overrides = {"steps": [], "calibration": None, "weights.group_size": 32}
    quantkit.quantize(model, "w4a8-fp8", tmp_path / "out", overrides=overrides, device="cpu")
    check(model, tmp_path / "out", tmp_path, options)


def test_an_architecture_that_is_not_described_is_refused(tiny_llama, tmp_path, options):
    quantkit.quantize(tiny_llama, "rtn-int4", tmp_path / "out", overrides=INT3, device="cpu")
    edit_config(tmp_path / "out", architectures=["OtherForCausalLM"], model_type="other")
    with pytest.raises(SchemeError, match="does not know the architecture"):
        distill(tmp_path / "out", tiny_llama, tmp_path / "new", options, device="cpu")
