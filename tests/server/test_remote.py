"""Test `bench --url` and `chat`, quantkit's own clients of a server."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from quantkit.cli import main
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import SamplingParams


def run(*arguments, **settings):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], **settings)


def test_bench_over_http(served, checkpoint):
    result = run(
        *("bench", "--url", served.url, checkpoint, "--batch", "1,4", "--rate", "50", "--requests", 6),
        *("--prompt-tokens", 20, "--new-tokens", 8, "--json"),
    )
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["model"] == "tiny"
    runs = {entry["workload"]["name"]: entry["requests"] for entry in data["runs"]}
    assert {"closed-1", "closed-4", "poisson-50"} <= set(runs)
    for name in ("closed-1", "closed-4", "poisson-50"):
        assert len(runs[name]) == 6
        for timing in runs[name]:
            assert timing["prompt_tokens"] == 20
            assert len(timing["token_s"]) == 8
            assert timing["arrived_s"] < timing["token_s"][0] <= timing["token_s"][-1] <= timing["finished_s"]
    assert data["summary"]["closed-4"]["tokens_per_s"] > 0


def test_bench_over_http_for_people(served):
    result = run("bench", "--url", f"{served.url}/v1", "--batch", "2", "--prompt-tokens", 9, "--new-tokens", 3)
    assert result.exit_code == 4, "the vocabulary has 260 tokens, but bench was not told its size"
    assert "token ids are 0 to 257" in result.output or "token ids are 0 to 259" in result.output


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (["bench", "--url", "http://127.0.0.1:9"], 4, "no server answers at http://127.0.0.1:9"),
    (["bench", "--url", "nonsense"], 4, "no server answers at nonsense"),
    (["bench", "--url", "http://127.0.0.1:9", "--against", "x"], 2, "--url measures a running server"),
    (["bench", "--url", "http://127.0.0.1:9", "--kv-cache", "int8"], 2, "--url measures a running server"),
    (["chat"], 2, "give either CHECKPOINT or --url"),
    (["chat", "a", "--url", "b"], 2, "give either CHECKPOINT or --url"),
    (["chat", "nowhere-at-all"], 4, "nowhere-at-all"),
])  # fmt: skip
def test_refused(arguments, code, words):
    result = run(*arguments)
    assert result.exit_code == code
    assert words in " ".join(result.output.split())


CONVERSATION = "Hi\n/stats\n/what\nAnd then?\n/reset\nHi\n/exit\n"


@pytest.mark.parametrize("door", ["engine", "server"])
def test_chat(served, checkpoint, door):
    where = [checkpoint, "--threads", 1] if door == "engine" else ["--url", served.url]
    result = run("chat", *where, "--max-tokens", 12, "--system", "Be short.", input=CONVERSATION)
    assert result.exit_code == 0, result.output
    llm, params = LLM(checkpoint, threads=1), SamplingParams(max_tokens=12)
    first = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    answer = llm.chat(first, params).text
    second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
    assert result.stdout.count(answer) == 2
    assert llm.chat(second, params).text in result.stdout
    assert "first text after" in result.stdout


def test_chat_without_a_template():
    result = run("chat", "quantkit/demo/model")
    assert result.exit_code == 4
    assert "has no chat template" in result.output
