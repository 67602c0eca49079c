"""`--adapter` of the commands that run a model."""

from __future__ import annotations

import json

import pytest

from quantkit.runtime.config import EngineConfig
from tests.checkpoints.adapters import make_adapter

pytestmark = pytest.mark.usefixtures("quick_ceilings")


@pytest.fixture(scope="module")
def adapter(loud_llama, tmp_path_factory):
    return make_adapter(tmp_path_factory.mktemp("adapters") / "sql", loud_llama, lora_alpha=400)


def test_generate(run, loud_llama, adapter):
    words = ("generate", loud_llama, "--prompt", "The", "--max-tokens", 12, "--threads", 1, "--dtype", "fp32", "--json")
    texts = []
    for given in ((), ("--adapter", adapter), ("--adapter", f"x={adapter}")):
        code, out, err = run(*words, *given)
        assert (code, err) == (0, "")
        texts.append(json.loads(out)["text"])
    assert texts[0] != texts[1] == texts[2]
    _, _, err = run(*words[:-1], "--adapter", adapter, "--stats")
    assert "adapter sql: rank 4" in " ".join(err.replace("│", " ").split())


def test_eval_names_the_adapter(run, loud_llama, adapter, text_file):
    words = ("eval", loud_llama, "--text", text_file, "--text-tokens", 200, "--threads", 1, "--json")
    plain, adapted = (json.loads(run(*words, *given)[1])["evaluation"] for given in ((), ("--adapter", adapter)))
    assert "adapter" not in plain["settings"]
    assert adapted["settings"]["adapter"].startswith("sql (SHA-256 ")
    assert plain["perplexity"][0]["window_nll"] != adapted["perplexity"][0]["window_nll"]


@pytest.mark.parametrize("command", ["generate", "chat", "bench", "eval", "verify"])
def test_only_servers_take_several(run, loud_llama, adapter, command):
    given = ("--prompt", "a") if command == "generate" else ()
    code, _, err = run(command, loud_llama, *given, "--adapter", adapter, "--adapter", f"other={adapter}")
    assert code == 2
    assert "--adapter is given 2 times, but this command uses one adapter; give --adapter once" in err


def test_quantize_merges_one(run, loud_llama, adapter, tmp_path):
    words = ("quantize", loud_llama, "--recipe", "rtn-int8", "-o", tmp_path / "out")
    code, _, err = run(*words, "--adapter", adapter, "--adapter", "other")
    assert code == 2
    assert "--adapter is given 2 times, but quantkit merges one adapter" in err
    assert not (tmp_path / "out").exists()
    code, _, err = run(*words, "--adapter", adapter)
    assert code == 0
    assert "note: an adapter of rank 4 is merged into 6 weights when quantkit reads them" in err.splitlines()
    assert "warning" not in err
    assert "merged into" in run("inspect", tmp_path / "out")[1]


@pytest.mark.parametrize(
    ("given", "code", "message"),
    [
        (("--adapter", "=x"), 4, "adapter '=x' has no name; give NAME=DIR"),
        (("--adapter", "nowhere"), 4, "no such adapter: nowhere"),
        (("--adapter", "{adapter}", "--engine", "vllm"), 4, "vLLM does not support adapter"),
    ],
)
def test_errors_are_one_line(run, loud_llama, adapter, given, code, message):
    words = [word.format(adapter=adapter) for word in given]
    actual, out, err = run("generate", loud_llama, "--prompt", "a", *words)
    assert message in err
    assert out == ""
    assert len(err.splitlines()) == 1
    assert actual == code


def test_the_base_is_the_default():
    assert EngineConfig().adapter is None
    assert EngineConfig().adapters == ()
