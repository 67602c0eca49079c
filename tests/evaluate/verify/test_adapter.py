"""Verification of checkpoints with a merged adapter: the baseline is the original with the same adapter."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

import quantkit
from quantkit.checkpoints.adapter import merged, read_adapter
from quantkit.errors import CheckpointError, ModelError, RequestError
from quantkit.evaluate.options import EvaluationOptions
from quantkit.evaluate.verify.options import VerifyOptions
from quantkit.evaluate.verify.pair_checks import check_pair
from quantkit.evaluate.verify.run import verify_pair
from quantkit.runtime.llm import LLM
from tests.checkpoints.adapters import make_adapter, open_model

ENGINE = {"threads": 1, "num_pages": 64, "device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    """`models` with an adapter, the merged model, and the checkpoint that was quantized with the adapter."""
    folder = tmp_path_factory.mktemp("adapted")
    adapter, base = make_adapter(folder / "lora", models / "llama", lora_alpha=64), models / "llama"
    reader = open_model(base)
    view = merged(reader, read_adapter(adapter, reader), reader.family)
    shutil.copytree(base, folder / "merged")
    save_file({name: view.tensor(name) for name in view.names}, folder / "merged/model.safetensors", {"format": "pt"})
    overrides = {"weights.group_size": 32}
    quantkit.quantize(base, "rtn-int8", folder / "out", overrides=overrides, device="cpu", adapter=adapter)
    return folder


def verified(models, pair, **engine):
    evaluation = EvaluationOptions(texts=(str(models / "text.txt"),), window=64)
    options = VerifyOptions(evaluation=evaluation, bench=None, noise=False, engine={**ENGINE, **engine})
    return verify_pair(pair, options)


def test_the_adapter_is_merged_into_the_original(models, folders):
    pair = check_pair(folders / "out", None, [])
    assert pair.adapter == folders / "lora"
    report = verified(models, pair)
    assert 0 < report.fidelity.mean_kl < 1e-3
    assert any("with lora merged into it" in note for note in report.notes)
    # Without the adapter the original is another model.
    assert verified(models, dataclasses.replace(pair, adapter=None)).fidelity.mean_kl > 0.01
    # A model with other weights that the user names has the adapter already.
    given = check_pair(folders / "out", folders / "merged", [])
    assert given.adapter is None
    assert any("assumes that the adapter is merged into it" in note for note in given.notes)
    assert verified(models, given).fidelity.mean_kl == report.fidelity.mean_kl
    quantkit.quantize(models / "llama", "rtn-int8", folders / "without", overrides={"weights.group_size": 32})
    with pytest.raises(ModelError, match="was made without the adapter that was merged into"):
        check_pair(folders / "out", folders / "without", [])
    # The original that it was made from, named by the user, has not.
    assert check_pair(folders / "out", models / "llama", []).adapter == folders / "lora"


def test_the_runtime_loads_the_merged_model(models, folders):
    ids = list(range(2, 40))
    asked = LLM(models / "llama", merge=folders / "lora", **ENGINE).score([ids], chunk_size=8)
    expected = LLM(folders / "merged", **ENGINE).score([ids], chunk_size=8)
    for ours, theirs in zip(asked, expected, strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ModelError, match="never merged into quantized weights"):
        LLM(models / "out", merge=folders / "lora", **ENGINE)


def test_an_adapter_that_is_gone_or_changed_is_refused(models, folders, tmp_path):
    out, lora = shutil.copytree(folders / "out", tmp_path / "out"), shutil.copytree(folders / "lora", tmp_path / "new")
    made = json.loads((out / "quantkit-run.json").read_text())
    made["adapter"]["path"] = str(tmp_path / "gone")
    (out / "quantkit-run.json").write_text(json.dumps(made))
    with pytest.raises(ModelError, match=r"which is not at .*; give its folder as --adapter"):
        check_pair(out, None, [])
    assert check_pair(out, None, [], adapters=[f"mine={lora}"]).adapter == lora
    (out / "quantkit-run.json").unlink()  # as `convert` leaves it
    with pytest.raises(ModelError, match=r"has a merged adapter \(SHA-256 .*\); give its folder as --adapter"):
        check_pair(out, models / "llama", [])
    config = json.loads((lora / "adapter_config.json").read_text())
    (lora / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 1}))
    with pytest.raises(CheckpointError, match="is not the adapter that was merged into"):
        check_pair(out, models / "llama", [], adapters={"mine": lora})


def test_a_gguf_file_needs_the_folder_of_its_adapter(models, folders, tmp_path):
    overrides = {"format": "gguf", "weights.group_size": 32}
    file, base = tmp_path / "m.gguf", models / "llama"
    quantkit.quantize(base, "rtn-int8", file, overrides=overrides, device="cpu", adapter=folders / "lora")
    with pytest.raises(ModelError, match="give its folder as --adapter"):
        check_pair(file, base, [])
    assert check_pair(file, base, [], adapters={"mine": folders / "lora"}).adapter == folders / "lora"


def test_a_checkpoint_made_from_a_merged_one(models, folders, tmp_path):
    lora, overrides = folders / "lora", {"weights.group_size": 32}
    quantkit.quantize(folders / "out", "rtn-int4", tmp_path / "again", overrides=overrides, device="cpu")
    # The model that it was made from has the adapter, so nothing is merged; --adapter is not given to the models.
    for baseline in (None, folders / "out"):
        pair = check_pair(tmp_path / "again", baseline, [], adapters={"mine": lora})
        assert (pair.has_adapter, pair.adapter) == (True, None)
    # The original has not.
    assert check_pair(tmp_path / "again", models / "llama", [], adapters={"mine": lora}).adapter == lora
    with pytest.raises(ModelError, match="give its folder as --adapter"):
        check_pair(tmp_path / "again", models / "llama", [])
    # Of two adapters, quantkit could merge only one.
    quantkit.quantize(models / "llama", "rtn-int8", tmp_path / "two", overrides=overrides, device="cpu", adapter=lora)
    manifest = json.loads((tmp_path / "two" / "quantkit.json").read_text())
    manifest["merged_adapters"].append("0" * 64)
    (tmp_path / "two" / "quantkit.json").write_text(json.dumps(manifest))
    pair = check_pair(tmp_path / "two", models / "llama", [])
    assert pair.adapter is None
    assert any(note.startswith("2 adapters were merged into the checkpoint") for note in pair.notes)


def test_without_a_merged_adapter_both_models_compute_with_the_given_one(models, folders):
    named = {"adapters": {"mine": folders / "lora"}, "adapter": "mine"}
    pair = check_pair(models / "out", None, [], adapters=named["adapters"])
    assert (pair.has_adapter, pair.adapter) == (False, None)
    plain, adapted = verified(models, pair), verified(models, pair, **named)
    assert adapted.fidelity.mean_kl != plain.fidelity.mean_kl
    assert adapted.baseline.perplexity[0].perplexity != plain.baseline.perplexity[0].perplexity


def test_vllm_cannot_merge(models, folders):
    options = VerifyOptions(evaluation=EvaluationOptions(), bench=None, vllm={})
    pair = check_pair(folders / "out", None, [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantkit.evaluate.verify.options.import_vllm", lambda: None)
        with pytest.raises(RequestError, match="give the merged model as --baseline"):
            verify_pair(pair, options)
