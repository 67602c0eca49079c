"""Text and YAML of strangers: what fills memory or stack elsewhere is one line here, and what is fine stays fine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from quantkit.compress.recipe import load
from quantkit.errors import DataError, RecipeError
from quantkit.evaluate.tasks import load_suite
from quantkit.safety.untrusted import parse_yaml, read_text, shorten

# Ten to the tenth values in five lines, where a recipe and a suite want a mapping.
ALIASES = "weights: [&a0 [x, x, x, x, x, x, x, x, x, x],\n" + ",\n".join(
    f"&a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)
)
ALIASES += "]\ndescription: [*a9]\n"
BOMBS = {
    "aliases": (ALIASES, "line 2: aliases (*name) are not supported"),
    "an alias of itself": ("weights: &a [*a]", "aliases (*name) are not supported"),
    "nested lists": ("weights: " + "[" * 5000, "nested more than 50 deep"),
    "nested mappings": ("weights: " + "{a: " * 5000, "nested more than 50 deep"),
    "nested dashes": ("weights:\n  " + "- " * 5000, "nested more than 50 deep"),
    "many values": ("weights: [" + "1," * 60_000 + "]", "more than 50000 values"),
    "digits": ("weights: " + "9" * 5000, "a number has 5000 characters"),
    "base 60": ("weights: 1" + ":59" * 5000, "a number has 15001 characters"),
    "a long key": (f"? {'k' * 100_000}\n: 1", "unknown key 'kkk"),
    "one large file": ("# " + "x" * (1 << 20), "more than 1048576 bytes"),
    "no timestamp": ("weights: !!timestamp soon", "not valid YAML"),
    "no truth": ("weights: !!bool maybe", "not valid YAML"),
    "a month 13": ("weights: 2024-13-01", "not valid YAML"),
    "a zero byte": ("weights: a\0b", "not valid YAML"),
    "half a character": ('weights: "\\ud83d"', "line 1: a text has half of a surrogate pair"),
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("reader", [load, load_suite])
def test_a_bomb_is_one_short_line(name, reader, tmp_path):
    text, expected = BOMBS[name]
    path = tmp_path / "bomb.yaml"
    path.write_text(text)
    with pytest.raises((RecipeError, DataError)) as caught:
        reader(str(path))
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)
    if reader is load:
        assert expected in str(caught.value)


def test_aliases_end_a_command_with_exit_code_4_in_little_memory(tmp_path):
    path = tmp_path / "bomb.yaml"
    path.write_text(ALIASES)
    limited = "import resource as r; r.setrlimit(r.RLIMIT_DATA, (3 << 30,) * 2); from quantkit.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", limited, "recipes", "check", str(path)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, "Traceback" in done.stderr) == (4, False), done.stderr[-500:]
    assert "aliases" in done.stderr


def test_what_is_no_file_of_text_is_refused_before_it_is_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "latin.yaml").write_bytes("weights: é".encode("latin-1"))
    for path in sorted(tmp_path.iterdir()):
        for reader in (load, load_suite):
            with pytest.raises((RecipeError, DataError), match=r"not a recipe file|cannot be read as text"):
                reader(str(path))
    with pytest.raises(DataError, match="cannot be read as text"):
        read_text(tmp_path / "a\0b", DataError)


def test_plain_yaml_is_read_as_before():
    text = "a: 1e-3\nb: [0x10, 1_000, 190:20:30, .inf, 2024-01-31, 'x', ~, yes]\nc: {d: &anchor 1}"
    data = parse_yaml(text, "x", DataError)
    assert data["a"] == 0.001
    assert data["b"][:4] == [16, 1000, 685230, float("inf")]
    assert data["c"] == {"d": 1}


def test_short_values_are_written_as_by_repr():
    for value in (1, "x", None, [], (), (1,), {}, {"a": [1, (2, 3)]}, b"x", True, 1.5, {"é": {1: [{}]}}):
        assert shorten(value) == repr(value)
    long = list(range(1000))
    assert shorten(long) == repr(long)[:57] + "..."
    assert shorten("y" * 1000) == repr("y" * 1000)[:57] + "..."


def test_no_value_is_too_deep_or_too_large_to_be_written():
    loop: list = []
    loop.append(loop)
    deep: dict = {}
    for _ in range(100_000):
        deep = {"a": deep}
    for value in (loop, deep, 10**5000):
        assert len(shorten(value)) <= 60
    while deep:  # a deep value is also taken apart step by step
        deep = deep["a"]
