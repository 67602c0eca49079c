"""Conversion between formats: every code the same, refusals that name what works, no half output."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from quantkit.api import quantize
from quantkit.checkpoints.dense_source import open_dense
from quantkit.compress.convert import convert
from quantkit.compress.convert.source import open_source
from quantkit.errors import CheckpointError, OutputError, SchemeError
from quantkit.evaluate.verify.pair_checks import check_pair
from quantkit.inspection import compare, inspect
from tests.helpers import edit_config, load_tensors, make_model, transformers_logits

OVERRIDES = {"weights.group_size": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "m", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    """Checkpoints of one model: symmetric, asymmetric, in activation order, int8."""
    folder = tmp_path_factory.mktemp("made")
    asymmetric = {**OVERRIDES, "weights.symmetric": False}
    quantize(model, "rtn-int4", folder / "sym", overrides={**OVERRIDES, "format": "gptq"})
    quantize(model, "rtn-int4", folder / "asym", overrides={**asymmetric, "format": "gptq-v2"})
    quantize(model, "rtn-int8", folder / "int8")
    quantize(model, "w8a8-int8", folder / "w8a8", overrides={"steps": [], "calibration": None})
    return folder


def weights(path):
    source = open_source(path)
    return {name: source.weight(name) for name in source.linears}


def assert_same_values(left, right):
    first, second = weights(left), weights(right)
    assert first.keys() == second.keys()
    for name, weight in first.items():
        other = second[name]
        assert torch.equal(weight.codes, other.codes)
        assert torch.equal(weight.scale.double(), other.scale.double())
        for item in (weight.zero_point, other.zero_point):
            known = torch.zeros_like(weight.scale, dtype=torch.int8) if weight.zero_point is None else weight.zero_point
            assert item is None or torch.equal(item, known)


@pytest.mark.parametrize("to", ["awq", "gguf"])
def test_a_source_that_changes_between_two_layers_is_refused(made, tmp_path, to):
    source, output = tmp_path / "source", tmp_path / "out"
    shutil.copytree(made / "asym", source)

    def touch(done, _total, _name):
        if done == 1:
            shard = source / "model-00001-of-00003.safetensors"
            shard.write_bytes(shard.read_bytes()[:-1] + b"\x40")

    with pytest.raises(CheckpointError, match=r"model-00001-of-00003\.safetensors changed while it was read"):
        convert(source, to, output, progress=touch)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


CHAINS = [
    ("sym", ["compressed-tensors", "gptq-v2", "gptq"]),
    ("sym", ["awq", "gptq-v2", "compressed-tensors", "awq"]),
    ("asym", ["awq", "compressed-tensors", "gptq-v2"]),
    ("int8", ["gptq", "compressed-tensors", "gptq-v2"]),
]


@pytest.mark.parametrize(
    ("start", "chain"), CHAINS, ids=lambda value: "-".join(value) if type(value) is list else value
)
def test_codes_survive_a_chain_of_formats(made, tmp_path, start, chain):
    path = made / start
    for number, name in enumerate(chain):
        result = convert(path, name, tmp_path / str(number))
        path = tmp_path / str(number)
        assert result.num_linears == 14
        assert inspect(path).format == name
        assert_same_values(made / start, path)
    others = {name for name in load_tensors(made / start) if "proj" not in name}
    left, right = load_tensors(made / start), load_tensors(path)
    assert others == {name for name in right if "proj" not in name}
    assert all(torch.equal(left[name], right[name]) for name in others)


def test_the_first_and_the_last_of_a_circle_are_the_same_bytes(made, tmp_path):
    convert(made / "sym", "compressed-tensors", tmp_path / "ct")
    convert(tmp_path / "ct", "gptq", tmp_path / "back")
    left, right = load_tensors(made / "sym"), load_tensors(tmp_path / "back")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    sides = [json.loads((path / "config.json").read_text()) for path in (made / "sym", tmp_path / "back")]
    assert sides[0] == sides[1]
    assert (tmp_path / "back" / "tokenizer.json").is_file()


def test_dense_has_the_values(made, model, tmp_path):
    convert(made / "sym", "dense", tmp_path / "dense")
    convert(made / "sym", "compressed-tensors", tmp_path / "ct")
    ids = torch.arange(40).view(1, -1)
    left, right = (transformers_logits(tmp_path / name, ids) for name in ("dense", "ct"))
    # The dense one is rounded to the model's bfloat16.
    assert (left - right).abs().max() < 0.05 * left.std()


REFUSED = [
    ("asym", "gptq", "zero point of 0 does not fit.*formats that can store it: awq, compressed-tensors, gguf"),
    ("int8", "awq", "awq stores int4.*formats that can store it: gguf, gptq, gptq-v2"),
    ("w8a8", "gptq", "does not support int8 per token activations.*no other format can store the codes"),
    ("sym", "flac", "unknown format 'flac'"),
]


@pytest.mark.parametrize(("start", "to", "message"), REFUSED)
def test_what_would_lose_something_is_refused_with_what_works(made, tmp_path, start, to, message):
    with pytest.raises(Exception, match=message) as caught:
        convert(made / start, to, tmp_path / "out")
    assert caught.value.exit_code == 4
    assert list(tmp_path.iterdir()) == []


def test_activation_order_stays_where_it_can_be_said(made, tmp_path):
    import shutil

    shutil.copytree(made / "sym", tmp_path / "in")
    source = open_source(tmp_path / "in")
    shard = next(tmp_path.glob("in/model-00001*"))
    name = next(iter(source.linears))
    index = source.reader.tensor(f"{name}.g_idx").flip(0)
    from safetensors.torch import load_file, save_file

    save_file({**load_file(shard), f"{name}.g_idx": index.contiguous()}, shard, {"format": "pt"})
    with pytest.raises(SchemeError, match=r"activation order.*formats that can store it: gptq-v2"):
        convert(tmp_path / "in", "compressed-tensors", tmp_path / "out")
    with pytest.raises(SchemeError, match="activation order"):
        convert(tmp_path / "in", "gguf", tmp_path / "out.gguf")
    convert(tmp_path / "in", "gptq-v2", tmp_path / "v2")
    assert json.loads((tmp_path / "v2" / "config.json").read_text())["quantization_config"]["desc_act"] is True
    assert torch.equal(weights(tmp_path / "v2")[name].group_index, index.long())


def test_single_precision_scales_are_refused_before_anything_is_written(tmp_path):
    model = make_model(tmp_path / "m")
    quantize(model, "rtn-int4", tmp_path / "ct", overrides=OVERRIDES)
    with pytest.raises(SchemeError, match=r"scales are float32 and would be rounded.*--format"):
        convert(tmp_path / "ct", "gptq", tmp_path / "out")
    quantize(model, "rtn-int4", tmp_path / "direct", overrides={**OVERRIDES, "format": "gptq"})
    assert {w.scale.dtype for w in weights(tmp_path / "direct").values()} == {torch.float16}


def test_an_ordinary_model_has_no_codes(model, tmp_path):
    with pytest.raises(SchemeError, match="not quantized"):
        convert(model, "gptq", tmp_path / "out")


def test_outputs_are_not_replaced_unasked(made, tmp_path):
    convert(made / "sym", "awq", tmp_path / "out")
    with pytest.raises(OutputError, match="--overwrite"):
        convert(made / "sym", "awq", tmp_path / "out")
    convert(made / "sym", "gptq-v2", tmp_path / "out", overwrite=True)
    assert inspect(tmp_path / "out").format == "gptq-v2"
    with pytest.raises(OutputError, match="overlap"):
        convert(made / "sym", "awq", made / "sym" / "inside")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(OutputError, match=r"has no quantkit\.json that quantkit wrote"):
        convert(made / "sym", "awq", tmp_path / "mine", overwrite=True)


def test_a_failure_in_the_middle_leaves_nothing(made, tmp_path, monkeypatch):
    from quantkit.compress import checkpoint_writer

    def fail(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_writer, "write_index", fail)
    with pytest.raises(Exception, match="no space left"):
        convert(made / "sym", "awq", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_output_is_noticed(made, tmp_path, monkeypatch):
    from quantkit.compress import checkpoint_writer
    from quantkit.errors import AuditError

    write = checkpoint_writer.write_shard

    def corrupt(path, tensors):
        name = next(name for name in tensors if name.endswith("qweight"))
        return write(path, {**tensors, name: tensors[name] ^ 1})

    monkeypatch.setattr(checkpoint_writer, "write_shard", corrupt)
    with pytest.raises(AuditError, match="reads back differently"):
        convert(made / "sym", "awq", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_fused_linears_need_one_scheme(tmp_path):
    model = make_model(tmp_path / "m", dtype=torch.bfloat16)
    quantize(model, "rtn-int4", tmp_path / "q", overrides={**OVERRIDES, "format": "gptq"})
    section = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    dynamic = {"+:.*0.self_attn.q_proj": {"group_size": 64}}
    edit_config(tmp_path / "q", quantization_config={**section, "dynamic": dynamic})
    with pytest.raises(SchemeError, match="fused by inference engines"):
        convert(tmp_path / "q", "gptq-v2", tmp_path / "out")


def test_differences_between_two_checkpoints(made, model, tmp_path):
    convert(made / "sym", "compressed-tensors", tmp_path / "ct")
    comparison = compare(made / "sym", tmp_path / "ct")
    assert ("format", "gptq", "compressed-tensors") in comparison.facts
    same = compare(model, model)
    assert not (same.facts or same.modules or same.entries)
    edit_config(tmp_path / "ct", rms_norm_eps=0.5)
    convert(made / "sym", "compressed-tensors", tmp_path / "other")
    assert ("rms_norm_eps", "0.5", "1e-06") in compare(tmp_path / "ct", tmp_path / "other").entries


def test_scales_of_the_cache_are_passed_through_or_refused(made, tmp_path):
    convert(made / "sym", "compressed-tensors", tmp_path / "ct")
    section = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    edit_config(tmp_path / "ct", quantization_config={**section, "kv_cache_scheme": scheme})
    convert(tmp_path / "ct", "compressed-tensors", tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert written["kv_cache_scheme"] == scheme
    with pytest.raises(SchemeError, match="calibrated KV-cache scales"):
        convert(tmp_path / "ct", "gptq", tmp_path / "out")


def test_the_output_names_its_original_and_its_files(made, model, tmp_path):
    convert(made / "sym", "compressed-tensors", tmp_path / "out")
    pair = check_pair(tmp_path / "out", None)
    assert pair.baseline == model and not pair.notes
    shard = next((tmp_path / "out").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="has changed since the checkpoint was made"):
        check_pair(tmp_path / "out", None)


def test_values_of_a_mix_of_types_can_be_written(model, tmp_path):
    recipe = {"name": "mix", "weights": {"dtype": "q4_1"}, "format": "gguf"}
    mixed = {**recipe, "overrides": [{"modules": ["*.v_proj"], "weights": {"dtype": "int8", "group_size": 32}}]}
    (tmp_path / "mix.yaml").write_text(json.dumps(mixed))
    quantize(model, tmp_path / "mix.yaml", tmp_path / "mix.gguf")
    convert(tmp_path / "mix.gguf", "dense", tmp_path / "dense")
    values, name = open_dense(tmp_path / "mix.gguf"), "model.layers.0.self_attn.v_proj.weight"
    assert torch.equal(load_tensors(tmp_path / "dense")[name], values.tensor(name))
