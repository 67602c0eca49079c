"""A stranger's tokenizer and template end within bounds of time and memory, or are refused."""

from __future__ import annotations

import json
import time

import pytest

from quantkit.checkpoints import tokenizer as module
from quantkit.checkpoints.tokenizer import load_tokenizer
from quantkit.child import ends_well
from quantkit.errors import ModelError, RequestError
from quantkit.runtime.llm import LLM
from quantkit.untrusted import bounded
from tests.helpers import make_model, save_tokenizer


def test_a_tokenizer_that_blows_a_line_up_is_refused(tmp_path):
    save_tokenizer(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    steps = [{"type": "Replace", "pattern": {"Regex": "."}, "content": "aaaaaaaa"}] * 12
    data["normalizer"] = {"type": "Sequence", "normalizers": steps}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ModelError, match="fails on a line of text, or takes more than"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_whose_settings_are_of_other_types_is_refused(tmp_path):
    save_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": [2, 3]}))
    with pytest.raises(ModelError, match="its tokenizer"):
        load_tokenizer(tmp_path)


def test_an_ordinary_tokenizer_is_tried_out_in_no_time(tmp_path, monkeypatch):
    save_tokenizer(tmp_path)
    monkeypatch.setattr(module, "_TIMEOUT_S", 10)
    assert load_tokenizer(tmp_path)("ab")["input_ids"]


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='x' * 1000) %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    ],
    ids=["time", "memory"],
)
def test_a_template_without_end_is_ended(tmp_path, monkeypatch, template):
    llm = LLM(make_model(tmp_path), lazy=True)
    llm.tokenizer.chat_template = template
    monkeypatch.setattr("quantkit.runtime.prompts.bounded", lambda: bounded(0.5, 1 << 28))
    with pytest.raises(RequestError, match="the chat template refuses these messages: it takes more than"):
        llm.encode_chat([{"role": "user", "content": "x"}])


def test_a_child_is_told_apart_by_how_it_ends():
    began = time.monotonic()
    assert ends_well(lambda: None, seconds=30)
    assert not ends_well(lambda: 1 / 0, seconds=30)
    assert not ends_well(lambda: time.sleep(60), seconds=0.2)
    assert ends_well(lambda: bytearray(1 << 28), seconds=30)
    assert not ends_well(lambda: bytearray(1 << 28), seconds=30, num_bytes=1 << 26)
    assert time.monotonic() - began < 25


def test_what_a_library_prints_while_it_loads_is_no_result(tmp_path, capfd):
    save_tokenizer(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    data["added_tokens"] = [{**token, "auto_map": 1} for token in data["added_tokens"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    load_tokenizer(tmp_path)
    streams = capfd.readouterr()
    assert (streams.out, "Ignored unknown" in streams.err) == ("", True)
