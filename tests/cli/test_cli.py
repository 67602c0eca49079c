"""The command line as its users see it: streams, exit codes, JSON, help, and what it passes on."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from quantkit.cli import REGISTRY, main
from quantkit.cli._errors import explain
from quantkit.cli._output import Output
from quantkit.cli._progress import Bar, Log, listening
from quantkit.compress import pipeline
from quantkit.compress.pipeline.events import SILENT, Listener
from quantkit.compress.recipe import load
from quantkit.errors import AuditError, ModelError, ResourceError
from quantkit.results import CompressionResult, LayerRecord, LinearRecord
from tests import forked

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


def record(index: int = 0) -> LayerRecord:
    linear = LinearRecord(
        name="mlp.up_proj",
        scheme="int4 g32",
        shape=(8, 32),
        bits_per_weight=4.5,
        rounding_error=0.09,
        error=0.0625,
        measure="output",
    )
    return LayerRecord(
        index=index,
        name=f"model.layers.{index}",
        linears=(linear,),
        output_snr_db=21.5,
        notes=(),
        seconds={"load": 1.0, "gptq": 2.5},
        peak_bytes=1 << 20,
    )


def result(**changes) -> CompressionResult:
    fields = {
        "model": "demo",
        "output": "demo-rtn-int4",
        "recipe": "rtn-int4",
        "format": "compressed-tensors",
        "num_layers": 2,
        "num_quantized": 14,
        "ignored": ("lm_head",),
        "bits_per_weight": 4.5,
        "source_bytes": 3 << 20,
        "output_bytes": 1 << 20,
        "layers": (record(0), record(1)),
        "warnings": ("the text is short",),
        "seconds": {"load": 2.0, "gptq": 250.0},
        "peak_bytes": 512 << 20,
        "resumed_layers": 1,
    }
    return CompressionResult(**{**fields, **changes})


@pytest.fixture
def run():
    runner = CliRunner()
    return lambda *args: runner.invoke(main, list(args))


@pytest.fixture
def calls(monkeypatch):
    """What the pipeline is called with; it tells its listener a short story and returns `result()`."""
    received = {}

    def fake(model, recipe, output=None, *, listener, **options):
        received.update(model=model, recipe=recipe, output=output, **options)
        listener.plan({"num_layers": 2, "resumed_layers": 1, "samples": 4, "predicted_bytes": 1 << 30})
        listener.layer_started(1, "model.layers.1")
        listener.phase("gptq")
        listener.warning("something odd")
        listener.layer_finished(record(1))
        return result()

    monkeypatch.setattr(pipeline, "quantize", fake)
    return received


def failing(monkeypatch, error: BaseException) -> None:
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(pipeline, "quantize", fail)


# ---- help


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_ends_with_examples(run, command):
    for flag in ("--help", "-h"):
        answer = run(*command, flag)
        assert answer.exit_code == 0
        assert "Examples:" in answer.stdout
        assert answer.stdout.splitlines()[-1].strip().startswith("quantkit ")


@pytest.mark.parametrize("name", ["", *REGISTRY.names(), "recipes list", "recipes show", "recipes check"])
def test_help_fits_80_columns_and_speaks_in_sentences(run, name):
    text = run(*name.split(), "--help").stdout
    assert [line for line in text.splitlines() if len(line) > 80] == []
    sentences = re.findall(r"^ +-.*?  +([A-Za-z]+ ?[a-z]*)", text, flags=re.MULTILINE)
    assert [words for words in sentences if words.split()[0] in ("Of", "To", "For", "In")] == []
    assert not re.search(r"[a-z]\.\.\.$", text.partition("Commands:")[2], flags=re.MULTILINE)  # a line that was cut off


def test_top_level_help_lists_every_command_file_with_a_line(run):
    files = {path.stem for path in (ROOT / "quantkit" / "cli").glob("*.py") if not path.stem.startswith("_")}
    assert set(REGISTRY.names()) == files
    for name in files:
        assert re.search(rf"^  {name} +\w.*\.$", run("--help").stdout, flags=re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_examples_are_commands_that_parse(run, command):
    lines = run(*command, "--help").stdout.split("Examples:")[1].splitlines()
    for line in filter(None, map(str.strip, lines)):
        words = shlex.split(line.partition(" > ")[0])[1:]
        group, context = main, click.Context(main, resilient_parsing=False)
        while isinstance(group, click.Group):
            name, group, words = group.resolve_command(context, words)
        group.make_context(name, words)


LONG = {("quantize",)}
RUN = [
    pytest.param(one, marks=pytest.mark.slow) if one in LONG else one for one in COMMANDS if one != ("bench",)
]  # whose own take minutes


@pytest.mark.usefixtures("short_samples", "three_items", "quick_ceilings")
@pytest.mark.parametrize("command", RUN, ids=" ".join)
def test_examples_run_one_after_the_other(run, command, tmp_path, monkeypatch):
    lines = run(*command, "--help").stdout.split("Examples:")[1].splitlines()
    monkeypatch.chdir(tmp_path)
    if command == ("generate",):
        assert run("quantize", "--recipe", "rtn-int4", "-o", "demo-awq-int4").exit_code == 0
    for line in filter(None, map(str.strip, lines)):
        call, _, target = line.partition(" > ")
        answer = run(*shlex.split(call)[1:])
        assert answer.exit_code == 0, (line, answer.stderr)
        if target:
            Path(target).write_text(answer.stdout, encoding="utf-8")
    if command == ("quantize",):
        assert len(list(tmp_path.iterdir())) == 6


def test_help_is_fast_and_never_sees_torch():
    code = (
        "import sys; from quantkit.cli import main\ntry: main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    )
    spans = []
    for _ in range(5):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
        spans.append(time.perf_counter() - start)
        assert (done.returncode, done.stderr) == (0, "")
    assert "quantize" in done.stdout
    assert statistics.median(spans) < 1.0


@pytest.mark.parametrize("command", REGISTRY.names())
def test_help_of_every_command_never_sees_torch(command):
    code = (
        f"import sys; from quantkit.cli import main\ntry: main({[command, '-h']})\nfinally: print(sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "'click'" in done.stdout
    assert "'torch'" not in done.stdout
    assert "'rich'" not in done.stdout


def test_the_documentation_names_every_option(run):
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for command in COMMANDS[1:]:
        for option in re.findall(r"--[a-z-]+", run(*command, "--help").stdout):
            assert option in text, (command, option)


def test_version(run):
    assert re.fullmatch(r"quantkit \S+\n", run("--version").stdout)


# ---- streams


def piped(line: str) -> tuple[int, str]:
    """Exit code and stderr of a command line of bash, in which `quantkit` is this one."""
    script = f'quantkit() {{ {shlex.quote(sys.executable)} -m quantkit "$@"; }}; {line}'
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("quantkit --help | sleep 0; exit ${PIPESTATUS[0]}", 141, ""),
        ("quantkit recipes list --json | sleep 0; exit ${PIPESTATUS[0]}", 141, ""),
        ("quantkit recipes list > /dev/full", 5, "error: .*no space left.*\n"),
        ("quantkit recipes list --json > /dev/full", 5, "error: .*no space left.*\n"),
        ("quantkit recipes bogus 2> /dev/full", 2, ""),
        ("quantkit recipes list <&- >&- 2>&-", 0, ""),
        ("quantkit recipes bogus >&- 2>&-", 2, ""),
        ("ulimit -v 200000; quantkit inspect quantkit/demo/model", 5, "error: out of memory: .*\n"),
    ],
)
def test_streams_that_fail_and_too_little_memory_are_one_line_at_most(line, code, message):
    exit_code, error = piped(line)
    assert (exit_code, bool(re.fullmatch(message, error, flags=re.IGNORECASE))) == (code, True), error


@pytest.mark.slow
def test_progress_that_nobody_reads_ends_no_work(tmp_path):
    line = f"quantkit quantize --recipe rtn-int8 -o {tmp_path / 'out'}"
    assert piped(f"{line} 2>&1 >/dev/null | sleep 0; exit ${{PIPESTATUS[0]}}") == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# ---- usage


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
def test_usage_mistakes_exit_with_2(run, args):
    answer = run(*args)
    assert (answer.exit_code, answer.stdout) == (2, "")
    assert "Error: " in answer.stderr
    assert "Traceback" not in answer.stderr
    answer = run(*args, "--json")
    assert answer.exit_code == 2 == json.loads(answer.stdout)["exit_code"]


# ---- errors


def wrapped(error: BaseException) -> Exception:
    """What a library makes of an error while it is imported."""
    outer = RuntimeError("Failed to import the model; read this")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ModelError("config.json is missing"), 4, "error: config.json is missing"),
        (ResourceError("disk is full"), 5, "error: disk is full"),
        (AuditError("a tensor differs"), 1, "error: a tensor differs"),
        (KeyboardInterrupt(), 130, "error: interrupted; quantize, search and tune go on where they stopped"),
        (MemoryError("no"), 5, "error: out of memory: no; when compressing try fewer --samples or --activations disk"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA"), 5, "error: out of memory: CUDA"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), 5, "error: out of memory"),
        (RuntimeError("std::bad_alloc"), 5, "error: out of memory: std::bad_alloc"),
        (ImportError("libx.so: failed to map segment from shared object"), 5, "error: out of memory: libx.so"),
        (RuntimeError("can't start new thread"), 5, "error: out of memory: can't start new thread"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 5, "error: out of memory"),
        (wrapped(MemoryError("9 bytes")), 5, "error: out of memory: 9 bytes; when"),
        (ImportError("no module named x"), 1, "error: ImportError: no module named x; this is a bug"),
        (SystemError("lost"), 1, "error: SystemError: lost; this is a bug"),
        (OSError(errno.ENOSPC, "full", "/x/y"), 5, "error: no space left on the disk of /x/y"),
        (ValueError("two\nlines"), 1, "error: ValueError: two lines; this is a bug; run again with --verbose"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_every_error_is_one_line_and_an_exit_code(run, monkeypatch, error, code, text):
    failing(monkeypatch, error)
    answer = run("quantize", "--recipe", "rtn-int8")
    assert (answer.exit_code, answer.stdout) == (code, "")
    assert answer.stderr.strip().startswith(text)
    assert answer.stderr.strip().count("\n") == 0
    answer = run("quantize", "--recipe", "rtn-int8", "--json")
    assert answer.exit_code == code
    assert json.loads(answer.stdout) == {"error": answer.stderr.strip().removeprefix("error: "), "exit_code": code}


def test_a_system_error_under_a_limit_of_memory_is_want_of_memory(monkeypatch):
    limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (600 << 20, limit))
    assert explain(SystemError("error return without exception set"))[0] == 5


def test_verbose_shows_the_traceback(run, monkeypatch):
    failing(monkeypatch, ValueError("odd"))
    assert "Traceback" not in run("quantize", "--recipe", "rtn-int8").stderr
    answer = run("quantize", "--recipe", "rtn-int8", "--verbose")
    assert "Traceback" in answer.stderr
    assert "in fail" in answer.stderr
    assert answer.exit_code == 1


def test_an_unknown_command_is_explained_too():
    assert explain(click.UsageError("No such command 'x'.")) == (2, "No such command 'x'.")


def test_without_standalone_mode_errors_are_raised():
    with pytest.raises(click.UsageError):
        main(["nonsense"], standalone_mode=False)
    assert main(["recipes", "list", "--json"], standalone_mode=False) is None


def test_a_mistake_in_the_recipe_fails_before_the_pipeline(run, calls):
    answer = run("quantize", "--recipe", "awq-int", "--json")
    assert answer.exit_code == 4
    assert "did you mean 'awq-int4'?" in json.loads(answer.stdout)["error"]
    assert run("quantize", "--recipe", "rtn-int8", "--samples", "4").exit_code == 4
    assert calls == {}


# ---- quantize


def test_options_reach_the_recipe_and_the_pipeline(run, calls):
    line = (
        "quantize some/model --recipe gptq-int4 -o out --set weights.group_size=32 --set steps.gptq.damping=0.05 "
        "--calibration my.txt --samples 3 --sequence-length 17 --format dense --seed 5 --device cpu "
        "--activations disk --no-resume --overwrite"
    )
    answer = run(*line.split())
    assert answer.exit_code == 0, answer.stderr
    recipe = calls.pop("recipe")
    assert recipe.scheme.default.weight.group_size == 32
    assert recipe.steps["gptq"].damping == 0.05
    plan = recipe.calibration
    assert (plan.data, plan.samples, plan.sequence_length) == ("my.txt", 3, 17)
    assert (recipe.format, recipe.seed) == ("dense", 5)
    assert calls == {
        "model": "some/model",
        "output": "out",
        "device": "cpu",
        "activations": "disk",
        "resume": False,
        "overwrite": True,
    }


def test_what_is_not_given_is_left_to_the_recipe_and_the_pipeline(run, calls):
    run("quantize", "--recipe", "gptq-int4")
    assert calls == {"model": None, "recipe": load("gptq-int4"), "output": None}


def test_a_calibration_file_is_taken_as_it_is_written(run, calls):
    run("quantize", "--recipe", "gptq-int4", "--calibration", "a: [b] #c.txt")
    assert calls["recipe"].calibration.data == "a: [b] #c.txt"


def test_the_closing_table_tells_what_was_done(run, calls):
    out = run("quantize", "--recipe", "rtn-int4").stdout
    for part in ("demo", "rtn-int4 (compressed-tensors)", "14 linears quantized, 1 ignored", "4.500"):
        assert part in out
    for part in ("3.0 MiB → 1.0 MiB (3.00x smaller)", "4 min 12 s: gptq 4 min 10 s, load 2.0 s", "512.0 MiB"):
        assert part in out
    for part in ("model.layers.1.mlp.up_proj", "0.0625", "0.0900", "next: quantkit inspect"):
        assert part in out


def test_a_warning_is_told_once(run, calls):
    answer = run("quantize", "--recipe", "rtn-int4")
    assert answer.stderr.count("warning: ") == 1
    assert "warning" not in answer.stdout


@pytest.mark.parametrize(
    ("args", "meant"),
    [(["convert", "x", "--verify"], None), (["quantize", "--verfy"], "--verify"), (["plan", "--devise"], "--device")],
)
def test_a_misspelt_option_is_only_taken_for_one_like_it(run, args, meant):
    answer = run(*args)
    assert answer.exit_code == 2
    assert re.findall("(?i)did you mean '(.*?)'", answer.stderr) == ([meant] if meant else [])


def test_json_is_the_result_and_nothing_else(run, calls):
    answer = run("quantize", "--recipe", "rtn-int4", "--json")
    assert json.loads(answer.stdout) == json.loads(json.dumps(result().to_dict()))
    assert answer.stderr == ""


def test_quiet_has_a_result_and_no_progress(run, calls):
    answer = run("quantize", "--recipe", "rtn-int4", "--quiet")
    assert answer.stderr == ""
    assert "bits per weight" in answer.stdout


def interrupted(arguments, stdout):
    """`quantkit ...` that is sent a Ctrl-C after its first layer."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
    Listener.layer_finished = lambda self, record: os.kill(os.getpid(), signal.SIGINT)
    with stdout.open("w") as stream, contextlib.redirect_stdout(stream):
        main(arguments)


