"""Adapters: what is read equals what PEFT computes, and what cannot be read exactly is refused in one line."""

from __future__ import annotations

import json
import math

import pytest
import torch

from quantkit.checkpoints.adapter import adapter_digest, merged, read_adapter
from quantkit.checkpoints.dense_source import open_dense
from quantkit.checkpoints.model_reader import ModelReader
from quantkit.demo import DEMO_MODEL
from quantkit.errors import CheckpointError, ModelError
from quantkit.numerics import name_patterns
from tests.checkpoints.adapters import LINEARS, make_adapter, open_model, random_tensors, write_adapter

Q = "model.layers.0.self_attn.q_proj"
A, B = f"base_model.model.{Q}.lora_A.weight", f"base_model.model.{Q}.lora_B.weight"


@pytest.fixture(scope="module")
def reader():
    return open_model(DEMO_MODEL)


@pytest.fixture(scope="module")
def tensors(reader):
    return random_tensors(reader)


def refused(folder, reader, kind, *parts):
    with pytest.raises(kind) as error:
        read_adapter(folder, reader)
    message = str(error.value)
    assert type(error.value) is kind
    assert "\n" not in message
    for part in (str(folder), *parts):
        assert part in message, message


def test_an_adapter_is_read_as_stored(tmp_path, reader, tensors):
    adapter = read_adapter(write_adapter(tmp_path, tensors, base_model_name_or_path="org/base"), reader)
    layers = reader.config["num_hidden_layers"]
    assert set(adapter.updates) == {f"model.layers.{i}.{name}" for i in range(layers) for name in LINEARS}
    update = adapter.updates[Q]
    assert torch.equal(update.a, tensors[A])
    assert torch.equal(update.b, tensors[B])
    assert (update.scale, adapter.base, adapter.rank, adapter.path) == (4.0, "org/base", 4, tmp_path)


def test_the_digest_covers_config_and_weights(tmp_path, reader, tensors):
    first = read_adapter(write_adapter(tmp_path / "a", tensors), reader).digest
    assert read_adapter(write_adapter(tmp_path / "b", tensors), reader).digest == first
    assert read_adapter(write_adapter(tmp_path / "c", tensors, lora_alpha=8), reader).digest != first
    assert read_adapter(write_adapter(tmp_path / "d", {**tensors, A: tensors[A] * 2}), reader).digest != first


def test_patterns_are_matched_as_in_peft(tmp_path, reader, tensors):
    # The first pattern that matches the end of a name counts, and names begin at a dot.
    ranks = {r"layers\.0\.self_attn\.q_proj": 2, "q_proj": 4, "proj": 9}
    for name in (A, B):
        tensors = {**tensors, name: tensors[name][:2] if name == A else tensors[name][:, :2].contiguous()}
    folder = write_adapter(tmp_path, tensors, rank_pattern=ranks, alpha_pattern={"^model.layers.1.*": 5})
    updates = read_adapter(folder, reader).updates
    assert updates[Q].scale == 16 / 2
    assert updates[Q.replace("0", "1")].scale == 5 / 4
    assert updates[Q.replace("0", "2")].scale == 16 / 4


def test_rslora_divides_by_the_root_of_the_rank(tmp_path, reader, tensors):
    adapter = read_adapter(write_adapter(tmp_path, tensors, use_rslora=True, lora_alpha=3), reader)
    assert adapter.updates[Q].scale == 3 / math.sqrt(4)


def test_empty_entries_of_unknown_features_are_ignored(tmp_path, reader, tensors):
    entries = {"use_dora": False, "modules_to_save": None, "loftq_config": {}, "future_config": [], "peft_version": "9"}
    assert read_adapter(write_adapter(tmp_path, tensors, **entries), reader).updates


def test_an_adapter_of_the_model_without_its_head_fits(tmp_path, reader, tensors):
    shorter = {name.replace("model.layers", "layers"): value for name, value in tensors.items()}
    assert Q in read_adapter(write_adapter(tmp_path, shorter), reader).updates


