"""Answers in pieces: the same thinking, calls and content however they are cut, for each dialect."""

from __future__ import annotations

import random

import pytest

from quantkit.runtime.dialects.answer_parser import AnswerParser, AnswerParts
from quantkit.runtime.dialects.dialect import dialects

CALL = ("weather", {"city": "Oslo"})
BARE = '{"name": "weather", "arguments": {"city": "Oslo"}}'
WITH_TOOLS = [name for name, each in dialects().items() if each.begin]


def parser(name: str, **options) -> AnswerParser:
    return AnswerParser(dialects()[name], **{"tools": ["weather", "weather_now"], **options})


def in_pieces(one: AnswerParser, pieces: list[str]) -> AnswerParts:
    return sum([*map(one.push, pieces), one.end()], AnswerParts())


def answers(name: str) -> list[str]:
    """Answers with everything that the parser tells apart, most of it malformed."""
    dialect = dialects()[name]
    (begin, end), call = dialect.thinking, dialect.example
    texts = [
        "", " \n", "No call at all, < 5 [and] {so on}.", f"  {BARE}", f"```json\n{BARE}\n```\nAs you see.",
        f"{BARE}\n{BARE}", BARE.replace("weather", "weather_now"), BARE.replace("weather", "other"), BARE[:-3],
        f"Well: {BARE}", '{"name": "weather"} is an object', f"``` python\n{BARE}",
    ]  # fmt: skip
    if call:
        cut = [call[:size] for size in range(3, len(call), 9)]
        texts += [call, f"Let me see.\n\n{call}\nDone. ", f"{call}\n{call}", f" {call}{call} \n"]
        texts += [f"{call} a < b {call}", call.replace("Oslo", f"{dialect.end} of it"), call.replace("Oslo", '\\"{[')]
        texts += [call.replace("weather", "other"), f"{call[: len(call) // 2]}{call}", call.replace('"', "'"), *cut]
        texts += [f"{dialect.start} {dialect.begin} {dialect.end} {dialect.stop}", f"{dialect.start}x{call}"]
    if begin:
        texts += [f"\n{begin}\n I think. \n{end}\n\n{text}" for text in texts[-20:]] + [
            f"{begin} {call}",
            f"a {begin}b",
        ]
        texts += [f"{begin}{end}", f"{begin} \n", f"{begin}a{end} "]
    return texts


@pytest.mark.parametrize("name", dialects())
def test_a_cut_at_any_place_changes_nothing(name):
    for text in answers(name):
        whole = parser(name).parse(text)
        for at in range(1, len(text)):
            assert in_pieces(parser(name), [text[:at], text[at:]]) == whole, (text, at)


@pytest.mark.parametrize("name", dialects())
@pytest.mark.parametrize("options", [{}, {"tools": None}, {"is_thinking": True}, {"bare": True}], ids=str)
def test_many_pieces_change_nothing(name, options):
    generator = random.Random(0)
    for text in answers(name):
        whole = parser(name, **options).parse(text)
        assert in_pieces(parser(name, **options), list(text)) == whole, text
        for _ in range(3):
            ends = sorted(generator.randrange(len(text) + 1) for _ in range(4))
            pieces = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
            assert in_pieces(parser(name, **options), pieces) == whole, pieces


@pytest.mark.parametrize("name", dialects())
def test_nothing_is_lost(name):
    """Without its markers and calls, an answer has the characters that it had, spaces aside."""
    for text in answers(name):
        parts = parser(name, tools=None).parse(text)
        begin, end = dialects()[name].thinking
        kept = text.lstrip().removeprefix(begin).replace(end, "", 1) if begin and begin in text[:12] else text
        assert (parts.thinking + parts.content).split() == kept.split() or parts.thinking
        assert "".join((parts.thinking + parts.content).split()) == "".join(kept.split())
        if not parser(name).parse(text).calls:
            assert parser(name).parse(text).content.strip() == parts.content.strip()


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_and_what_is_around_them(name):
    example = dialects()[name].example
    assert parser(name).parse(example) == AnswerParts(calls=[CALL])
    assert parser(name).parse(f"Let me see.\n\n{example}\nDone.") == AnswerParts(
        content="Let me see.\n\n\nDone.", calls=[CALL]
    )
    assert parser(name).parse(f"{example}\n{example}\n") == AnswerParts(calls=[CALL, CALL])
    assert parser(name).parse(f" \n{BARE}\n") == AnswerParts(calls=[CALL])
    assert parser(name).parse(f"```json\n{BARE}\n```\nSo.") == AnswerParts(content="So.", calls=[CALL])
    assert parser(name, tools=None).parse(example) == AnswerParts(content=example)
    cut = example[: example.index("Oslo")]
    assert parser(name).parse(cut) == AnswerParts(content=cut)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_the_parser_finds_the_calls_that_verify_counts(name):
    dialect = dialects()[name]
    for text in answers(name):
        calls = dialect.calls(dialect.answer(text))
        if calls and None not in calls and all(call[0].startswith("weather") for call in calls):
            assert parser(name).parse(text).calls == calls, text


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_malformed_call_is_text_and_the_next_one_is_a_call(name):
    dialect = dialects()[name]
    if dialect.begin.startswith("{"):
        pytest.skip("a call has no marker of its own")
    broken = f"{dialect.begin}{{oh no{dialect.end or '}'}"
    parts = parser(name).parse(f"{broken} {dialect.example}")
    assert parts == AnswerParts(content=broken, calls=[CALL])


