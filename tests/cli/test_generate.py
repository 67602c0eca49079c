"""`quantkit generate` as its users see it: text on stdout, numbers on stderr, and one line for what cannot be run."""

from __future__ import annotations

import io
import json
import os
import sys
from functools import partial

import pytest
import torch

from quantkit.runtime.model import loader
from tests.helpers import edit_config, edit_tensors, make_model, save_tokenizer
from tests.runtime.mtp_models import make_predictable

PROMPT = "The boys by the mills"


pytestmark = pytest.mark.usefixtures("quick_ceilings")


@pytest.fixture
def run(run):
    """Run `quantkit generate ...`; exit code, stdout, stderr."""
    return partial(run, "generate", "--threads", "1")


def test_text_of_the_demo_model_and_nothing_else_on_stdout(run):
    code, out, err = run("--prompt", PROMPT, "--max-tokens", 8)
    assert code == 0
    assert out.endswith("\n")
    assert len(out.split()) >= 3
    again = run("--prompt", PROMPT, "--max-tokens", 8)
    assert again[1] == out
    assert "TTFT" not in err


def test_statistics_go_to_stderr(run):
    code, out, err = run("--prompt", PROMPT, "--max-tokens", 6, "--stats")
    assert code == 0
    assert "TTFT" not in out
    for word in ("TTFT", "ITL", "tokens/s", "weights", "KV cache", "GB/s", "CPU kernels", "threads"):
        assert word in err
    assert "Table(" not in err  # drawn, not its repr


def test_numbers_with_drafts(run, tmp_path):
    model = make_predictable(tmp_path / "model")  # its MTP head is always right
    save_tokenizer(model)
    words = (model, "--prompt", PROMPT, "--max-tokens", 40, "--speculate", "mtp", "--ignore-eos")
    code, out, _ = run(*words, "--json")
    numbers = json.loads(out)
    assert code == 0
    assert numbers["accepted_tokens"] > 0
    assert numbers["itl_median_s"] > 0
    assert numbers["tokens_per_s"] > 0
    assert numbers["bandwidth_share"] is None
    assert "tokens/s (mean)" in run(*words, "--stats")[2]


def test_json_has_the_text_and_the_numbers(run):
    _, text, _ = run("--prompt", PROMPT, "--max-tokens", 6)
    code, out, err = run("--prompt", PROMPT, "--max-tokens", 6, "--json")
    document = json.loads(out)
    assert code == 0
    assert err == ""
    assert document["text"] == text.removesuffix("\n")
    assert document["new_tokens"] == 6
    assert document["ttft_s"] > 0
    assert document["bandwidth_share"] > 0
    assert document["weight_bytes"] > 6_000_000


def test_the_prompt_may_come_from_stdin(run, monkeypatch):
    _, expected, _ = run("--prompt", PROMPT, "--max-tokens", 5)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode()), encoding="ascii"))
    assert run("--prompt", "-", "--max-tokens", 5)[1] == expected


def test_a_stdin_that_was_closed_is_an_empty_prompt(run, monkeypatch):
    _, expected, _ = run("--prompt", "", "--max-tokens", 5)
    monkeypatch.setattr(sys, "stdin", None)
    assert run("--prompt", "-", "--max-tokens", 5)[:2] == (0, expected)