@pytest.mark.parametrize(
    ("entries", "parts"),
    [
        ({"peft_type": "IA3"}, ["peft_type is 'IA3'"]),
        ({"peft_type": None}, ["peft_type is None"]),
        ({"use_dora": True}, ["'use_dora' is True"]),
        ({"bias": "all"}, ["bias is 'all'"]),
        ({"modules_to_save": ["lm_head"]}, ["'modules_to_save' is ['lm_head']"]),
        ({"trainable_token_indices": [1]}, ["trainable_token_indices"]),
        ({"layer_replication": [[0, 2]]}, ["layer_replication"]),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, ["target_parameters"]),
        ({"lora_bias": True}, ["lora_bias"]),
        ({"fan_in_fan_out": True}, ["fan_in_fan_out"]),
        ({"alora_invocation_tokens": [5]}, ["alora_invocation_tokens"]),
        ({"loftq_config": {"loftq_bits": 4}}, ["loftq_config"]),
        ({"kasa_config": {"beta": 1}}, ["kasa_config"]),
        ({"invented_next_year": True}, ["'invented_next_year' is True"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights is 'pissa'", "path_initial_model"]),
        ({"init_lora_weights": "olora"}, ["init_lora_weights is 'olora'"]),
        ({"init_lora_weights": "corda"}, ["init_lora_weights is 'corda'"]),
        ({"init_lora_weights": ["x"]}, ["init_lora_weights is ['x']"]),
        ({"r": 0}, ["rank", "is 0"]),
        ({"r": "4"}, ["r' is '4', not a number"]),
        ({"r": True}, ["is True, not a number"]),
        ({"lora_alpha": None}, ["lora_alpha' is None"]),
        ({"rank_pattern": [1]}, ["rank_pattern is [1]"]),
        ({"rank_pattern": {"(": 4}}, ["rank_pattern", "not a valid regular expression"]),
        ({"rank_pattern": {"q_proj": 8}}, ["lora_A (4, 256)", "rank 8", "correct r or rank_pattern"]),
        ({"r": 8}, ["expected (8, 512) and (256, 8)", "correct r or rank_pattern"]),
    ],
    ids=str,
)
def test_other_computations_are_refused(tmp_path, reader, tensors, entries, parts):
    refused(write_adapter(tmp_path, tensors, **entries), reader, ModelError, *parts)


def test_a_pattern_that_never_ends_is_refused(tmp_path, reader, tensors, monkeypatch):
    monkeypatch.setattr(name_patterns, "_MATCH_S", 0.05)
    folder = write_adapter(tmp_path, tensors, rank_pattern={r"(a|b|.)*(a|b|.)*(.|..)*\d{9}": 4})
    refused(folder, reader, ModelError, "rank_pattern", "takes too long")


@pytest.mark.parametrize(
    ("name", "kind", "parts"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", ModelError, ["adapters of the embedding"]),
        (f"base_model.model.{Q}.lora_magnitude_vector", ModelError, ["lora_magnitude_vector"]),
        (f"base_model.model.{Q}.lora_B.bias", ModelError, ["lora_B.bias"]),
        (f"{Q}.lora_A.weight", ModelError, ["only linears"]),
        ("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", CheckpointError, ["layers.9", "missing"]),
    ],
)
def test_other_tensors_are_refused(tmp_path, reader, tensors, name, kind, parts):
    refused(write_adapter(tmp_path, {**tensors, name: torch.ones(4, 4)}), reader, kind, *parts)


@pytest.mark.parametrize(("module", "part"), [("lm_head", "output head"), ("model.embed_tokens", "embedding")])
@pytest.mark.parametrize("kinds", [["lora_A.weight", "lora_B.weight"], ["base_layer.weight"], ["weight"]], ids=str)
def test_head_and_embedding_are_refused(tmp_path, reader, tensors, module, part, kinds):
    more = {f"base_model.model.{module}.{kind}": torch.ones(4, 4) for kind in kinds}
    refused(
        write_adapter(tmp_path, {**tensors, **more}), reader, ModelError, f"adapters of the {part} are not supported"
    )


def of_layers(tensors, layers):
    return {name: value for name, value in tensors.items() if name.partition("layers.")[2][0] in layers}


def test_an_adapter_of_the_first_layers_only_is_doubted(tmp_path, reader, tensors):
    assert reader.config["num_hidden_layers"] == 4
    adapter = read_adapter(write_adapter(tmp_path / "sql", of_layers(tensors, "01")), reader)
    assert adapter.warnings == ("adapter sql covers layers 0 to 1 of 4; it may have been trained for a different base",)
    first = read_adapter(write_adapter(tmp_path / "sql", of_layers(tensors, "0")), reader)
    assert first.warnings == ("adapter sql covers layer 0 of 4; it may have been trained for a different base",)
    for layers, config in (("0123", {}), ("23", {}), ("02", {}), ("01", {"layers_to_transform": [0, 1]})):
        folder = write_adapter(tmp_path / "other", of_layers(tensors, layers), **config)
        assert read_adapter(folder, reader).warnings == (), layers


def test_linears_that_only_the_first_layers_have_are_no_reason_for_doubt(tmp_path):
    from tests.runtime.helpers import make_loud_model

    base = make_loud_model(tmp_path / "base", "deepseek_v3")  # a dense layer, then layers of experts
    dense = read_adapter(make_adapter(tmp_path / "dense", base, ("layers.0.mlp.down_proj",)), open_model(base))
    assert dense.updates
    assert dense.warnings == ()


def test_a_norm_is_refused(tmp_path, reader):
    tensors = {f"base_model.model.model.norm.lora_{x}.weight": torch.ones(4, 4) for x in "AB"}
    refused(write_adapter(tmp_path, tensors), reader, ModelError, "model.norm", "shape (256,)")


def test_another_base_is_refused_with_names_and_their_number(tmp_path, reader, tensors):
    tensors = {name.replace("layers.", "blocks."): value for name, value in tensors.items()}
    refused(write_adapter(tmp_path, tensors), reader, ModelError, "and 9 more", "12 of the adapter's 12 linears")


def test_a_base_of_another_size_is_refused(tmp_path, reader, tiny_llama):
    other = make_adapter(tmp_path / "adapter", tiny_llama)
    refused(other, reader, ModelError, "lora_A (4, 96)", "expected (4, 512)")


def test_one_linear_under_two_names_is_refused(tmp_path, reader, tensors):
    shorter = {name.replace("model.layers", "layers"): value.clone() for name, value in tensors.items()}
    refused(write_adapter(tmp_path, {**tensors, **shorter}), reader, ModelError, "two names")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(tmp_path, reader, tensors, value):
    bad = tensors[B].clone()
    bad[1, 2] = value
    refused(write_adapter(tmp_path, {**tensors, B: bad}), reader, CheckpointError, B, "NaN or infinite")


def test_codes_are_refused(tmp_path, reader, tensors):
    whole = {**tensors, A: tensors[A].to(torch.int8)}
    refused(write_adapter(tmp_path, whole), reader, CheckpointError, A, "dtype I8")


def test_an_empty_file_is_refused(tmp_path, reader):
    refused(write_adapter(tmp_path, {}), reader, ModelError, "no tensors")


def test_missing_files_are_refused(tmp_path, reader, tensors):
    refused(tmp_path / "none", reader, ModelError, "no such adapter")
    folder = write_adapter(tmp_path / "a", tensors)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    refused(folder, reader, ModelError, "adapter_model.bin", "pickle")
    (folder / "adapter_model.bin").unlink()
    refused(folder, reader, ModelError, "no adapter_model.safetensors", "download")
    (folder / "adapter_config.json").unlink()
    refused(folder, reader, ModelError, "no adapter_config.json")


def test_damaged_files_are_refused(tmp_path, reader, tensors):
    folder = write_adapter(tmp_path / "a", tensors)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    refused(folder, reader, CheckpointError, "truncated")
    (folder / "adapter_config.json").write_text("[1]")
    refused(folder, reader, ModelError, "not an object")


def test_links_that_lead_outside_are_refused(tmp_path, reader, tensors):
    folder = write_adapter(tmp_path / "a", tensors)
    (folder / "adapter_config.json").rename(tmp_path / "elsewhere.json")
    (folder / "adapter_config.json").symlink_to(tmp_path / "elsewhere.json")
    refused(folder, reader, ModelError, "is a link to")


def test_merging_changes_only_the_adapted_weights_and_rounds_once(tmp_path, reader, tensors):
    adapter = read_adapter(write_adapter(tmp_path, tensors), reader)
    view = ModelReader.of(merged(open_dense(DEMO_MODEL), adapter, reader.family), reader.family)
    assert view.names == reader.names
    assert "merged into 12 weights" in view.notes[-1]
    for name in reader.names:
        value, before = view.tensor(name), reader.tensor(name)
        assert (value.dtype, view.info(name).shape) == (before.dtype, before.shape)
        assert b"".join(view.chunks(name)) == value.view(torch.uint8).numpy().tobytes()
        assert torch.equal(view.rows(name, 3, 9), value[3:9])
        module = name.removesuffix(".weight")
        if module not in adapter.updates:
            assert torch.equal(value, before)
            continue
        update = adapter.updates[module]
        exact = before.double() + update.scale * update.b.double() @ update.a.double()
        assert not torch.equal(value, before)
        # Half a unit in the last place of bfloat16, and what float32 adds to a sum that lies between two values.
        assert ((value.double() - exact).abs() <= exact.abs() * 2**-8 * 1.001 + 1e-9).all()


def test_merged_weights_equal_those_of_peft(tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    changes = {"target_modules": list(LINEARS), "alpha_pattern": {"down_proj": 3}}
    folder = make_adapter(tmp_path / "adapter", DEMO_MODEL, **changes)
    reader = open_model(DEMO_MODEL)
    adapter = read_adapter(folder, reader)
    base = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, folder).merge_and_unload().state_dict()
    for name, update in adapter.updates.items():
        ours = update.merged(reader.tensor(f"{name}.weight").float())
        assert torch.equal(ours, theirs[f"{name}.weight"]), name


def test_an_adapter_that_peft_has_saved_is_read(tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(base, config).save_pretrained(tmp_path)
    adapter = read_adapter(tmp_path, open_model(DEMO_MODEL))
    assert len(adapter.updates) == 4 * 7
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == adapter.rank == 2


def test_quantized_weights_are_not_merged(tmp_path, models):
    reader = open_model(models / "out")
    adapter = read_adapter(make_adapter(tmp_path / "adapter", models / "llama"), reader)
    with pytest.raises(ModelError, match="never merged into quantized weights; quantize the unquantized base"):
        merged(open_dense(models / "out"), adapter, reader.family)


def test_the_digest_covers_what_an_adapter_computes_and_not_how_it_was_saved(tmp_path):
    folder = make_adapter(tmp_path / "lora", DEMO_MODEL)
    file, digest = folder / "adapter_config.json", adapter_digest(folder)
    config = json.loads(file.read_text())
    file.write_text(json.dumps(dict(reversed(config.items())) | {"peft_version": "9.9"}, indent=7))
    assert adapter_digest(folder) == digest
    file.write_text(json.dumps(config | {"lora_alpha": 3 * config["lora_alpha"]}))
    assert adapter_digest(folder) != digest
