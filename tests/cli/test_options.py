"""Options made from dataclasses: what was given arrives, of the right type, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from quantkit.benchmark.options import BenchmarkOptions
from quantkit.bit_search.options import SearchOptions, SearchTarget
from quantkit.cli._options import as_arguments, option_group, runtime_options, settings_of
from quantkit.evaluate.options import EvaluationOptions
from quantkit.quantities import parse_bytes
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.types import SamplingParams
from quantkit.settings import setting


@dataclass(frozen=True, kw_only=True)
class Sample:
    count: int = setting(3, "How many.", flag="--count", minimum=1)
    share: float | None = setting(None, "Of all.", flag="--share", above=0, below=1, kind=float, shown="all")
    sizes: tuple[int, ...] = setting((1, 8), "Sizes.", flag="--sizes", minimum=1, commas=True)
    folders: tuple[Path, ...] = setting((), "Folders.", flag="--folder", kind=Path)
    fast: bool = setting(False, "Fast.", flag="--fast")
    resume: bool = setting(True, "Resume.", flag="--resume/--no-resume")
    kind: str = setting("a", "Kind.", flag="--kind", choices=("a", "b"))
    names: tuple[str, ...] = setting(("x",), "Names.", flag="-n --names A,B", choices=("x", "y"), commas=True)
    size: int | None = setting(None, "Bytes.", flag="--size", read=parse_bytes)
    silent: int = 5  # has no flag


def call(decorate, *args):
    """What a command with these options gets, and what it prints."""
    received = {}

    @click.command()
    @decorate
    def command(**given):
        received.update(given)

    done = CliRunner().invoke(command, list(args))
    return received, done


SAMPLE = option_group("given", settings_of(Sample))


def test_nothing_given_is_an_empty_dict_and_the_defaults_are_those_of_the_class():
    received, _ = call(SAMPLE)
    assert received == {"given": {}}
    assert Sample(**received["given"]) == Sample()


def test_what_is_given_arrives_in_the_types_of_the_fields():
    line = "--count 2 --share 0.5 --sizes 4,5 --sizes 6 --folder x --folder y --fast --no-resume --kind b"
    line += " -n x,y --size 2KiB"
    received, done = call(SAMPLE, *line.split())
    assert done.exit_code == 0, done.output
    assert received["given"] == {
        "count": 2,
        "share": 0.5,
        "sizes": (4, 5, 6),
        "folders": (Path("x"), Path("y")),
        "fast": True,
        "resume": False,
        "kind": "b",
        "names": ("x", "y"),
        "size": 2048,
    }


def test_help_has_each_sentence_with_its_default():
    words = " ".join(call(SAMPLE, "--help")[1].output.split())
    for text in ("How many. [default: 3] [x>=1]", "Of all. [default: all] [0<x<1]", "Sizes. [default: 1,8]"):
        assert text in words
    assert "-n, --names A,B Names. [default: x]" in words
    assert "silent" not in words


@pytest.mark.parametrize(
    "line",
    [
        "--count 0",
        "--count x",
        "--share nan",
        "--share 1",
        "--sizes 1,0",
        "--sizes 1,x",
        "--kind c",
        "-n x,z",
        "--silent 1",
    ],
)
def test_what_no_field_takes_is_refused(line):
    received, done = call(SAMPLE, *line.split())
    assert (received, done.exit_code) == ({}, 2)


def test_some_fields_with_other_defaults_shown():
    decorate = option_group("given", settings_of(Sample, "kind", "count"), shown={"count": "all of them"})
    _, done = call(decorate, "--help")
    words = " ".join(done.output.split())
    assert "How many. [default: all of them]" in words
    assert "--fast" not in words
    assert words.index("--kind") < words.index("--count")


def test_names_of_recipe_fields_arrive_as_they_are():
    decorate = option_group("given", {"calibration.samples": setting(None, "Samples.", flag="--samples", minimum=1)})
    assert call(decorate, "--samples", "4")[0] == {"given": {"calibration.samples": 4}}


@pytest.mark.parametrize(
    "kind",
    [EngineConfig, SamplingParams, BenchmarkOptions, EvaluationOptions, SearchOptions, SearchTarget],
)
def test_every_option_of_a_class_fills_a_field_and_has_a_sentence(kind):
    settings = settings_of(kind)
    assert settings
    for field in settings.values():
        assert field.metadata["flag"].startswith("-")
        assert field.metadata["text"].endswith((".", "GiB."))


def test_the_engine_s_options_are_keywords_of_its_configuration():
    received, _ = call(runtime_options, "--kv-memory", "4GiB", "--threads", "2", "--head", "int8")
    assert received == {"engine": {"memory": "4GiB", "threads": 2, "head_dtype": "int8"}}
    assert parse_bytes(EngineConfig(**received["engine"]).memory) == 4 << 30


def test_values_as_words_give_the_same_values_again():
    given = {"count": 5, "folders": (Path("x"), Path("y")), "fast": False, "resume": False, "names": ("y", "x")}
    words = as_arguments(settings_of(Sample), given)
    assert words == ["--count", "5", "--folder", "x", "--folder", "y", "--no-resume", "--names", "y", "--names", "x"]
    assert call(SAMPLE, *words)[0]["given"] == {name: value for name, value in given.items() if name != "fast"}
