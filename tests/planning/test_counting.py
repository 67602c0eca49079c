"""Counting: configs against the real models of transformers, headers against configs, files against the pipeline."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from quantkit.checkpoints.folder import find_tensors
from quantkit.checkpoints.header import TensorInfo
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress import pipeline
from quantkit.compress.pipeline.plan import build_plan, predicted_bytes
from quantkit.compress.recipe import load
from quantkit.errors import CheckpointError, ModelError
from quantkit.models.families import known
from quantkit.models.layer_tensors import Matrix
from quantkit.planning import estimate
from quantkit.planning.counting import from_config, from_headers
from quantkit.planning.memory import compression_bytes, everywhere, experts_read, mtp_bytes, planned_weight_bytes
from quantkit.planning.recipes import plan_recipe
from quantkit.planning.source import description_of, from_model
from tests.helpers import COMPRESSED_ONLY, SETTINGS, load_tensors, make_model
from tests.helpers import FAMILIES as SMALL
from tests.mtp_models import HEADS, make_mtp_model
from tests.planning.shapes import shape_of

SIZES = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
WIDE = {**EXPERTS, "moe_intermediate_size": 32}
GROUPED = {**WIDE, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
LATENT = {
    **GROUPED,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
}
V4 = {
    **WIDE,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 12,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "sliding_window": 16,
    "n_shared_experts": 1,
}
VARIANTS = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16},
    "gpt_neox": {"num_key_value_heads": 4},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    "glm": {"head_dim": 16, "attention_bias": True},
    "glm4": {"head_dim": 16},
    "mellum": {"num_hidden_layers": 2},
    "granitemoehybrid": {"num_local_experts": 0, "mamba_n_heads": 8, "mamba_d_head": 16, "layer_types": None},
    "mixtral": EXPERTS,
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention"], "head_dim": 16},
    "olmoe": EXPERTS,
    "qwen3_next": {"layer_types": None},
    "gpt_oss": {**EXPERTS, "head_dim": 16},
    "qwen2_moe": {**WIDE, "shared_expert_intermediate_size": 40},
    "qwen3_moe": WIDE,
    "glm4_moe": {**GROUPED, "use_qk_norm": True, "head_dim": 16},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": {**LATENT, "index_head_dim": 16, "index_n_heads": 4},
    "deepseek_v4": V4,
}
FILES = {name.replace("-", "_") for name in known()}
OTHERWISE = {"gemma3": "gemma3_text", "hunyuan": "hunyuan_v1_dense", "hunyuan_moe": "hunyuan_v1_moe"}
COUNTED = sorted({*FILES, *OTHERWISE.values()} - {*OTHERWISE, "falcon"})
# These have no key/value heads of their own, and a width of their own.
PLAIN = ("bloom", "codegen", "gpt2", "gpt_bigcode", "gptj", "mpt", "opt")


@pytest.mark.parametrize("family", COUNTED)
def test_the_count_from_config_is_that_of_the_real_model(family):
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**SIZES, **SETTINGS.get(family, {}), **COMPRESSED_ONLY.get(family, {}), **VARIANTS.get(family, {})}
    if family in PLAIN:
        settings = {k: v for k, v in settings.items() if k not in ("num_key_value_heads", "intermediate_size")}
    try:
        config = AutoConfig.for_model(family, **settings)
    except ValueError:
        pytest.skip(f"this transformers has no {family}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    real = sum(parameter.numel() for parameter in model.parameters())
    real += sum(
        buffer.numel() for name, buffer in model.named_buffers() if "e_score_correction" in name or "tid2eid" in name
    )
    shape = from_config(description_of(config.to_dict(), "config.json"), family, "config.json")
    assert shape.num_parameters == real
    names = {name.removesuffix(".weight") for name, p in model.named_parameters() if p.ndim == 2}
    ours = {
        f"{shape.prefix}.{i}.{m.name}" for i, layer in enumerate(shape.layers) for m in layer.matrices if m.copies == 1
    }
    if family not in ("deepseek_v4", "hy_v3"):  # whose modules transformers calls otherwise than checkpoints do
        assert {name for name in ours if "expert" not in name and "gate" not in name.split(".")[-1]} <= names


@pytest.mark.parametrize("family", SMALL)
def test_headers_and_config_agree(family, family_models):
    folder = family_models[family]
    config = description_of(json.loads((folder / "config.json").read_text()), "config.json")
    counted = from_headers(config, family, find_tensors(folder)[0])
    computed = from_config(config, family, "config.json")
    assert counted.num_parameters == computed.num_parameters
    assert (counted.embedding, counted.head) == (computed.embedding, computed.head)
    for one, other in zip(counted.layers, computed.layers, strict=True):
        assert set(one.matrices) == set(other.matrices)
        assert one.other_parameters == other.other_parameters
    assert counted.stored_bytes == CheckpointReader(folder).num_bytes


FEW = ("calibration.samples=2", "calibration.sequence_length=16")


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("rtn-int8", ()),
        ("fp8-dynamic", ()),
        ("w8a8-int8", ("steps=[]", "calibration=null")),
        ("rtn-int4", ("weights.group_size=32", "weights.symmetric=false")),
        ("rtn-int4", ("weights.group_size=32", "weights.dtype=int3")),
        ("rtn-int4", ("weights.group_size=32", "format=gptq")),
        ("rtn-int4", ("weights.group_size=16", "format=awq", "weights.symmetric=false")),
        ("rtn-int8", ("ignore=['*.layers.1.*']",)),
        ("rtn-int4", ("weights.group_size=32", "weights.dtype=int5")),
        ("rtn-int4", ("weights.group_size=32", "weights.dtype=int6", "weights.symmetric=false")),
        ("fp8-static", FEW),
        ("fp8-static", (*FEW, "weights.group_size=channel")),
        ("fp8-block", ("weights.group_size=32x32", "activations.group_size=32")),
        ("nvfp4", ("steps=[]", "calibration=null")),
        ("nvfp4-a4", ("steps=[]", *FEW)),
        ("mxfp4", ("steps=[]", "calibration=null")),
        ("mxfp4", ("steps=[]", "calibration=null", "weights.dtype=mxfp8")),
        ("w4a8-fp8", ("weights.group_size=32", "steps=[]", "calibration=null")),
        ("w4a8-fp8", ("weights.group_size=32", "activations.dtype=int8", "steps=[]", "calibration=null")),
        ("w8a8-int8", ("steps=[]", "activations.dynamic=false", *FEW)),
    ],
    ids=str,
)
def test_predicted_bytes_are_those_of_the_checkpoint(recipe, changes, tiny_llama, tmp_path):
    pipeline.quantize(str(tiny_llama), load(recipe, changes), tmp_path / "out", device="cpu")
    written = CheckpointReader(tmp_path / "out").num_bytes
    plan = estimate(tiny_llama, recipe=recipe, overrides=changes)
    assert plan.weights[-1].size.disk_bytes == written
    assert plan.weights[0].size.disk_bytes == CheckpointReader(tiny_llama).num_bytes
    again = estimate(tmp_path / "out")
    assert [row.size.memory_bytes for row in again.weights] == [written]
    assert again.shape.num_parameters == plan.shape.num_parameters


@pytest.mark.parametrize("recipe", ["rtn-int8", "fp8-dynamic"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "olmoe", "deepseek_v3", "gpt_oss"])
def test_predicted_bytes_of_compressed_experts(family, recipe, tmp_path):
    folder = make_model(tmp_path / "model", family)
    pipeline.quantize(str(folder), load(recipe), tmp_path / "out", device="cpu")
    written = CheckpointReader(tmp_path / "out").num_bytes
    assert estimate(folder, recipe=recipe).weights[-1].size.disk_bytes == written
    assert [row.size.memory_bytes for row in estimate(tmp_path / "out").weights] == [written]


@pytest.mark.parametrize("recipe", ["rtn-int8", "gptq-int8", "gptq-int4", "autoround-int4"])
def test_compression_memory_is_what_the_pipeline_says(recipe, tiny_llama, tmp_path):
    chosen = load(recipe, ["weights.group_size=channel"])
    theirs = build_plan(str(tiny_llama), chosen, tmp_path / "x", "cpu")
    shape = from_model(tiny_llama)
    ours = plan_recipe(shape, chosen)
    held = compression_bytes(shape, 640, ours.steps)
    assert held == {**predicted_bytes(theirs, 640), "libraries": held["libraries"]}  # the pipeline adds what it holds
    # Beside the states the targets; those of the original model are on disk, its layer is not.
    assert held["hidden_states"] == (2 if recipe == "autoround-int4" else 1) * 640 * 64 * 4
    models = 2 if recipe == "gptq-int4" else 1
    assert held["layer"] == models * compression_bytes(shape, 640, ())["layer"]
    # Outputs of layers that hand on more are no states of the next one.
    models = 1 if recipe in ("rtn-int8", "gptq-int8") else 2
    held = compression_bytes(shape, 640, ours.steps, hands_on=True)
    assert held["layer"] == models * compression_bytes(shape, 640, ())["layer"]
    assert (held["statistics"] > 0) == (recipe != "rtn-int8")


def test_a_batch_reads_more_experts():
    matrix = Matrix(name="x", out_features=2, in_features=2, copies=128, active=8)
    assert experts_read(matrix, 1) == pytest.approx(8)
    assert 8 < experts_read(matrix, 4) < 32
    assert experts_read(matrix, 1000) == pytest.approx(128)
    moe = shape_of("qwen3-30b-a3b")
    one, many = (planned_weight_bytes(moe, everywhere(None), batch).read_bytes_per_token for batch in (1, 512))
    # One token reads all that it uses but the embedding; a large batch reads every expert.
    assert one == pytest.approx(2 * (moe.active_parameters - moe.embedding))
    assert many == pytest.approx(2 * (moe.num_parameters - moe.embedding))


def test_a_missing_shard_falls_back_to_the_config(tiny_llama, tmp_path):
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    assert from_model(tmp_path).counted_from == "config.json"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    assert from_model(tmp_path).counted_from == "config.json"
    assert from_model(tiny_llama).counted_from == "shard headers"
    assert from_model(tmp_path / "config.json").num_parameters == from_model(tiny_llama).num_parameters


@pytest.mark.parametrize(
    "data", [b"", b"\x08\0\0\0\0\0\0\0{}", b"\x02\0\0\0\0\0\0\0[]", (9 << 40).to_bytes(8, "little")], ids=repr
)
def test_a_damaged_shard_is_named(data, tiny_llama, tmp_path):
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*download"):
        from_model(tmp_path)


def test_a_tensor_of_the_wrong_length_is_named(tiny_llama, tmp_path):
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    header = json.dumps({"a": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 6]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=r"tensor 'a' .* 6 bytes .* shape \[4\] and dtype BF16 need 8"):
        from_model(tmp_path)


def test_shards_of_another_model_are_refused(tiny_llama, tmp_path):
    config = {**json.loads((tiny_llama / "config.json").read_text()), "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((tiny_llama / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="names 3 layers, but the shards hold 2"):
        from_model(tmp_path)


BAD = [
    ({"hidden_size": None}, "'hidden_size' is missing"),
    ({"hidden_size": "64"}, "hidden_size is '64', not a whole number"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({"num_attention_heads": 7, "head_dim": None}, "hidden_size 64 is not a multiple of num_attention_heads 7"),
    ({"layer_types": ["full_attention"]}, "layer_types has 1 entries; expected one"),
    ({"layer_types": ["linear_attention"] * 4}, "does not support layer type 'linear_attention'"),
    ({"layer_types": ["sliding_attention"] * 4}, "'sliding_window' is missing"),
    ({"model_type": "mamba2"}, "mamba2 keep a state"),
    ({"dtype": "int9"}, "dtype 'int9' is not supported by plan"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_config_says_what_is_wrong(changes, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SIZES, "model_type": "llama", **changes}))
    with pytest.raises(ModelError, match=message) as caught:
        from_model(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


V4_BAD = [
    ({"layer_types": [{}] * 4}, "layer 0 has type {}"),
    ({"compress_ratios": [{}] * 4, "layer_types": None}, "layer 0 has type {}"),
    ({"compress_rates": {"heavily_compressed_attention": float("inf")}}, "heavily_compressed_attention is inf"),
    ({"partial_rotary_factor": 1e308, "sliding_window": 0}, "sliding_window is 0"),
]


@pytest.mark.parametrize(("changes", "message"), V4_BAD)
def test_what_only_compressed_attention_says_is_checked(changes, message):
    config = {**SIZES, **V4, "head_dim": 32, "model_type": "deepseek_v4", "num_hidden_layers": 4, **changes}
    with pytest.raises(ModelError, match=message):
        description_of(config, "config.json").attention(0)


def test_an_unknown_family_is_counted_as_llama_and_says_so():
    shape = from_config(description_of({**SIZES, "model_type": "novel"}, "x"), "x", "config.json")
    assert (
        shape.num_parameters
        == from_config(description_of({**SIZES, "model_type": "llama"}, "x"), "x", "").num_parameters
    )
    assert "'novel' is unknown" in shape.remarks[0]


def test_layers_for_multi_token_prediction_are_said_to_be_left_out():
    shape = from_config(
        description_of({**SIZES, "model_type": "llama", "num_nextn_predict_layers": 1}, "x"), "x", "config.json"
    )
    assert shape.remarks == ("the layers that predict several tokens at once (MTP) are not counted",)


WINDOWED = {
    "mistral": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 5},
    "qwen3": {"use_sliding_window": False, "head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "phi3": {},
    "cohere2": {},
    "starcoder2": {},
}


@pytest.mark.parametrize("family", WINDOWED)
def test_windows_are_those_of_transformers(family):
    from transformers import AutoConfig

    sizes = {**SIZES, "num_hidden_layers": 8, "sliding_window": 16, **WINDOWED[family]}
    full = AutoConfig.for_model(family, **sizes).to_dict()
    types = full.get("layer_types") or ["sliding_attention"] * 8
    for config in (full, {**sizes, "model_type": family}):  # as new versions write it, and as old ones did
        windows = description_of(config, "x").windows
        assert windows == tuple(16 if kind == "sliding_attention" else None for kind in types)
    assert (None in windows) == (family not in ("mistral", "phi3", "starcoder2"))


def stored(*shape, dtype="BF16"):
    return TensorInfo(kind=dtype, shape=shape, file=Path("x"), offset=0, num_bytes=2 * math.prod(shape))


def test_towers_beside_the_language_model_are_not_counted():
    config = {"text_config": {**SIZES, "num_hidden_layers": 1, "model_type": "gemma3_text", "sliding_window": 8}}
    language = {
        "model.language_model.embed_tokens.weight": stored(260, 64),
        "model.language_model.layers.0.self_attn.q_proj.weight": stored(64, 64),
        "model.language_model.layers.0.input_layernorm.weight": stored(64),
        "model.language_model.norm.weight": stored(64),
        "lm_head.weight": stored(260, 64),
    }
    tower = {
        "model.vision_tower.encoder.layers.0.fc1.weight": stored(16, 16),
        "model.vision_tower.embeddings.position_embedding.weight": stored(100, 64),
        "model.multi_modal_projector.weight": stored(64, 32),
    }
    shape = from_headers(description_of(config, "x"), "x", {**language, **tower})
    assert shape.prefix == "model.language_model.layers"
    assert shape.num_parameters == sum(math.prod(tensor.shape) for tensor in language.values())
    assert (shape.embedding, shape.head, shape.other) == (260 * 64, 260 * 64, 64)
    assert shape.remarks == ("only the language model is counted, without vision and audio towers",)


def test_experts_and_layers_beyond_the_config_are_told_apart():
    config = {**SIZES, "num_hidden_layers": 1, **EXPERTS, "model_type": "qwen3_moe", "head_dim": 16}
    tensors = {"model.embed_tokens.weight": stored(260, 64), "model.layers.0.mlp.gate.weight": stored(4, 64)}
    tensors |= {f"model.layers.0.mlp.experts.{i}.up_proj.weight": stored(32, 64) for i in range(4)}
    tensors |= {"model.layers.0.mlp.experts.down_proj": stored(4, 64, 32), "model.layers.1.norm.weight": stored(64)}
    shape = from_headers(description_of({**config, "tie_word_embeddings": True}, "x"), "x", tensors)
    matrices = {m.name: (m.copies, m.active, m.quantizable) for m in shape.layers[0].matrices}
    assert matrices == {
        "mlp.gate": (1, 1, False),
        "mlp.experts.{expert}.up_proj": (4, 2, True),
        "mlp.experts.{expert}.down_proj": (4, 2, True),
    }
    assert shape.num_parameters - shape.active_parameters == 2 * 2 * 32 * 64
    assert shape.remarks == ("1 further layers in the shards (multi-token prediction) are not counted",)
    del tensors["model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match="hidden size 64, but the shards have no token embedding"):
        from_headers(description_of(config, "x"), "x", tensors)


@pytest.mark.parametrize("kind", HEADS)
def test_heads_are_counted_in_files(kind, tmp_path):
    folder = make_mtp_model(tmp_path / "model", kind)
    drafts = {n: t for n, t in load_tensors(folder).items() if n.startswith(("mtp.", "model.layers.2."))}
    plan, without = estimate(folder), estimate(make_model(tmp_path / "without", kind, dtype=torch.bfloat16))
    assert len(plan.shape.mtp) == 1
    assert plan.shape.mtp_parameters == sum(tensor.numel() for tensor in drafts.values())
    assert not plan.remarks
    computed = from_config(description_of(json.loads((folder / "config.json").read_text()), "x"), "x", "config.json")
    assert computed.mtp_parameters == plan.shape.mtp_parameters
    if kind != "deepseek_v3":  # its other sizes differ
        assert plan.shape.num_parameters == without.shape.num_parameters
        assert plan.weights[0].size.memory_bytes == without.weights[0].size.memory_bytes
    assert plan.weights[0].size.disk_bytes == CheckpointReader(folder).num_bytes
    for mtp in ("keep", "int8"):
        changes = {"weights.group_size": 32, "mtp": mtp}
        pipeline.quantize(str(folder), load("rtn-int4", changes), tmp_path / mtp, device="cpu")
        row = estimate(folder, recipe="rtn-int4", overrides=changes).weights[-1]
        assert row.size.disk_bytes == CheckpointReader(tmp_path / mtp).num_bytes
        written = {n: t for n, t in load_tensors(tmp_path / mtp).items() if n.startswith(("mtp.", "model.layers.2."))}
        assert mtp_bytes(plan.shape, row.scheme) == sum(tensor.nbytes for tensor in written.values())
        assert estimate(tmp_path / mtp).shape.mtp_stored_bytes == mtp_bytes(plan.shape, row.scheme)
