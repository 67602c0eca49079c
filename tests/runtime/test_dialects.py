"""Dialects of chat models: the example of each file, malformed calls, and which one a template is of."""

from __future__ import annotations

import pytest

from quantkit.runtime.dialects.dialect import dialects, find_dialect

CALL = ("weather", {"city": "Oslo"})
WITH_TOOLS = [name for name, each in dialects().items() if each.begin]


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_the_example_is_one_call(name):
    dialect = dialects()[name]
    assert dialect.calls(dialect.example) == [CALL]
    assert dialect.calls(f"Let me see.\n{dialect.example}") == [CALL]
    assert dialect.calls("no call at all") == []
    assert dialect.start in dialect.example


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_call_that_is_cut_off_is_malformed(name):
    dialect = dialects()[name]
    end = dialect.example.index("Oslo") + 2
    assert dialect.calls(dialect.example[:end]) == [None]


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_template_that_writes_the_example_is_of_the_dialect(name):
    dialect = dialects()[name]
    assert find_dialect("".join(dialect.template) + "{{ tools }}") is dialect


def test_several_calls_and_lists_of_them():
    hermes, mistral, args = (dialects()[name] for name in ("hermes", "mistral", "mistral-args"))
    assert hermes.calls(2 * hermes.example) == [CALL, CALL]
    one = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    assert mistral.calls(f"[TOOL_CALLS] [{one}, {one}]") == [CALL, CALL]
    assert mistral.calls("[TOOL_CALLS] []") == [None]
    assert args.calls(2 * args.example) == [CALL, CALL]


@pytest.mark.parametrize(
    "body",
    [
        "",
        '{"name": "f", "arguments": {}}, "x": 1',
        "weather",
        "[]",
        "{}",
        '{"name": 1, "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        "{" * 1000,
        "[" * 99_999,
    ],
)
def test_malformed_json(body):
    assert dialects()["hermes"].calls(f"<tool_call>{body}</tool_call>") == [None]


def test_arguments_may_be_json_in_a_text():
    text = '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>'
    assert dialects()["hermes"].calls(text) == [CALL]


def test_values_between_tags_have_their_types():
    text = (
        "<tool_call><function=f><parameter=n>\n3\n</parameter><parameter=s>\nx y\n</parameter></function></tool_call>"
    )
    assert dialects()["qwen3-coder"].calls(text) == [("f", {"n": 3, "s": "x y"})]


def test_the_answer_follows_the_thinking():
    plain = find_dialect(None)
    assert plain.name == "plain"
    assert plain.answer("<think>a</think>b") == "b"
    assert plain.answer("a</think>b", is_thinking=True) == "b"
    assert plain.answer("a", is_thinking=True) == plain.answer("<think>a") == ""
    assert plain.answer("a") == "a"


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_the_json_of_a_call_alone_counts(name):
    dialect = dialects()[name]
    one = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    for text in (one, f"```json\n{one}\n```", f" ```\n{one}```\n"):
        assert dialect.calls(text) == [CALL]
        ((start, end),) = dialect.call_spans(text)
        assert text[start:end].strip() == text.strip().removesuffix("```").strip()
    assert dialect.calls('{"name": "weather", "arguments": {"city": ') == [None]
    if not dialect.begin.startswith("{"):
        assert dialect.calls('{"name": "Ann", "age": 3}') == []
    assert find_dialect(None).calls(one) == []


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_call_is_where_it_stands(name):
    dialect = dialects()[name]
    (span,) = dialect.call_spans(f"Well. {dialect.example} So.")
    assert span[0] == 6 + dialect.example.index(dialect.start)
    assert dialect.call_spans("no call at all") == []
