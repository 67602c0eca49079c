"""`quantkit search`: one target, what is printed, and the exit code of a target that is missed."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from quantkit.bit_search import cache_run
from quantkit.bit_search import run as bit_search
from quantkit.cli import main
from quantkit.results import (
    CacheChoice,
    CacheLayerChoice,
    CacheSearchResult,
    CandidateRecord,
    GroupChoice,
    SearchResult,
)


def result(**changes):
    given = {
        "model": "demo",
        "recipe": "demo-bits-4.5.yaml",
        "base": "gptq-int4",
        "target": "bits<=4.5",
        "reached": True,
        "bits_per_weight": 4.49,
        "output_bytes": 2_000_000,
        "candidates": (CandidateRecord(name="int4:32", bits_per_weight=4.5, sum_kl=0.004),),
        "groups": (
            GroupChoice(
                layer=0,
                group="q/k/v",
                modules=("a", "b", "c"),
                num_weights=9,
                choice="int5:32",
                bits_per_weight=5.5,
                kl=0.001,
            ),
        ),
        "data": "demo",
        "num_tokens": 8192,
        "sum_kl": 0.0029,
        "expected_kl": 0.0030,
        "measured_kl": 0.0031,
        "search_kl": 0.0027,
        "notes": ("left out int2:128: no",),
    }
    return SearchResult(**{**given, **changes})


@pytest.fixture
def run(monkeypatch):
    """The command with a search that returns what the test says, and what it was asked."""
    calls = []

    def invoke(*args, **changes):
        monkeypatch.setattr(bit_search, "search_recipe", lambda *a, **k: calls.append(a) or result(**changes))
        return CliRunner().invoke(main, ["search", *args]), calls

    return invoke


def test_what_was_expected_measured_and_chosen_is_printed(run):
    done, calls = run("--bits", "4.5", "--candidates", "int4,int5:32", "--quiet")
    assert done.exit_code == 0, done.output
    shown = " ".join(done.output.split())
    for text in ("0.00300 on demo (0.00270 on the tokens", "0.00310 (expected -3 %)", "int5:32", "left out int2:128"):
        assert text in shown
    model, target, options = calls[0]
    assert (model, target.text, options.candidates) == (None, "bits<=4.5", ("int4", "int5:32"))
    assert (options.engine, options.max_tokens, options.resume) == ({}, 8192, True)  # defaults are the search's
    assert "quantkit quantize --recipe demo-bits-4.5.yaml" in shown


def test_json_is_the_whole_result(run):
    done, _ = run("--size", "2MiB", "--json")
    assert SearchResult.from_dict(json.loads(done.stdout)) == result()


def test_a_missed_target_ends_with_three(run, monkeypatch, capsys):
    missed = {"reached": False, "target": "recovery>=99", "recovery": 98.2}
    run(**missed)
    with pytest.raises(SystemExit) as ended:
        main(["search", "--recovery", "99", "--quiet"])
    assert ended.value.code == 3
    assert "recovery>=99 was not reached" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["search", "--recovery", "99", "--json"])
    assert ended.value.code == 3


def test_a_kv_cache_alone(monkeypatch):
    layers = [
        CacheLayerChoice(layer=n, keys="int4", values=values, key_kl=0.001, value_kl=0.002)
        for n, values in enumerate(("int2", "int8"))
    ]
    choice = CacheChoice(
        bits=3.9,
        layers=tuple(layers),
        uniform={"int4 keys and int2 values": 0.05},
        num_tokens=512,
        sum_kl=0.006,
        search_kl=0.0061,
        measured_kl=0.0064,
    )
    found = CacheSearchResult(
        model="./m", recipe="m.yaml", base="kv-cache", target="kv_bits<=4", kv_cache=choice, data="mine"
    )
    calls = []
    monkeypatch.setattr(cache_run, "search_cache", lambda *a, **k: calls.append(a) or found)
    done = CliRunner().invoke(main, ["search", "./m", "--kv-bits", "4", "--quiet"])
    assert done.exit_code == 0, done.output
    shown = " ".join(done.output.split())
    for text in ("3.900 bits per key or value", "KL while decoding 0.00640", "int4 keys and int2 values: 0.05000"):
        assert text in shown
    assert "quantkit quantize ./m --recipe m.yaml --verify" in shown
    model, target, options = calls[0]
    assert (model, target.kv_bits, options.recipe.scheme.default) == ("./m", 4.0, None)
    done = CliRunner().invoke(main, ["search", "./m", "--kv-bits", "4", "--json"])
    assert CacheSearchResult.from_dict(json.loads(done.stdout)) == found


def test_one_target_is_needed_and_only_one(run):
    for args in ((), ("--bits", "4", "--kl", "0.1")):
        done, calls = run(*args)
        assert done.exit_code == 2
        assert "give exactly one of --bits, --size, --kl and --recovery; --kv-bits can be added" in done.output
        assert not calls
