"""The command line as its users see it: commands, help, usage."""

from __future__ import annotations

import json
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from quantkit.cli import REGISTRY, main

ROOT = Path(__file__).parents[2]
COMMANDS = [
    (),
    ("quantize",),
    ("inspect",),
    ("convert",),
    ("generate",),
    ("bench",),
    ("recipes",),
    ("recipes", "list"),
    ("recipes", "show"),
    ("recipes", "check"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_ends_with_examples(invoke, command):
    for flag in ("--help", "-h"):
        answer = invoke(*command, flag)
        assert answer.exit_code == 0
        assert "Examples:" in answer.stdout
        assert answer.stdout.splitlines()[-1].strip().startswith("quantkit ")


@pytest.mark.parametrize("name", ["", *REGISTRY.names(), "recipes list", "recipes show", "recipes check"])
def test_help_fits_80_columns_and_speaks_in_sentences(invoke, name):
    text = invoke(*name.split(), "--help").stdout
    assert [line for line in text.splitlines() if len(line) > 80] == []
    sentences = re.findall(r"^ +-.*?  +([A-Za-z]+ ?[a-z]*)", text, flags=re.MULTILINE)
    assert [words for words in sentences if words.split()[0] in ("Of", "To", "For", "In")] == []
    assert not re.search(r"[a-z]\.\.\.$", text.partition("Commands:")[2], flags=re.MULTILINE)  # a line that was cut off


def test_top_level_help_lists_every_command_file_with_a_line(invoke):
    files = {path.stem for path in (ROOT / "quantkit" / "cli").glob("*.py") if not path.stem.startswith("_")}
    assert set(REGISTRY.names()) == files
    for name in files:
        assert re.search(rf"^  {name} +\w.*\.$", invoke("--help").stdout, flags=re.MULTILINE)


def examples(invoke, command):
    lines = invoke(*command, "--help").stdout.split("Examples:")[1].splitlines()
    lines = [line.strip() for line in lines if line.strip()]
    assert lines
    return lines


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_examples_are_commands_that_parse(invoke, command):
    for line in examples(invoke, command):
        program, *words = shlex.split(line.partition(" > ")[0])
        # A command keeps the help options that it was first asked for: those of a child of this context.
        group, context = main, click.Context(main, **main.context_settings)
        while isinstance(group, click.Group):
            name, group, words = group.resolve_command(context, words)
        assert (program, group.make_context(name, words, context).args) == ("quantkit", [])


LONG = {("quantize",)}
RUN = [
    pytest.param(one, marks=pytest.mark.slow) if one in LONG else one for one in COMMANDS if one != ("bench",)
]  # whose own take minutes


@pytest.mark.usefixtures("short_samples", "three_items", "quick_ceilings")
@pytest.mark.parametrize("command", RUN, ids=" ".join)
def test_examples_run_one_after_the_other(invoke, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if command == ("generate",):
        assert invoke("quantize", "--recipe", "rtn-int4", "-o", "demo-awq-int4").exit_code == 0
    for line in examples(invoke, command):
        call, _, target = line.partition(" > ")
        answer = invoke(*shlex.split(call)[1:])
        assert answer.exit_code == 0, (line, answer.stderr)
        if target:
            Path(target).write_text(answer.stdout, encoding="utf-8")
    if command == ("quantize",):
        assert len(list(tmp_path.iterdir())) == 6


def test_help_is_fast_and_never_sees_torch():
    code = (
        "import sys; from quantkit.cli import main\ntry: main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    )

    def seconds() -> float:
        """Of a core, which depend little on what else runs here."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert (done.returncode, done.stderr) == (0, "")
        assert "quantize" in done.stdout
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert any(seconds() < 1.0 for _ in range(3))


HELP = """
import sys
from quantkit.cli import main
for name in sys.argv[1:]:
    try:
        main([name, "-h"])
    except SystemExit as ended:
        print(name, ended.code, sorted({"click", "rich", "torch"} & sys.modules.keys()), file=sys.stderr)
"""


def test_help_of_every_command_never_sees_torch():
    names = REGISTRY.names()
    command = [sys.executable, "-c", HELP, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines() == [f"{name} 0 ['click']" for name in names]


def test_the_documentation_names_every_option(invoke):
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for command in COMMANDS[1:]:
        for option in re.findall(r"--[a-z-]+", invoke(*command, "--help").stdout):
            assert option in text, (command, option)


def test_version(invoke):
    assert re.fullmatch(r"quantkit \S+\n", invoke("--version").stdout)


@pytest.mark.parametrize(
    "args",
    [
        ("quantise",),
        ("quantize",),
        ("quantize", "--recipe", "rtn-int8", "--activations", "tape"),
        ("quantize", "--recipe", "rtn-int8", "--samples", "0"),
        ("quantize", "--recipe", "rtn-int8", "--bogus"),
        ("inspect",),
        ("recipes", "shew"),
    ],
    ids=" ".join,
)
def test_usage_mistakes_exit_with_2(invoke, args):
    answer = invoke(*args)
    assert (answer.exit_code, answer.stdout) == (2, "")
    assert "Error: " in answer.stderr
    assert "Traceback" not in answer.stderr
    answer = invoke(*args, "--json")
    assert answer.exit_code == 2 == json.loads(answer.stdout)["exit_code"]


@pytest.mark.parametrize(
    ("args", "meant"),
    [(["convert", "x", "--verify"], None), (["quantize", "--verfy"], "--verify"), (["plan", "--devise"], "--device")],
)
def test_a_misspelt_option_is_only_taken_for_one_like_it(invoke, args, meant):
    answer = invoke(*args)
    assert answer.exit_code == 2
    assert re.findall(r"(?i)did you mean '?(--[a-z]+)", answer.stderr) == ([meant] if meant else [])