def test_a_marker_in_the_text_of_an_argument():
    text = dialects()["hermes"].example.replace("Oslo", "</tool_call>")
    assert parser("hermes").parse(text) == AnswerParts(calls=[("weather", {"city": "</tool_call>"})])


def test_an_answer_may_end_without_the_last_marker():
    text = dialects()["hermes"].example.removesuffix("</tool_call>")
    assert parser("hermes").parse(text) == AnswerParts(calls=[CALL])
    cut = dialects()["glm-4"].example.removesuffix("</tool_call>")
    assert parser("glm-4").parse(cut) == AnswerParts(content=cut)


def test_a_tool_is_needed_where_markers_are_weak():
    other = '{"name": "Ann", "parameters": {}}'
    assert parser("llama-3").parse(other) == AnswerParts(content=other)
    assert parser("hermes").parse(other) == AnswerParts(content=other)
    assert parser("hermes").parse(f"<tool_call>{other}</tool_call>") == AnswerParts(calls=[("Ann", {})])


@pytest.mark.parametrize("name", [name for name, each in dialects().items() if each.thinking[0]])
def test_thinking(name):
    begin, end = dialects()[name].thinking
    expected = AnswerParts(thinking="I think.", content="So.")
    assert parser(name).parse(f"{begin}\nI think.\n{end}\n\nSo.") == expected
    assert parser(name, is_thinking=True).parse(f"\nI think.\n{end}\n\nSo.") == expected
    assert parser(name).parse(f"{begin}I think.") == AnswerParts(thinking="I think.")
    assert parser(name).parse(f"So. {begin}x{end}") == AnswerParts(content=f"So. {begin}x{end}")
    if example := dialects()[name].example:
        assert parser(name).parse(f"{begin}a {example} b{end}{example}") == AnswerParts(
            thinking=f"a {example} b", calls=[CALL]
        )


def test_text_is_held_back_only_while_it_may_be_a_marker():
    one = parser("hermes")
    said = [one.push(piece).content for piece in ("So", "rry <", "tool", "box> and", " <tool_call", "er> ", "x")]
    assert said == ["So", "rry", "", " <toolbox> and", "", " <tool_caller>", " x"]
    thinking = AnswerParser(dialects()["plain"])
    said = [thinking.push(piece).thinking for piece in ("<thi", "nk>", "a", " b </th", "e ", "</think", ">c")]
    assert said == ["", "", "a", " b", " </the", "", ""]
    one = parser("hermes")
    assert [one.push(piece).content for piece in ('{"na', 'me": "weath', 'x"')] == ["", "", '{"name": "weathx"']
    assert one.end() == AnswerParts()


def test_a_call_is_reported_when_it_ends():
    one = parser("hermes")
    assert one.push(dialects()["hermes"].example[:-1]) == AnswerParts()
    assert one.push(">") == AnswerParts(calls=[CALL])
    assert one.push(" And") == AnswerParts(content="And")
    for name in ("mistral", "mistral-args", "llama-3"):  # no marker behind a call
        assert parser(name).push(dialects()[name].example) == AnswerParts(calls=[CALL])


def test_a_long_call_takes_little_time():
    """Each character is looked at a bounded number of times, however small the pieces."""
    text = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "' + '\\"{' * 50_000 + '"}}]'
    one = parser("mistral")
    parts = in_pieces(one, [text[at : at + 40] for at in range(0, len(text), 40)])
    assert parts.calls == [("weather", {"city": '"{' * 50_000})]
