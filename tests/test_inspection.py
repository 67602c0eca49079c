"""`inspect`, on checkpoints small enough to count by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quantkit.api import quantize
from quantkit.errors import CheckpointError, ModelError
from quantkit.formats import REGISTRY
from quantkit.inspection import inspect
from quantkit.numerics.affine import WeightGrid, round_to_nearest
from quantkit.numerics.dtype import INT4, INT8
from quantkit.numerics.scheme import ActivationScheme, LinearScheme, WeightScheme
from quantkit.results import LayerRecord, LinearRecord, ModuleSummary
from tests import forked
from tests.helpers import make_model

N, K, VOCAB, NUM_LAYERS = 16, 64, 10, 11
LINEARS = ("self_attn.q_proj", "mlp.down_proj")
INT4_G32 = LinearScheme(weight=WeightScheme(dtype=INT4, group_size=32, symmetric=False))
INT8_CHANNEL = LinearScheme(weight=WeightScheme(dtype=INT8))
W8A8 = LinearScheme(weight=WeightScheme(dtype=INT8), activation=ActivationScheme(dtype=INT8))


def write(folder, tensors, config):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    return folder


def dense_tensors():
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": torch.zeros(VOCAB, K),
        "model.norm.weight": torch.ones(K),
        "lm_head.weight": torch.zeros(VOCAB, K),
    }
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = torch.ones(K)
        tensors[f"{prefix}.self_attn.q_proj.bias"] = torch.zeros(N)
        for name in LINEARS:
            tensors[f"{prefix}.{name}.weight"] = torch.randn(N, K, generator=generator)
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def quantized(folder, schemes):
    """A compressed-tensors checkpoint; `schemes` by full module name, the other linears stay dense."""
    known = REGISTRY.load("compressed-tensors")
    tensors = dense_tensors()
    for name, scheme in schemes.items():
        weight = tensors.pop(f"{name}.weight")
        codes = round_to_nearest(weight, WeightGrid(scheme.weight, torch.bfloat16))
        tensors |= {f"{name}.{key}": value for key, value in known.encode(codes, scheme).items()}
    every = [f"model.layers.{i}.{name}" for i in range(NUM_LAYERS) for name in LINEARS]
    left = [*(name for name in every if name not in schemes), "lm_head"]
    return write(folder, {k: v.contiguous() for k, v in tensors.items()}, known.config(schemes, left))


def rows(summary):
    return {(module.kind, module.stored_as): module for module in summary.modules}


def test_a_dense_checkpoint(tmp_path):
    summary = inspect(write(tmp_path, dense_tensors(), {}))
    assert (summary.format, summary.architecture, summary.bits_per_weight) == ("dense", "LlamaForCausalLM", None)
    assert (summary.recipe, summary.layers) == (None, ())
    assert summary.modules == (
        module("embedding", 1, VOCAB * K),
        module("mlp.down_proj", NUM_LAYERS, NUM_LAYERS * N * K),
        module("self_attn.q_proj", NUM_LAYERS, NUM_LAYERS * (N * K + N)),
        module("norms", NUM_LAYERS + 1, (NUM_LAYERS + 1) * K),
        module("head", 1, VOCAB * K),
    )
    tensors = dense_tensors().values()
    assert summary.num_parameters == sum(tensor.numel() for tensor in tensors)
    assert summary.num_bytes == 2 * summary.num_parameters


def module(kind, count, num_parameters, stored_as="bfloat16"):
    return ModuleSummary(
        kind=kind, stored_as=stored_as, count=count, num_parameters=num_parameters, num_bytes=2 * num_parameters
    )


def test_packed_codes_are_counted_as_the_weights_they_stand_for(tmp_path):
    schemes = {f"model.layers.{i}.mlp.down_proj": INT4_G32 for i in range(NUM_LAYERS)}
    summary = inspect(quantized(tmp_path, schemes))
    row = rows(summary)["mlp.down_proj", "int4 g32 asym"]
    assert (row.count, row.num_parameters) == (NUM_LAYERS, NUM_LAYERS * N * K)
    assert summary.num_parameters == sum(tensor.numel() for tensor in dense_tensors().values())
    assert summary.format == "compressed-tensors"
    # 4 bits of code, and per group of 32 one bfloat16 scale and one zero point of 4 bits.
    assert summary.bits_per_weight == pytest.approx(4 + (16 + 4) / 32)
    assert rows(summary)["self_attn.q_proj", "bfloat16"].count == NUM_LAYERS


def test_one_kind_stored_in_two_ways_is_two_rows(tmp_path):
    four_bits = LinearScheme(weight=dataclasses.replace(INT4_G32.weight, symmetric=True))
    schemes = {f"model.layers.{i}.self_attn.q_proj": four_bits for i in range(NUM_LAYERS)}
    schemes["model.layers.2.self_attn.q_proj"] = INT8_CHANNEL
    stored = rows(inspect(quantized(tmp_path, schemes)))
    assert stored["self_attn.q_proj", "int4 g32"].count == NUM_LAYERS - 1
    assert stored["self_attn.q_proj", "int8 channel"].count == 1
    # The bias is a parameter, but no weight bit.
    assert stored["self_attn.q_proj", "int8 channel"].num_parameters == N * K + N


def test_quantized_activations_are_named(tmp_path):
    schemes = {f"model.layers.{i}.{name}": W8A8 for i in range(NUM_LAYERS) for name in LINEARS}
    summary = inspect(quantized(tmp_path, schemes))
    assert ("mlp.down_proj", W8A8.describe()) in rows(summary)
    assert summary.bits_per_weight == pytest.approx(8 + 16 / K)


def record():
    linear = LinearRecord(
        name="mlp.down_proj",
        scheme="int4 g32",
        shape=(N, K),
        bits_per_weight=4.5,
        rounding_error=0.1,
        error=0.05,
        measure="output",
    )
    return LayerRecord(
        index=0,
        name="model.layers.0",
        linears=(linear,),
        output_snr_db=20.0,
        notes=("damping raised",),
        seconds={},
        peak_bytes=0,
    )


def test_recipe_and_errors_come_from_the_manifest(tmp_path):
    write(tmp_path, dense_tensors(), {})
    layer = json.loads(json.dumps(record().to_dict()))
    del layer["seconds"], layer["peak_bytes"]  # as the pipeline leaves them out
    manifest = {"schema_version": 1, "recipe": {"name": "mine"}, "result": {"recipe": "mine", "layers": [layer]}}
    (tmp_path / "quantkit.json").write_text(json.dumps(manifest))
    summary = inspect(str(tmp_path))
    assert (summary.recipe, summary.layers) == ("mine", (record(),))
    assert json.loads(json.dumps(summary.to_dict()))["layers"][0]["notes"] == ["damping raised"]


@pytest.mark.parametrize(
    "manifest",
    [{}, {"recipe": 5}, {"recipe": None, "result": 3}, {"recipe": {}, "result": {"layers": [{"name": "x"}, 7]}}],
    ids=str,
)
def test_a_manifest_may_lack_anything(tmp_path, manifest):
    write(tmp_path, dense_tensors(), {})
    (tmp_path / "quantkit.json").write_text(json.dumps(manifest))
    summary = inspect(tmp_path)
    assert (summary.recipe, summary.layers) == (None, ())


def test_what_cannot_be_inspected(tmp_path):
    with pytest.raises(ModelError, match="no such model directory"):
        inspect(tmp_path / "nothing")
    write(tmp_path, dense_tensors(), {"quantization_config": {"quant_method": "hqq"}})
    with pytest.raises(CheckpointError, match="method 'hqq' is not supported; supported: awq, bitsandbytes"):
        inspect(tmp_path)
    write(tmp_path, dense_tensors(), {})
    (tmp_path / "quantkit.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"quantkit\.json is not valid JSON"):
        inspect(tmp_path)


def test_a_hanging_expression_of_a_config_ends_inspect(tmp_path):
    """In a process of its own: the standard library's engine cannot be stopped by anything but a signal."""
    model = make_model(tmp_path / "model", "llama")
    output = Path(quantize(model, "rtn-int8", tmp_path / "out").output)
    config = json.loads((output / "config.json").read_text())
    config["quantization_config"]["ignore"] = [r"re:(.|..|...)*(.|..)*(.|..)*(.|..)*[^a-z._0-9]"]
    (output / "config.json").write_text(json.dumps(config))
    code, _, error = forked.Command("inspect", output).finish()
    assert (code, "takes too long to match" in " ".join(error.split())) == (4, True), error


def test_it_says_who_reads_it_and_who_ignores_its_cache(tmp_path):
    schemes = {
        f"model.layers.0.{name}": LinearScheme(weight=WeightScheme(dtype=INT4, group_size=32)) for name in LINEARS
    }
    folder = quantized(tmp_path, schemes)
    config = json.loads((folder / "config.json").read_text())
    plain = {reading.engine: reading for reading in inspect(folder).engines}
    assert (plain["vLLM"].reads, plain["llama.cpp"].reads, plain["vLLM"].cache) == ("fast", "no", "")
    assert plain["SGLang"].reads == "no" and "64 x 128" in plain["SGLang"].reason  # a matrix of 16 x 64
    (folder / "config.json").write_text(json.dumps({**config, "quantkit_kv_cache": {"version": 1}}))
    own = {reading.engine: reading for reading in inspect(folder).engines}
    assert "silently ignores quantkit_kv_cache and keeps 16-bit keys and values" in own["vLLM"].cache
