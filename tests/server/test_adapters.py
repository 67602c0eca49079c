"""Test a server with adapters: `model` selects an adapter or the base model, and the list names them all."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from quantkit.cli import main
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import SamplingParams
from tests.checkpoints.adapters import make_adapter
from tests.server.conftest import serving


@pytest.fixture(scope="module")
def adapters(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    made = {}
    for name, rank in (("sql", 4), ("chat", 8)):
        made[name] = make_adapter(folder / f"{name}-lora", checkpoint, rank=rank, lora_alpha=100 * rank)
    return made


@pytest.fixture(scope="module")
def server(checkpoint, adapters):
    with serving(checkpoint, adapters=adapters, max_sequences=8) as server:
        yield server


def test_models_are_listed_with_their_base(server):
    status, answer = server.ask("/v1/models")
    assert status == 200
    assert [(each["id"], each["root"], each["parent"]) for each in answer["data"]] == [
        ("tiny", "tiny", None), ("sql", "sql", "tiny"), ("chat", "chat", "tiny"),
    ]  # fmt: skip
    assert server.ask("/v1/models/sql") == (200, answer["data"][1])
    assert server.ask("/v1/models/other")[0] == 404


def test_a_request_chooses_by_name(server, checkpoint, adapters):
    body = {"prompt": "a", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    texts = {}
    for name in (None, "tiny", "sql", "chat"):
        status, answer = server.ask("/v1/completions", body if name is None else {**body, "model": name})
        assert (status, answer["model"]) == (200, name or "tiny")
        llm = LLM(checkpoint, threads=1, adapters=adapters, adapter=name if name in adapters else None)
        texts[name] = answer["choices"][0]["text"]
        assert texts[name] == llm.generate(["a"], SamplingParams(max_tokens=8, ignore_eos=True))[0].text
    assert texts[None] == texts["tiny"]
    assert len(set(texts.values())) == 3


def test_a_conversation_and_several_answers(server):
    question = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "n": 2, "seed": 1}
    answers = {}
    for name in ("tiny", "chat"):
        status, answer = server.ask("/v1/chat/completions", {**question, "model": name})
        assert (status, answer["model"]) == (200, name)
        answers[name] = [choice["message"]["content"] for choice in answer["choices"]]
    assert answers["tiny"] != answers["chat"]


def test_an_unknown_name_is_not_found(server):
    status, answer = server.ask("/v1/completions", {"prompt": "a", "model": "law"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "'law' is not served here; use 'tiny' or 'sql' or 'chat'" in answer["error"]["message"]


def test_a_name_that_two_models_would_have(checkpoint, adapters):
    arguments = ["serve", str(checkpoint), "--served-name", "sql", "--adapter", f"sql={adapters['sql']}"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 4
    assert "model and adapter are both named 'sql'; give --adapter NAME=DIR with a different name" in result.output
