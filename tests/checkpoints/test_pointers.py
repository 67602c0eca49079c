"""Files of a model's folder name no file outside it."""

from __future__ import annotations

import json

import pytest

from quantkit.checkpoints.folder import check_folder, weight_files
from quantkit.errors import CheckpointError, ModelError
from quantkit.planning.source import from_model
from tests.helpers import make_model


@pytest.mark.parametrize("name", ["../secret.txt", "{folder}/secret.txt", "m/../../secret.txt"])
@pytest.mark.parametrize("key", ["vocab_file", "tokenizer_file", "merges_file"])
def test_a_vocabulary_outside_the_folder_is_refused(tmp_path, name, key):
    (tmp_path / "secret.txt").write_text("years")
    (tmp_path / "m" / "m").mkdir(parents=True)
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps({key: name.format(folder=tmp_path)}))
    with pytest.raises(ModelError, match=f"{key} is .* a file outside the model's folder"):
        check_folder(tmp_path / "m")


def test_names_that_other_machines_have_left_there_do_no_harm(tmp_path):
    entries = {"tokenizer_file": "/home/somebody/tokenizer.json", "vocab_file": None, "merges_file": "merges.txt"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(entries))
    assert check_folder(tmp_path) == tmp_path


def test_an_adapter_beside_a_model_is_refused(tmp_path):
    for name in ("config.json", "adapter_config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=r"adapter_config\.json, which makes transformers load a different model"):
        check_folder(tmp_path)


def test_planning_follows_no_path_of_an_index(tmp_path):
    model = make_model(tmp_path / "m")
    index = {"metadata": {}, "weight_map": {"a": "../elsewhere/model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    for reader in (weight_files, from_model):
        with pytest.raises(CheckpointError, match="only a safetensors file in the same folder"):
            reader(model)
