"""Texts that must be JSON of a schema: they are, alone, in batches, drawn, and with drafts."""

from __future__ import annotations

import json

import jsonschema
import pytest

from quantkit.errors import RequestError
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import SamplingParams
from tests.helpers import save_tokenizer
from tests.runtime.helpers import make_loud_model

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"town": {"enum": ["Rome", "Oslo"]}, "apples": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["town", "apples"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_loud_model(tmp_path_factory.mktemp("model"), "llama")
    save_tokenizer(folder)
    return folder


def params(**fields):
    return SamplingParams(**{"max_tokens": 300, "json_schema": json.dumps(SCHEMA), **fields})


@pytest.mark.parametrize("settings", [{}, {"speculate": "ngram", "force_speculation": True}], ids=["plain", "drafts"])
def test_every_text_is_of_the_schema(folder, settings):
    llm = LLM(folder, threads=1, **settings)
    asked = [params(), params(temperature=1.0, seed=1), params(temperature=2.0, seed=2), SamplingParams(max_tokens=9)]
    *constrained, plain = llm.generate(["a", "a", "b", "a"], asked)
    for completion in constrained:
        assert completion.finish_reason == "stop"
        jsonschema.validate(json.loads(completion.text), SCHEMA)
    assert plain.text == llm.generate("a", SamplingParams(max_tokens=9))[0].text
    assert constrained[0].text == llm.generate("a", params())[0].text


def test_drafts_change_nothing(folder):
    drafting = LLM(folder, threads=1, speculate="ngram", force_speculation=True)
    prompt = '{"town": "Rome", "apples": 12} {"town": "Rome", "apples": 12} '
    text = drafting.generate(prompt, params())[0].text
    assert text == LLM(folder, threads=1).generate(prompt, params())[0].text
    assert drafting.stats()["drafted_tokens"] > 0


@pytest.mark.parametrize("schema", ["{", '{"type": "fruit"}', '{"$ref": "http://x/y"}', "[]"])
def test_what_is_no_schema_is_refused(folder, schema):
    with pytest.raises(RequestError, match="json_schema is not supported"):
        LLM(folder, threads=1).generate("a", SamplingParams(json_schema=schema))


def test_it_must_be_able_to_end():
    with pytest.raises(RequestError, match="ignore_eos"):
        SamplingParams(json_schema="{}", ignore_eos=True)
