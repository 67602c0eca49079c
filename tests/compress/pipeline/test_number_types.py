"""Every number type from recipe to disk and back: what transformers and the runtime compute is what was calibrated."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantkit.compress.calibration.dataset import load_samples
from quantkit.compress.pipeline import quantize
from quantkit.compress.recipe.load import build
from quantkit.errors import DataError, SchemeError
from quantkit.formats.compressed_tensors import FORMAT
from quantkit.numerics.scheme import Scheme
from quantkit.results import CompressionResult
from quantkit.runtime.model.loader import load_model
from tests.helpers import TEXT, edit_tensors, load_tensors, make_model
from tests.runtime.helpers import run

TOKENS = torch.randint(2, 250, (1, 40), generator=torch.Generator().manual_seed(1))
BLOCKS = {"weights": {"dtype": "fp8", "group_size": "32x32"}, "activations": {"dtype": "fp8", "group_size": 32}}
FP8_STATIC = {
    "weights": {"dtype": "fp8", "group_size": "tensor"},
    "activations": {"dtype": "fp8", "dynamic": False},
}
CASES = {
    "int5": {"weights": {"dtype": "int5", "group_size": 32}},
    "int6 asymmetric": {"weights": {"dtype": "int6", "group_size": 32, "symmetric": False}},
    "fp8 tensor": {"weights": {"dtype": "fp8", "group_size": "tensor"}},
    "fp8 static": FP8_STATIC,
    "fp8 static, smoothed": {**FP8_STATIC, "steps": ["smoothquant", "gptq"]},
    "fp8 blocks": BLOCKS,
    "fp8 blocks, gptq": {**BLOCKS, "steps": ["gptq"]},
    "int8 static": {
        "weights": {"dtype": "int8"},
        "activations": {"dtype": "int8", "dynamic": False, "clip": "mse"},
        "steps": ["smoothquant", {"gptq": {"true_sequential": True}}],
    },
    "w4a8-int8": {"weights": {"dtype": "int4", "group_size": 32}, "activations": {"dtype": "int8"}},
    "w4a8-fp8": {"weights": {"dtype": "int4", "group_size": 32}, "activations": {"dtype": "fp8"}, "steps": ["gptq"]},
    "nvfp4": {"weights": {"dtype": "nvfp4"}, "steps": ["awq", "gptq"]},
    "nvfp4-a4": {"weights": {"dtype": "nvfp4"}, "activations": {"dtype": "nvfp4"}},
    "mxfp4": {"weights": {"dtype": "mxfp4"}, "steps": ["awq"]},
    "mxfp4-a4": {"weights": {"dtype": "mxfp4"}, "activations": {"dtype": "mxfp4"}},
    "mxfp8-a8": {"weights": {"dtype": "mxfp8"}, "activations": {"dtype": "mxfp8"}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("model"), dtype=torch.bfloat16)
    (folder / "text.txt").write_text(TEXT)
    return folder


def quantized(model, output, data, **changes) -> CompressionResult:
    needs = data.get("steps") or not data.get("activations", {}).get("dynamic", True)
    needs = needs or data.get("activations", {}).get("dtype") == "nvfp4"
    calibration = {"data": str(model / "text.txt"), "samples": 8, "sequence_length": 64}
    recipe = {"name": "x", **data, **({"calibration": calibration} if needs else {}), **changes}
    return quantize(str(model), build(recipe, "x"), output, device="cpu")


def decoded(folder) -> dict[str, torch.Tensor]:
    """Our decoded weights by full module name."""
    scheme, tensors = scheme_of(folder), load_tensors(folder)
    modules = {name.rpartition(".")[0] for name in tensors if name.endswith(".weight_scale")}
    return {
        name: FORMAT.decode(
            {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")},
            scheme.find(name),
        ).dequantize()
        for name in modules
    }


def scheme_of(folder) -> Scheme:
    scheme = FORMAT.recognise(json.loads((folder / "config.json").read_text()))
    assert scheme is not None
    return scheme


@pytest.mark.parametrize("name", CASES)
def test_transformers_and_the_runtime_compute_the_same(model, tmp_path, name):
    quantized(model, tmp_path / "out", CASES[name])
    weights = decoded(tmp_path / "out")
    assert len(weights) == 14
    in_half = scheme_of(tmp_path / "out").default.weight.dtype.scale != "float"
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16 if in_half else torch.float32
    ).eval()
    with torch.no_grad():
        loaded(TOKENS)  # decodes what is still packed
        for linear, values in weights.items():
            weight = loaded.get_submodule(linear).weight
            assert torch.equal(weight.bfloat16(), values.bfloat16()), linear  # the dtype of the checkpoint
            weight.data = values
        expected = nn.Module.float(loaded)(TOKENS).logits[0]
    actual = run(load_model(tmp_path / "out", dtype="float32"), [TOKENS[0].tolist()])[0]
    # A value between two codes may be rounded either way; the next layers then see another input.
    tolerance = 1e-4 if scheme_of(tmp_path / "out").default.activation is None else 0.05
    assert (actual - expected).std() <= tolerance * expected.std()


def test_scales_of_inputs_are_those_of_the_data(model, tmp_path):
    """The largest input seen, from inputs that SmoothQuant has already changed; one for all linears of a set."""
    quantized(model, tmp_path / "out", CASES["fp8 static, smoothed"])
    tensors = load_tensors(tmp_path / "out")
    scales = {name: t for name, t in tensors.items() if name.endswith("input_scale")}
    assert len(scales) == 14
    assert all(scale.shape == (1,) and scale > 0 and scale != 1 for scale in scales.values())
    layer = "model.layers.0"
    for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        parent = "self_attn" if "q_proj" in names else "mlp"
        for kind in ("input_scale", "weight_scale"):
            assert len({tensors[f"{layer}.{parent}.{name}.{kind}"].item() for name in names}) == 1
    seen = []
    smoothed = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    smoothed.model.layers[0].input_layernorm.register_forward_hook(
        lambda m, a, out: seen.append(out.abs().max().item())
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    samples = load_samples(str(model / "text.txt"), tokenizer, samples=8, sequence_length=64, vocab_size=260, seed=0)
    with torch.no_grad():
        for ids in samples.token_ids:
            smoothed(torch.tensor([ids]))
    assert tensors[f"{layer}.self_attn.q_proj.input_scale"].item() == pytest.approx(
        max(seen) / 448, rel=3 * 2**-9
    )  # in bfloat16, the normalized input, its product with the norm's weight and the scale are rounded


def test_global_scales_are_shared_by_what_engines_join(model, tmp_path):
    quantized(model, tmp_path / "out", CASES["nvfp4-a4"])
    tensors, layer = load_tensors(tmp_path / "out"), "model.layers.1"
    for kind in ("weight_global_scale", "input_global_scale"):
        attention = {tensors[f"{layer}.self_attn.{name}_proj.{kind}"].item() for name in "qkv"}
        mlp = {tensors[f"{layer}.mlp.{name}_proj.{kind}"].item() for name in ("gate", "up")}
        assert len(attention) == len(mlp) == 1
        assert attention != mlp


@pytest.mark.parametrize("dtype", ["nvfp4", "mxfp4", "fp8"])
def test_gptq_beats_rounding_and_the_search_beats_the_covering_range(model, tmp_path, dtype):
    data = {"weights": {"dtype": dtype}}
    plain = quantized(model, tmp_path / "plain", data)
    gptq = quantized(model, tmp_path / "gptq", {**data, "steps": ["gptq"]})
    linears = [linear for layer in plain.layers for linear in layer.linears]
    assert sum(linear.error for linear in linears) < sum(linear.rounding_error for linear in linears)
    for layer in gptq.layers:
        for linear in layer.linears:
            assert linear.error < linear.rounding_error, linear.name


def test_an_input_that_is_always_zero_has_no_scale(model, tmp_path):
    copy = make_model(tmp_path / "model")
    (copy / "text.txt").write_text(TEXT)
    edit_tensors(copy, model__layers__0__input_layernorm__weight=torch.zeros(64))
    with pytest.raises(DataError, match=r"layers\.0\.self_attn\.q_proj: .*the largest input .* is 0\.0"):
        quantized(copy, tmp_path / "out", FP8_STATIC)


def test_groups_of_zeros_and_odd_shapes(model, tmp_path):
    copy = make_model(tmp_path / "model")
    weight = load_tensors(copy)["model.layers.0.mlp.down_proj.weight"].clone()
    weight[3, :32] = 0
    weight[5] = 0
    edit_tensors(copy, model__layers__0__mlp__down_proj__weight=weight)
    for dtype in ("nvfp4", "mxfp4", "mxfp8", "fp8"):
        quantized(copy, tmp_path / dtype, {"weights": {"dtype": dtype}})
        back = decoded(tmp_path / dtype)["model.layers.0.mlp.down_proj"]
        assert back[5].abs().max() == back[3, :32].abs().max() == 0
        assert torch.isfinite(back).all()
    with pytest.raises(SchemeError, match=r"mlp\.down_proj: .*128 does not divide 96"):
        quantized(
            copy,
            tmp_path / "odd",
            {"weights": {"dtype": "fp8", "group_size": "32x128"}, "ignore": ["*.self_attn.*", "*gate*", "*up*"]},
        )
    with pytest.raises(SchemeError, match=r"blocks of 128 outputs do not divide the 64 outputs"):
        quantized(copy, tmp_path / "odd", {"weights": {"dtype": "fp8", "group_size": "128x32"}})


def test_scales_that_their_dtype_cannot_hold_are_refused(tmp_path):
    copy = make_model(tmp_path / "model")
    weight = load_tensors(copy)["model.layers.0.mlp.down_proj.weight"] * 1e7
    edit_tensors(copy, model__layers__0__mlp__down_proj__weight=weight)
    data = {"weights": {"dtype": "int4", "group_size": 32}}
    with pytest.raises(SchemeError, match=r"layers\.0\.mlp\.down_proj: a scale is not finite in float16. .*set format"):
        quantized(copy, tmp_path / "out", data, format="gptq")
    quantized(copy, tmp_path / "other", data)
