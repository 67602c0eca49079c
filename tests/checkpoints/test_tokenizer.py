"""A stranger's tokenizer and template end within bounds of time and memory, or are refused."""

from __future__ import annotations

import base64
import json
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from quantkit.checkpoints import tokenizer as module
from quantkit.checkpoints.tokenizer import load_tokenizer
from quantkit.cli import main
from quantkit.errors import ModelError, RequestError
from quantkit.machine.system import ends_well
from quantkit.runtime.llm import LLM
from tests.helpers import make_model, save_tokenizer

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def replace(found: dict[str, str], content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": found, "content": content}


def change_tokenizer(folder: Path, **parts) -> None:
    save_tokenizer(folder)
    data = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**data, **parts}))


def test_a_tokenizer_that_blows_a_line_up_is_refused(tmp_path):
    change_tokenizer(tmp_path, normalizer={"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 40})
    with pytest.raises(ModelError, match="fails on a line of text, or needs over"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["normalizer", "decoder"])
@pytest.mark.parametrize(
    "steps",
    [
        [replace({"String": "zq"}, "zqzq")] * 40,  # no line that is tried out has it
        [replace({"Regex": "%"}, "%" * 40)] * 2,
        [replace({"String": "%"}, "%" * 2000)],
        [replace({"String": "%"}, "%%")] * 5000,
    ],
    ids=["doubled", "regex", "long", "many"],
)
def test_a_tokenizer_that_would_blow_another_line_up_is_refused(tmp_path, kind, steps):
    change_tokenizer(tmp_path, **{kind: {"type": "Sequence", f"{kind}s": steps}})
    with pytest.raises(ModelError, match=rf"tokenizer.json has a {kind} that may make a text \d+ times as long"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("longest", [18, 5000])
def test_a_table_of_normal_forms_is_as_long_as_its_longest_text(tmp_path, longest):
    table = (8).to_bytes(4, "little") + bytes(8) + b"ab\0" + b"x" * longest + b"\0"
    step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    steps = SimpleNamespace(normalizer=SimpleNamespace(__getstate__=lambda: json.dumps(step).encode()))
    with pytest.raises(ModelError) if longest > 1000 else nullcontext():
        module._check_growth(tmp_path, steps)


def test_more_added_tokens_than_load_in_a_minute_are_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MAX_ADDED_TOKENS", 3)
    save_tokenizer(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    many = [{**data["added_tokens"][0], "id": 258 + number, "content": f"<{number}>"} for number in range(10)]
    change_tokenizer(tmp_path, added_tokens=many)
    with pytest.raises(ModelError, match=r"tokenizer.json adds \d+ tokens, over the limit of 3"):
        load_tokenizer(tmp_path)
    monkeypatch.setattr(module, "_MAX_FILE_BYTES", 1000)
    with pytest.raises(ModelError, match=r"tokenizer.json has \d+ bytes, over the limit of 1000"):
        load_tokenizer(tmp_path)


def test_a_regular_expression_that_gives_up_on_a_text_is_told(tmp_path, capsys):
    folder = make_model(tmp_path)
    pattern = {"type": "Split", "pattern": {"Regex": "(z+z+)+!"}, "behavior": "Isolated", "invert": False}
    change_tokenizer(folder, pre_tokenizer={"type": "Sequence", "pretokenizers": [pattern, BYTES]})
    with pytest.raises(RequestError, match=r"the tokenizer fails on this text: .*retry-limit"):
        LLM(folder, lazy=True).encode("z" * 60)
    text = folder / "text.txt"
    text.write_text("z" * 60)
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(folder), "--text", str(text), "--suite", "none"])
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert (ended.value.code, len(errors)) == (4, 1)


def test_a_tokenizer_whose_settings_are_of_other_types_is_refused(tmp_path):
    save_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": [2, 3]}))
    with pytest.raises(ModelError, match="the tokenizer fails"):
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
        "{{ 7 ** (10 ** 8) }}",  # one operation, in which Python looks at nothing
        "{{ ([[]] * 10 ** 8) | tojson }}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ [1] | batch(10 ** 9, 0) | list }}",
    ],
    ids=["time", "memory", "power", "list", "text", "filter"],
)
def test_a_template_without_end_is_ended(tmp_path, monkeypatch, template):
    llm = LLM(make_model(tmp_path), lazy=True)
    llm.tokenizer.chat_template = template
    monkeypatch.setattr(module, "_CHAT_S", 2.0)
    with pytest.raises(RequestError, match="template refuses these messages: rendering takes more than 2 s or"):
        llm.encode_chat([{"role": "user", "content": "x"}])


def test_a_template_without_end_for_several_turns_is_refused_at_the_first(tmp_path, monkeypatch):
    llm = LLM(make_model(tmp_path), lazy=True)
    llm.tokenizer.chat_template = (
        "{% if messages | length > 1 %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        "{% endif %}{{ messages[0].content }}"
    )
    monkeypatch.setattr(module, "_CHAT_S", 2.0)
    with pytest.raises(RequestError, match="template refuses these messages: rendering takes more than 2 s or"):
        llm.encode_chat([{"role": "user", "content": "x"}])


def test_a_template_that_makes_a_book_of_a_line_is_refused(tmp_path):
    llm = LLM(make_model(tmp_path), lazy=True)
    llm.tokenizer.chat_template = "{{ 'x' * 2000000 }}"
    with pytest.raises(RequestError, match=r"refuses these messages: rendering turns \d+ characters into 2000000"):
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