def test_a_prompt_that_is_no_text(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff one")))
    refused(run, 4, "not UTF-8", options=("--prompt", "-"))
    refused(run, 4, "not UTF-8", options=("--prompt", os.fsdecode(b"\xff one")))


def test_a_system_message_outside_a_conversation(run):
    code, out, err = run("--prompt", PROMPT, "--system", "Be brief.")
    assert (code, out) == (2, "")
    assert "give --chat too" in err


def test_sampling_follows_its_seed(run):
    options = ("--prompt", PROMPT, "--max-tokens", 12, "--temperature", 1.5)
    texts = {seed: run(*options, "--seed", seed)[1] for seed in (1, 2)}
    assert texts[1] != texts[2]
    assert run(*options, "--seed", 1)[1] == texts[1]


def test_speculation_does_not_change_the_text(run):
    options = ("--prompt", "Sums:42+37=", "--max-tokens", 24, "--dtype", "fp32")
    assert run(*options)[1] == run(*options, "--speculate", "ngram")[1]


def refused(run, code, *words, options):
    exit_code, out, err = run(*options)
    assert exit_code == code
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, err
    for word in words:
        assert word in lines[0]


def test_a_prompt_longer_than_the_context(run, monkeypatch):
    no_weights_read(monkeypatch)
    refused(run, 4, "1024", options=("--prompt", "owl " * 1500))


def test_more_tokens_than_fit_names_how_many_do(run, monkeypatch):
    no_weights_read(monkeypatch)
    refused(run, 4, "or less", options=("--prompt", PROMPT, "--max-tokens", 4000))


def test_a_pool_too_small_for_one_request(run, monkeypatch):
    no_weights_read(monkeypatch)
    refused(run, 4, "KV pool", options=("--prompt", PROMPT, "--kv-memory", "64KiB", "--max-length", 512))


def test_an_unreadable_size(run):
    refused(run, 4, "4GiB", options=("--prompt", PROMPT, "--kv-memory", "plenty"))


@pytest.mark.parametrize(
    ("option", "value"), [("--temperature", -1), ("--top-p", 0), ("--top-k", 0), ("--min-p", 2), ("--max-length", 4096)]
)
def test_parameters_out_of_range(run, option, value):
    refused(run, 4, option.removeprefix("--").replace("-", "_"), options=("--prompt", PROMPT, option, value))


def test_chat_needs_a_template(run, monkeypatch):
    no_weights_read(monkeypatch)
    refused(run, 4, "chat template", options=("--prompt", PROMPT, "--chat"))


def test_no_such_model(run, tmp_path):
    refused(run, 4, "no such", options=(tmp_path / "absent", "--prompt", PROMPT))


def test_an_unknown_device_and_type(run):
    refused(run, 4, "tpu", options=("--prompt", PROMPT, "--device", "tpu"))
    refused(run, 4, "int7", options=("--prompt", PROMPT, "--dtype", "int7"))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_types_have_the_names_that_the_help_says(run, dtype):
    code, _, err = run("--prompt", PROMPT, "--max-tokens", 2, "--dtype", dtype, "--stats")
    assert code == 0
    assert "computed in" in err


def test_an_empty_prompt_without_bos(run, tmp_path, monkeypatch):
    model = make_model(tmp_path / "model")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (path := model / name).exists():
            settings = json.loads(path.read_text())
            settings.pop("bos_token", None)
            path.write_text(json.dumps(settings))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["post_processor"] = None
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    no_weights_read(monkeypatch)
    refused(run, 4, "empty", options=(model, "--prompt", ""))


def test_a_draft_of_another_vocabulary(run, tmp_path, monkeypatch):
    draft = make_model(tmp_path / "draft")
    no_weights_read(monkeypatch)
    refused(run, 4, "vocabulary", "260", "1024", options=("--prompt", PROMPT, "--speculate", draft))


def no_weights_read(monkeypatch):
    def read(*_):
        raise AssertionError("weights were read")

    monkeypatch.setattr(loader.CheckpointReader, "tensor", read)


def test_shapes_against_the_config(run, tmp_path, monkeypatch):
    model = make_model(tmp_path / "model")
    edit_tensors(model, model__layers__1__mlp__up_proj__weight=torch.zeros(95, 64))
    no_weights_read(monkeypatch)
    refused(run, 4, "model.layers.1.mlp.up_proj.weight", "95", "96", options=(model, "--prompt", "a"))


def test_a_model_too_large_for_memory(run, tmp_path, monkeypatch):
    model = make_model(tmp_path / "model")
    monkeypatch.setattr("quantkit.runtime.model.expected_tensors.free_bytes", lambda device: 1000)
    no_weights_read(monkeypatch)
    refused(run, 5, "memory", options=(model, "--prompt", "a"))


def test_a_config_that_contradicts_itself(run, tmp_path):
    model = make_model(tmp_path / "model")
    edit_config(model, num_key_value_heads=3)
    refused(run, 4, "num_key_value_heads", options=(model, "--prompt", "a"))
