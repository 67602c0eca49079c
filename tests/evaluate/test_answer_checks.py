"""What an answer of a chat model is checked for: loops, scripts, forms, and the schemas of tool calls."""

from __future__ import annotations

import pytest

from quantkit.evaluate.behaviour import Question, Trace, has_other_script, is_loop
from quantkit.evaluate.prompt_sets import Expect, Prompt, fits_schema
from tests.evaluate.chat_model import PROMPTS


def trace(tokens, ended=False):
    question = Question(number=0, prompt=Prompt.model_validate(PROMPTS[0]), ids=(1,), is_thinking=False)
    return Trace(index=0, question=question, token_ids=tuple(tokens), text="", ended=ended)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([*range(50), *[7] * 24], True),
        ([*range(50), *[7] * 23], False),
        ([*range(50), *range(12), *range(12), *range(12)], True),
        ([*range(50), *range(12), *range(12)], False),
        ([*range(50), *range(3), *range(3), *range(3)], False),  # too short to tell
        (list(range(100)), False),
        ([], False),
    ],
)
def test_a_loop_is_three_repeats_up_to_the_end(tokens, expected):
    assert is_loop(trace(tokens)) is expected
    assert not is_loop(trace(tokens, ended=True))


def test_another_script_than_the_prompts():
    prompt = Prompt.model_validate({"messages": [{"role": "user", "content": "What is 'hello' in Greek?"}]})
    assert not has_other_script("It is geia sou, with β as an exception.", prompt)
    assert has_other_script("It is 你好 世界.", prompt)
    assert not has_other_script("", prompt)


@pytest.mark.parametrize(
    ("expect", "good", "bad"),
    [
        ({"json": ["a"]}, '```json\n{"a": 1, "b": 2}\n```', '{"b": 2}'),
        ({"json": ["a"]}, '{"a": [1]}', '{"a": 1'),
        ({"csv": 2}, "city,river\nRome,Tiber\n", "city,river\nRome\n"),
        ({"csv": 2}, 'a,b\n"x,y",2', "a,b"),
        ({"csv": 2}, "a,b\n1,2", "a,b\n1," + "2" * 200_000),  # more than the reader takes
        ({"items": 2}, "- one\n- two", "- one\n- two\n- three"),
        ({"items": 2}, "1. one\n2. two", "one\ntwo"),
        ({"line": "Answer:"}, "2 + 2\n**Answer:** 4", "The answer is 4"),
        ({"options": ["A", "B"]}, " B) ", "B, because"),
    ],
)
def test_formats(expect, good, bad):
    form = Expect.model_validate(expect)
    assert (form.is_met(good), form.is_met(bad)) == (True, False)
    assert Expect().is_met("anything") is None


SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "kind": {"enum": ["a", "b"]},
        "list": {"type": "array", "items": {"type": ["string", "null"]}},
        "inner": {"type": "object", "required": ["x"]},
    },
    "required": ["n"],
    "additionalProperties": False,
}
VALUES = [
    {"n": 1}, {"n": 1, "kind": "a", "list": ["x", None], "inner": {"x": 0}}, {"n": True}, {"n": 1.5}, {"n": "1"}, {},
    {"n": 1, "kind": "c"}, {"n": 1, "list": [1]}, {"n": 1, "list": "x"}, {"n": 1, "inner": {}}, {"n": 1, "z": 1}, [],
    None,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_schemas_hold_where_jsonschema_says_so(value):
    jsonschema = pytest.importorskip("jsonschema")
    assert fits_schema(value, SCHEMA) == jsonschema.Draft202012Validator(SCHEMA).is_valid(value)


def test_calls_are_valid_where_name_schema_and_question_hold():
    prompt = Prompt.model_validate(PROMPTS[12])
    good = ("weather", {"city": "Oslo"})
    assert prompt.is_valid([good])
    assert prompt.is_valid([good, good])
    for wrong in (
        [],
        [None],
        [good, None],
        [("wether", {"city": "Oslo"})],
        [("weather", {})],
        [("weather", {"city": 1})],
    ):
        assert not prompt.is_valid(wrong)
    declined = prompt.model_copy(update={"expect": Expect(calls=[])})
    assert declined.is_valid([])
    assert not declined.is_valid([good])
    assert prompt.model_copy(update={"expect": Expect()}).is_valid([])
