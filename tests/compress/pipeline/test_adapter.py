"""`quantize --adapter`: the result is that of quantizing the merged model, whoever is killed on the way."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import save_file

import quantkit
from quantkit.checkpoints.adapter import adapter_digest, merged, read_adapter
from quantkit.compress.convert import convert
from quantkit.compress.pipeline.plan import build_plan
from quantkit.compress.recipe import load
from quantkit.demo import DEMO_MODEL
from quantkit.errors import CheckpointError, ModelError, ResumeError
from quantkit.formats.ggml.gguf_file import read_gguf
from quantkit.inspection import merged_digests
from tests import forked
from tests.checkpoints.adapters import LINEARS, make_adapter, open_model
from tests.compress.pipeline.killer import AfterFirst
from tests.compress.pipeline.test_resume import hashes, quantize

MADE = ("quantkit.json", "quantkit-run.json")


@pytest.fixture(scope="module")
def adapter(tiny_llama, tmp_path_factory):
    return make_adapter(
        tmp_path_factory.mktemp("adapter") / "lora", tiny_llama, base_model_name_or_path="org/base", rank=4
    )


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in MADE}


@pytest.mark.parametrize("recipe", ["gptq-int4", "rtn-int4"])
def test_the_bytes_are_those_of_the_model_that_peft_has_merged(tmp_path, text_file, recipe):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    folder = make_adapter(tmp_path / "lora", DEMO_MODEL, target_modules=list(LINEARS), alpha_pattern={"o_proj": 24})
    base = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype="auto")
    assert base.dtype == torch.bfloat16
    whole = shutil.copytree(DEMO_MODEL, tmp_path / "merged")
    peft.PeftModel.from_pretrained(base, folder).merge_and_unload().save_pretrained(whole)
    for name in ("config.json", "generation_config.json"):  # transformers writes its version into them
        shutil.copy(DEMO_MODEL / name, whole)
    data = {"calibration.data": str(text_file), "calibration.samples": 4, "calibration.sequence_length": 48}
    options = {"overrides": data if recipe == "gptq-int4" else {}, "device": "cpu"}
    quantkit.quantize(whole, recipe, tmp_path / "theirs", **options)
    quantkit.quantize(DEMO_MODEL, recipe, tmp_path / "ours", adapter=folder, **options)
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
    quantkit.quantize(DEMO_MODEL, recipe, tmp_path / "plain", **options)
    assert files(tmp_path / "ours") != files(tmp_path / "plain")


def test_the_record_names_the_adapter(tiny_llama, adapter, tmp_path):
    overrides = {"weights.group_size": 32}
    result = quantkit.quantize(tiny_llama, "rtn-int4", tmp_path / "out", overrides=overrides, adapter=adapter)
    record = result.adapter
    assert (record.path, record.base, record.rank, record.num_linears) == (str(adapter), "org/base", 4, 6)
    assert not any("adapter" in warning for warning in result.warnings)  # the record says it
    manifest = json.loads((tmp_path / "out" / "quantkit.json").read_text())
    assert manifest["identity"]["adapter"] == manifest["result"]["adapter"]["sha256"] == record.sha256
    assert "path" not in manifest["result"]["adapter"]
    assert json.loads((tmp_path / "out" / "quantkit-run.json").read_text())["adapter"]["path"] == str(adapter)
    assert quantkit.inspect(tmp_path / "out").adapter == dataclasses.replace(record, path="")
    plain = quantkit.quantize(tiny_llama, "rtn-int4", tmp_path / "plain", overrides=overrides)
    assert quantkit.inspect(tmp_path / "plain").adapter is None
    assert plain.adapter is None
    assert "adapter" not in json.loads((tmp_path / "plain" / "quantkit.json").read_text())["identity"]


@pytest.mark.parametrize("recipe", ["rotated", "gguf"])
def test_rotation_and_files_hold_the_merged_model(tiny_llama, adapter, tmp_path, recipe):
    if recipe == "rotated":
        recipe = tmp_path / "rotated.yaml"
        recipe.write_text("weights: {dtype: int8, group_size: 32}\nsteps: [rotate]\n")
        name, overrides = "out", {}
    else:
        recipe, name, overrides = "rtn-int4", "out.gguf", {"format": "gguf", "weights.group_size": 32}
    reader = open_model(tiny_llama)
    view = merged(reader, read_adapter(adapter, reader), reader.family)
    whole = shutil.copytree(tiny_llama, tmp_path / "merged")
    save_file({name: view.tensor(name) for name in view.names}, whole / "model.safetensors", {"format": "pt"})
    written = []
    for folder, model, merging in (("ours", tiny_llama, adapter), ("theirs", whole, None)):
        (tmp_path / folder).mkdir()
        quantkit.quantize(model, recipe, tmp_path / folder / name, overrides=overrides, adapter=merging)
        written.append(tmp_path / folder / name)
    if recipe == "rtn-int4":
        ours, theirs = map(read_gguf, written)
        digest = ours.metadata.pop("quantkit.adapter.sha256")
        assert digest == read_adapter(adapter, reader).digest
        assert {name: info.shape for name, info in ours.tensors.items()} == {
            name: info.shape for name, info in theirs.tensors.items()
        }
        size = sum(info.num_bytes for info in ours.tensors.values())
        assert written[0].read_bytes()[-size:] == written[1].read_bytes()[-size:]
    else:
        assert files(written[0]) == files(written[1])


def test_quantized_and_other_bases_are_refused(models, adapter, tmp_path):
    for model, parts in ((models / "out", "never merged into quantized weights"), (DEMO_MODEL, "does not fit")):
        with pytest.raises(ModelError, match=parts):
            quantkit.quantize(model, "rtn-int8", tmp_path / "out", adapter=adapter)
        assert not (tmp_path / "out").exists()


def test_a_gguf_file_is_refused(models, adapter, tmp_path):
    quantkit.quantize(models / "llama", "rtn-int4", tmp_path / "m.gguf", overrides={"format": "gguf"})
    with pytest.raises(ModelError, match="is a GGUF file"):
        quantkit.quantize(tmp_path / "m.gguf", "rtn-int8", tmp_path / "out", adapter=adapter)


def kill_after_first_layer(model, output, text, adapter):
    quantize(model, output, text, adapter=adapter, listener=AfterFirst(lambda: os.kill(os.getpid(), signal.SIGKILL)))


def test_a_killed_run_goes_on_bit_for_bit_and_only_with_its_adapter(tiny_llama, adapter, tmp_path, text_file):
    whole, out = tmp_path / "whole", tmp_path / "out"
    quantize(tiny_llama, whole, text_file, adapter=adapter)
    assert forked.run(kill_after_first_layer, tiny_llama, out, text_file, adapter) == -signal.SIGKILL
    with pytest.raises(ResumeError, match=r"adapter: '.* -> None"):
        quantize(tiny_llama, out, text_file)
    other = make_adapter(tmp_path / "other", tiny_llama, lora_alpha=1)
    with pytest.raises(ResumeError, match="adapter: "):
        quantize(tiny_llama, out, text_file, adapter=other)
    moved = shutil.copytree(adapter, tmp_path / "moved")
    assert quantize(tiny_llama, out, text_file, adapter=moved).resumed_layers == 1
    assert hashes(out) == hashes(whole)


def test_a_merged_adapter_is_not_applied_again(tiny_llama, adapter, tmp_path):
    overrides = {"weights.group_size": 32}
    quantkit.quantize(tiny_llama, "rtn-int4", tmp_path / "out", overrides=overrides, adapter=adapter)
    with pytest.raises(ModelError, match=r"'lora' was merged into the weights of .* already; leave --adapter out"):
        quantkit.LLM(tmp_path / "out", adapters=[str(adapter)])


@pytest.fixture(scope="module")
def derived(tmp_path_factory):
    """Checkpoints that were made from one into which the adapter was merged."""
    folder, groups = tmp_path_factory.mktemp("derived"), {"weights.group_size": 32}
    adapter = make_adapter(folder / "lora", DEMO_MODEL)
    quantkit.quantize(DEMO_MODEL, "rtn-int4", folder / "out", overrides=groups, adapter=adapter)
    convert(folder / "out", "gptq", folder / "gptq")
    convert(folder / "out", "gguf", folder / "out.gguf")
    convert(folder / "out.gguf", "dense", folder / "dense")
    quantkit.quantize(folder / "out", "rtn-int8", folder / "again", overrides=groups)
    quantkit.quantize(folder / "dense", "rtn-int8", folder / "dense-again", overrides=groups)
    quantkit.quantize(folder / "out", "rtn-int4", folder / "again.gguf", overrides={**groups, "format": "gguf"})
    return folder


@pytest.mark.parametrize("name", ["gptq", "out.gguf", "dense", "again", "dense-again", "again.gguf"])
def test_checkpoints_made_from_a_merged_one_keep_its_record(derived, name):
    digest = adapter_digest(derived / "lora")
    assert merged_digests(derived / name) == (digest,)
    if name.endswith(".gguf"):
        assert read_gguf(derived / name).metadata["quantkit.adapter.sha256"] == digest
    with pytest.raises(ModelError, match="was merged into the weights of"):
        quantkit.LLM(derived / name, adapters=[str(derived / "lora")])


def test_a_checkpoint_made_again_names_the_adapter_but_has_its_own_identity(derived):
    manifest = json.loads((derived / "again" / "quantkit.json").read_text())
    assert "adapter" not in manifest["identity"]
    assert quantkit.inspect(derived / "again").adapter == quantkit.inspect(derived / "out").adapter
    assert "path" not in manifest["result"]["adapter"]


def test_a_damaged_record_of_the_source_is_refused_at_once(derived, tmp_path):
    source = shutil.copytree(derived / "dense", tmp_path / "source")
    (source / "quantkit.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"quantkit\.json"):
        build_plan(str(source), load("rtn-int8"), tmp_path / "out", "cpu")


def test_an_adapter_is_not_merged_twice_and_two_are_both_recorded(derived, tmp_path):
    adapter = derived / "lora"
    with pytest.raises(ModelError, match="adapter 'lora' was merged into the weights of"):
        quantkit.quantize(derived / "dense", "rtn-int8", tmp_path / "twice", adapter=adapter)
    assert not (tmp_path / "twice").exists()
    other = make_adapter(tmp_path / "other", DEMO_MODEL, lora_alpha=1)
    overrides = {"weights.group_size": 32}
    quantkit.quantize(derived / "dense", "rtn-int8", tmp_path / "both", overrides=overrides, adapter=other)
    both = adapter_digest(adapter), adapter_digest(other)
    assert merged_digests(tmp_path / "both") == both
    assert quantkit.inspect(tmp_path / "both").adapter.sha256 == both[1]
    convert(tmp_path / "both", "gguf", tmp_path / "both.gguf")
    assert merged_digests(tmp_path / "both.gguf") == both
    for given in (adapter, other):
        with pytest.raises(ModelError, match="was merged into the weights of"):
            quantkit.LLM(tmp_path / "both.gguf", adapters=[str(given)])
