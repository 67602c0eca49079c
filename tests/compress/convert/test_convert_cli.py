"""`quantkit convert` and `quantkit inspect A B` as a user runs them."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from quantkit.api import quantize
from quantkit.cli import main
from quantkit.compress.convert import convert
from tests.helpers import make_model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    make_model(folder / "m", dtype=torch.bfloat16)
    overrides = {"weights.group_size": 32, "format": "gptq", "steps": [{"gptq": {"act_order": "group"}}]}
    overrides |= {"calibration.samples": 4, "calibration.sequence_length": 32}
    quantize(folder / "m", "rtn-int4", folder / "q", overrides={"weights.group_size": 32, "format": "gptq"})
    quantize(folder / "m", "gptq-int4", folder / "ordered", overrides=overrides)
    return folder


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_convert_answers_in_json_and_in_words(made, tmp_path):
    done = run("convert", made / "q", "--to", "awq", "-o", tmp_path / "a", "--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert (data["source_format"], data["format"], data["num_linears"]) == ("gptq", "awq", 14)
    done = run("convert", made / "q", "--to", "gguf", "-o", tmp_path / "a.gguf")
    assert done.exit_code == 0, done.output
    assert "equal bit for bit" in done.stdout
    assert (tmp_path / "a.gguf").is_file()


def test_a_gguf_file_is_written_without_a_word_of_the_library(made, tmp_path, caplog):
    done = run("convert", made / "q", "--to", "gguf", "-o", tmp_path / "a.gguf", "--json")
    assert (done.exit_code, done.stderr, caplog.text) == (0, "", "")
    json.loads(done.stdout)


def test_progress_tells_of_the_choice_of_types_too_which_may_take_as_long_as_writing(made, tmp_path):
    seen = []
    convert(made / "q", "gguf", tmp_path / "a.gguf", progress=lambda *told: seen.append(told))
    total = seen[0][1]
    assert [done for done, *_ in seen] == list(range(total + 1))
    assert [name for *_, name in seen[: total // 2]] == [name for *_, name in seen[total // 2 : -1]]


def test_refusals_are_one_line_and_exit_code_4(made, tmp_path):
    done = run("convert", made / "ordered", "--to", "compressed-tensors", "-o", tmp_path / "out")
    assert done.exit_code == 4
    assert done.stderr.count("\n") == 1
    assert "activation order" in done.stderr
    assert "gptq-v2" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_groups_in_activation_order_are_said_in_the_config(made):
    section = json.loads((made / "ordered" / "config.json").read_text())["quantization_config"]
    assert section["desc_act"] is True


def test_inspect_two(made, tmp_path):
    run("convert", made / "q", "--to", "compressed-tensors", "-o", tmp_path / "c")
    done = run("inspect", made / "q", tmp_path / "c", "--json")
    assert done.exit_code == 0, done.output
    assert ["format", "gptq", "compressed-tensors"] in json.loads(done.stdout)["facts"]
    done = run("inspect", made / "q", made / "q")
    assert "no difference" in done.stdout