def test_an_interrupted_run_exits_with_130_and_the_same_command_resumes(tmp_path):
    options = ["--recipe", "gptq-int4", "--samples", "2", "--sequence-length", "32"]
    options += ["-o", str(tmp_path / "out"), "--json"]
    assert forked.run(interrupted, ["quantize", *options], tmp_path / "stdout") == 130
    assert (
        json.loads((tmp_path / "stdout").read_text())["error"]
        == "interrupted; quantize, search and tune go on where they stopped when the same command is given again"
    )
    assert not (tmp_path / "out").exists()
    answer = CliRunner().invoke(main, ["quantize", *options])
    assert answer.exit_code == 0
    assert json.loads(answer.stdout)["resumed_layers"] == 1


# ---- progress


def test_without_a_terminal_each_layer_is_a_line_on_stderr(run, calls):
    lines = run("quantize", "--recipe", "rtn-int4").stderr.splitlines()
    plan = "plan: 2 layers, 1 taken over from an interrupted run, 4 samples, about 1.0 GiB of memory"
    assert lines[0] == f"{plan} at the highest"
    assert lines[1] == "warning: something odd"
    assert re.fullmatch(
        r"layer 2/2 model.layers.1: worst error 0.0625 \(mlp.up_proj\), 3.5 s, [\d.]+ [KMG]iB", lines[2]
    )


