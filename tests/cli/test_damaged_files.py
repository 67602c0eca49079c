"""Whatever a file says, a command that reads it ends with exit code 4 and one line."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

from quantkit.cli._output import explain
from quantkit.compress.calibration.dataset import _read_file
from quantkit.errors import CheckpointError, DataError, InputError, ModelError
from quantkit.evaluate.tasks import read_named_text
from quantkit.evaluate.verify.pair_checks import check_pair
from quantkit.inspection import inspect
from quantkit.planning.source import from_model
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.cache_schemes import follows_checkpoint
from quantkit.safety.untrusted import parse_object, read_object
from tests.helpers import make_model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    import quantkit

    folder = tmp_path_factory.mktemp("source")
    make_model(folder / "m", dtype=torch.bfloat16)
    quantkit.quantize(folder / "m", "rtn-int4", folder / "q", overrides={"weights.group_size": 32}, device="cpu")
    return folder


@pytest.fixture
def checkpoint(source, tmp_path):
    return shutil.copytree(source / "q", tmp_path / "q")


def changed(path, **entries):
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


DEEP = '{"a": ' + "[" * 900 + "]" * 900 + "}"
BAD_JSON = {
    "deep": (DEEP, "nested more than 50 deep"),
    "deeper": ("[" * 200_000, "not valid JSON"),
    "digits": ('{"a": ' + "9" * 4000 + "}", "a number has 4000 digits"),
    "half a character": (r'{"a": "\ud800"}', "surrogates not allowed"),
    "a list": ("[]", "holds a JSON list"),
    "a number": ("1", "holds a JSON int"),
}


@pytest.mark.parametrize("name", BAD_JSON)
@pytest.mark.parametrize("as_bytes", [False, True])
def test_json_is_read_within_bounds(name, as_bytes):
    text, expected = BAD_JSON[name]
    with pytest.raises(CheckpointError, match=expected) as caught:
        parse_object(text.encode() if as_bytes else text, "x.json", CheckpointError, "copy it")
    assert len(str(caught.value)) < 300


def test_ordinary_json_is_read_as_it_is():
    data = {"a": [1, 1.5, None, True, 10**30], "é": {"😀": []}, "b": "\\u00e9"}
    for text in (json.dumps(data), json.dumps(data, ensure_ascii=False).encode()):
        assert parse_object(text, "x.json", CheckpointError, "copy it") == data


@pytest.mark.parametrize("name", ["quantkit.json", "quantkit-run.json"])
def test_a_pipe_does_not_hang_verify(checkpoint, source, name):
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    with pytest.raises(InputError):
        check_pair(checkpoint, source / "m")
    with pytest.raises(ModelError, match="not a regular file"):
        read_object(checkpoint / name, ModelError)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"gates": 5}, "list of texts, not 5"),
        ({"gates": [["a"]]}, "list of texts, not"),
        ({"files": {"sha256": None}}, "does not name"),
    ],
    ids=str,
)
def test_a_manifest_of_other_types_is_refused(checkpoint, source, entries, message):
    changed(checkpoint / "quantkit.json", **entries)
    with pytest.raises(InputError, match=message):
        check_pair(checkpoint, source / "m")


def test_a_hash_of_another_type_is_refused(checkpoint, source):
    manifest = json.loads((checkpoint / "quantkit.json").read_text())
    for entry in manifest["files"].values():
        entry["sha256"] = None
    changed(checkpoint / "quantkit.json", **manifest)
    with pytest.raises(CheckpointError, match="changed since the checkpoint was made"):
        check_pair(checkpoint, source / "m")


@pytest.mark.parametrize(
    "entries",
    [
        {"architectures": [["a"]]},
        {"architectures": 5},
        {"dtype": [[]]},
        {"model_type": {}},
        {"text_config": {"dtype": 1}},
    ],
    ids=str,
)
@pytest.mark.parametrize("reader", [LLM, inspect, from_model], ids=["generate", "inspect", "plan"])
def test_names_of_other_types_are_refused(checkpoint, entries, reader):
    changed(checkpoint / "config.json", **entries)
    with pytest.raises(ModelError, match=r"not a (name|list of names)"):
        reader(checkpoint)


def test_a_path_that_no_report_could_name_is_refused_at_once(source, tmp_path, run):
    latin = str(tmp_path / os.fsdecode(b"q\xff"))
    for command in (
        ["inspect", str(tmp_path / "q\0")],
        ["inspect", latin],
        ["quantize", latin, "--recipe", "rtn-int8", "-o", "out"],
        ["quantize", source / "m", "--recipe", "rtn-int8", "-o", latin],
        ["convert", source / "q", "--to", "dense", "-o", latin],
    ):
        code, _, error = run(*command)
        assert (code, error.count("\n")) == (4, 1), error
        assert "contains a zero byte" in error or "is not UTF-8" in error
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_of_a_million_dimensions_is_refused_at_once(checkpoint):
    header = json.dumps({"a": {"dtype": "U8", "shape": [9**20] * 200_000, "data_offsets": [0, 1]}}).encode()
    (checkpoint / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(CheckpointError, match="has shape") as caught:
        inspect(checkpoint)
    assert len(str(caught.value)) < 500


def test_a_message_is_one_line_of_what_can_be_printed():
    code, line = explain(ModelError("bad \x1b[2J name\r\nof " + "x" * 10_000))
    assert code == 4
    assert line.isprintable()
    assert len(line) <= 2000


@pytest.mark.parametrize(
    "reader", [_read_file, lambda path: read_named_text(str(path), ())], ids=["calibration", "text"]
)
@pytest.mark.parametrize("kind", ["device", "sparse"])
def test_a_text_without_end_is_refused_at_once(tmp_path, reader, kind):
    path = tmp_path / "text.txt"
    if kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    with pytest.raises(DataError, match=r"cannot be read|is neither a file"):
        reader(path)


@pytest.mark.parametrize("name", ["text.txt" * 1000, "~nobody-of-that-name/text.txt", "a" * 300, "a\0b"])
def test_a_text_with_a_name_that_no_file_can_have_is_not_there(name, tmp_path):
    with pytest.raises(DataError, match="is neither a file nor in a --data folder"):
        read_named_text(name, (tmp_path,))


def test_an_infinite_number_of_layers_announces_no_cache(tmp_path):
    (tmp_path / "config.json").write_text('{"num_hidden_layers": Infinity}')
    assert not follows_checkpoint(tmp_path)
