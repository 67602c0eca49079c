"""Samples from every kind of source, the same for the same seed, and the linter's findings."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from quantkit.compress.calibration.dataset import lint, load_samples
from quantkit.errors import DataError
from tests.helpers import TEXT, save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def load(data, tokenizer, **changes):
    settings = {"samples": 8, "sequence_length": 64, "vocab_size": 260, "seed": 0}
    return load_samples(data, tokenizer, **{**settings, **changes})


def test_text_becomes_windows_that_begin_with_bos(text_file, tokenizer):
    samples = load(text_file, tokenizer)
    assert [len(sample) for sample in samples.token_ids] == [64] * 8
    assert all(sample[0] == tokenizer.bos_token_id for sample in samples.token_ids)
    stretch = tokenizer.decode(samples.token_ids[0][1:])
    joined = " ".join(part.replace("\n\n", " ") for part in [stretch])
    assert any(word in joined for word in ("apples", "counted", "friend"))


def test_the_seed_decides_the_draw(text_file, tokenizer):
    first, again, other = (load(text_file, tokenizer, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.digest != other.digest


def test_windows_do_not_repeat(text_file, tokenizer):
    samples = load(text_file, tokenizer, samples=20)
    assert len(set(samples.token_ids)) == 20


def test_jsonl_text_chat_and_ids(tmp_path, tokenizer):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"text": part}) for part in TEXT.split("\n\n")))
    assert len(load(path, tokenizer).token_ids) == 8
    path.write_text("\n".join(json.dumps({"input_ids": [0, *range(5, 40 + i)]}) for i in range(12)))
    samples = load(path, tokenizer)
    assert len(samples.token_ids) == 8
    assert all(sample[:2] == (0, 5) for sample in samples.token_ids)
    path.write_text(json.dumps({"body": TEXT}))
    assert len(load(path, tokenizer, field="body").token_ids) == 8


def test_chats_go_through_the_template(tmp_path, tokenizer):
    path = tmp_path / "chat.jsonl"
    chat = [{"role": "user", "content": "How many apples?"}, {"role": "assistant", "content": "Twelve."}]
    path.write_text("\n".join(json.dumps({"messages": chat}) for _ in range(3)))
    with pytest.raises(DataError, match="cannot format this chat"):
        load(path, tokenizer)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    try:
        samples = load(path, tokenizer)
    finally:
        tokenizer.chat_template = None
    assert tokenizer.decode(samples.token_ids[0]) == "<user>How many apples?<assistant>Twelve."
    assert any("do not begin with the BOS token" in warning for warning in samples.warnings)
    assert any("duplicates" in warning for warning in samples.warnings)


@pytest.mark.parametrize("as_text", [False, True])
def test_a_chat_keeps_its_tools_calls_and_thinking(tmp_path, tokenizer, as_text):
    path = tmp_path / "chat.jsonl"
    tools = [{"type": "function", "function": {"name": "count"}}]
    call = {"type": "function", "function": {"name": "count", "arguments": '{"of": "a"}'}}
    chat = [
        {"role": "user", "content": "How?"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]
    record = {"messages": chat, "tools": json.dumps(tools) if as_text else tools}
    path.write_text("\n".join(json.dumps(record) for _ in range(3)))
    tokenizer.chat_template = (
        "{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>"
        "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    try:
        samples = load(path, tokenizer)
    finally:
        tokenizer.chat_template = None
    expected = '[count]<user>How?<assistant>(Hm.){"of": "a"}<tool>1'
    assert tokenizer.decode(samples.token_ids[0]) == expected


def test_the_linter_says_nothing_about_good_data(tokenizer):
    good = [[0, *[5 + (i * j) % 200 for j in range(255)]] for i in range(1, 33)]
    assert lint(good, 32, 256, tokenizer) == ()


def test_the_linter_finds_what_is_wrong(tokenizer):
    findings = " | ".join(lint([[5, 6, 7], [5, 6, 7], [0, 8]], 16, 256, tokenizer))
    for part in (
        "2 of 3 samples do not begin",
        "only 3 samples instead of 16",
        "samples are shorter than half",
        "1 of 3 samples are duplicates of others",
    ):
        assert part in findings


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "", "is empty"),
        ("blank.txt", "\n\n  \n\n", "is empty"),
        ("empty.jsonl", "", "is empty"),
        ("bad.jsonl", '{"text": "a"}\n{"text": ', "bad.jsonl:2 is not valid JSON .*one JSON object per line"),
        ("keys.jsonl", '{"story": "once"}', "no 'text', 'messages' or 'input_ids' with content; its keys: story"),
        ("list.jsonl", "[1, 2]", "list.jsonl:1 holds a JSON list, not an object; one JSON object per line"),
        ("ids.jsonl", '{"input_ids": [0, 5, 999]}', "token id 999 is outside the model's vocabulary of 260"),
        ("negative.jsonl", '{"input_ids": [0, -5, 9]}', "token id -5 is outside"),
        ("words.jsonl", '{"input_ids": ["a", "b"]}', "must be whole numbers"),
        ("tools.jsonl", '{"messages": [{"role": "user", "content": "a"}], "tools": {"a": 1}}', "give a list of tools"),
        ("half.jsonl", '{"messages": [{"role": "user", "content": "a"}], "tools": "[{"}', "'tools' is not valid JSON"),
        ("one.jsonl", '{"input_ids": [0]}', "contains no usable text"),
    ],
)
def test_unusable_data_is_one_line(tmp_path, tokenizer, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match=message.replace("'", "['\"]").replace("[1", r"\[1")):
        load(path, tokenizer)


def test_missing_and_binary_files(tmp_path, tokenizer):
    with pytest.raises(DataError, match="does not exist"):
        load(tmp_path / "nothing.txt", tokenizer)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(DataError, match="cannot be read as text"):
        load(tmp_path / "binary.txt", tokenizer)


def test_hub_failures_are_one_line(tokenizer):
    with pytest.raises(DataError, match="neither a file nor a hub data set"):
        load("hub:quantkit/no-such-data-set", tokenizer)


def test_a_hub_data_set_is_streamed(tokenizer, monkeypatch):
    import datasets

    seen = {}

    def fake(name, config, *, split, streaming):
        seen.update(name=name, config=config, split=split, streaming=streaming)
        return ({"text": part} for part in TEXT.split("\n\n"))

    monkeypatch.setattr(datasets, "load_dataset", fake)
    samples = load("hub:org/set:part", tokenizer, split="test")
    assert seen == {"name": "org/set", "config": "part", "split": "test", "streaming": True}
    assert len(samples.token_ids) == 8