def test_the_log_says_how_much_time_is_left(capsys):
    log = Log()
    log.plan({"num_layers": 3})
    log.layer_finished(record(0))
    log.layer_finished(record(2))
    first, second = capsys.readouterr().err.splitlines()[1:]
    assert first.endswith("left")
    assert second.endswith("left")


def test_the_bar_names_layer_phase_and_memory():
    stream = io.StringIO()
    bar = Bar(Console(file=stream, force_terminal=True, width=120, markup=False, highlight=False))
    with bar.progress:
        bar.plan({"num_layers": 2, "resumed_layers": 1})
        bar.layer_started(1, "model.layers.1")
        bar.phase("gptq")
        bar.progress.refresh()
        bar.warning("odd [thing]")
        bar.layer_finished(record(1))
    shown = stream.getvalue()
    for part in ("plan: 2 layers", "model.layers.1 gptq", "1/2", "2/2", "iB", "warning: odd [thing]"):
        assert part in shown


def test_the_listener_suits_the_options_and_the_terminal(monkeypatch):
    for quiet, as_json in ((True, False), (False, True)):
        with listening(Output(as_json=as_json, quiet=quiet)) as listener:
            assert listener is SILENT
    for is_terminal, kind in ((False, Log), (True, Bar)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda answer=is_terminal: answer, raising=False)
        with listening(Output(as_json=False, quiet=False)) as listener:
            assert type(listener) is kind


# ---- recipes


def test_recipes_list(run):
    assert all(name in run("recipes", "list").stdout for name in ("awq-int4", "fp8-dynamic", "smoothquant, gptq"))
    listed = json.loads(run("recipes", "list", "--json").stdout)["recipes"]
    assert [entry["name"] for entry in listed] == sorted(entry["name"] for entry in listed)
    assert all(entry["description"] for entry in listed)


def test_recipes_show_prints_the_file_and_with_json_every_default(run, tmp_path):
    shown = run("recipes", "show", "gptq-int4").stdout
    assert shown == (ROOT / "recipes" / "gptq-int4.yaml").read_text()
    data = json.loads(run("recipes", "show", "gptq-int4", "--json").stdout)
    assert data["steps"][0]["gptq"]["block_size"] == 128
    copy = tmp_path / "mine.yaml"
    copy.write_text(shown)
    assert run("recipes", "show", str(copy)).stdout == shown


def test_recipes_check(run, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("weights: {dtype: int4}\nsteps: [gptq, awq]")
    answer = run("recipes", "check", str(path))
    assert answer.exit_code == 0
    assert "mine.yaml: valid" in answer.stdout.replace("\n", "")
    assert "remark: gptq fixes the codes" in answer.stdout
    data = json.loads(run("recipes", "check", str(path), "--json").stdout)
    assert data["valid"]
    assert len(data["remarks"]) == 1
    path.write_text("weights: {dtype: int7}")
    answer = run("recipes", "check", str(path), "--json")
    assert answer.exit_code == 4
    assert "weights.dtype" in json.loads(answer.stdout)["error"]


# ---- inspect


def test_inspect_of_nothing(run, tmp_path):
    answer = run("inspect", str(tmp_path / "nothing"))
    assert answer.exit_code == 4
    assert answer.stderr.startswith("error: no such model directory")


def test_quantize_and_inspect_the_demo_model(run, tmp_path):
    out = tmp_path / "demo"
    answer = run("quantize", "--recipe", "rtn-int8", "-o", str(out), "--json")
    assert answer.exit_code == 0, answer.stderr
    made = json.loads(answer.stdout)
    seen = json.loads(run("inspect", str(out), "--json").stdout)
    assert (seen["format"], seen["recipe"]) == ("compressed-tensors", "rtn-int8")
    assert seen["num_bytes"] == made["output_bytes"]
    assert seen["bits_per_weight"] == pytest.approx(made["bits_per_weight"], rel=1e-3)
    assert len(seen["layers"]) == made["num_layers"]
    shown = run("inspect", str(out)).stdout
    for part in ("int8 channel", "self_attn.q_proj", "embedding", "norms", "worst error"):
        assert part in shown
