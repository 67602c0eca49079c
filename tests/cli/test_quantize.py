"""`quantkit quantize`: what it passes on, what it says meanwhile and at the end."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import sys

import pytest
from rich.console import Console

from quantkit.cli import main
from quantkit.cli._output import Output
from quantkit.cli._progress import Bar, Log, listening, showing_layers
from quantkit.compress import pipeline
from quantkit.compress.pipeline.state import SILENT, Listener
from quantkit.compress.recipe import load
from quantkit.results import CompressionResult, LayerRecord, LinearRecord
from tests import forked


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


def test_a_mistake_in_the_recipe_fails_before_the_pipeline(invoke, calls):
    answer = invoke("quantize", "--recipe", "awq-int", "--json")
    assert answer.exit_code == 4
    assert "did you mean 'awq-int4'?" in json.loads(answer.stdout)["error"]
    assert invoke("quantize", "--recipe", "rtn-int8", "--samples", "4").exit_code == 4
    assert calls == {}


def test_options_reach_the_recipe_and_the_pipeline(invoke, calls):
    line = (
        "quantize some/model --recipe gptq-int4 -o out --set weights.group_size=32 --set steps.gptq.damping=0.05 "
        "--calibration my.txt --samples 3 --sequence-length 17 --format dense --seed 5 --device cpu "
        "--activations disk --no-resume --overwrite"
    )
    answer = invoke(*line.split())
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


def test_what_is_not_given_is_left_to_the_recipe_and_the_pipeline(invoke, calls):
    invoke("quantize", "--recipe", "gptq-int4")
    assert calls == {"model": None, "recipe": load("gptq-int4"), "output": None}


def test_a_calibration_file_is_taken_as_it_is_written(invoke, calls):
    invoke("quantize", "--recipe", "gptq-int4", "--calibration", "a: [b] #c.txt")
    assert calls["recipe"].calibration.data == "a: [b] #c.txt"


def test_the_closing_table_tells_what_was_done(invoke, calls):
    out = invoke("quantize", "--recipe", "rtn-int4").stdout
    for part in ("demo", "rtn-int4 (compressed-tensors)", "14 linears quantized, 1 ignored", "4.500"):
        assert part in out
    for part in ("3.0 MiB → 1.0 MiB (3.00x smaller)", "4 min 12 s: gptq 4 min 10 s, load 2.0 s", "512.0 MiB"):
        assert part in out
    for part in ("model.layers.1.mlp.up_proj", "0.0625", "0.0900", "next: quantkit inspect"):
        assert part in out


def test_a_warning_is_told_once(invoke, calls):
    answer = invoke("quantize", "--recipe", "rtn-int4")
    assert answer.stderr.count("warning: ") == 1
    assert "warning" not in answer.stdout


def test_json_is_the_result_and_nothing_else(invoke, calls):
    answer = invoke("quantize", "--recipe", "rtn-int4", "--json")
    assert json.loads(answer.stdout) == json.loads(json.dumps(result().to_dict()))
    assert answer.stderr == ""


def test_quiet_has_a_result_and_no_progress(invoke, calls):
    answer = invoke("quantize", "--recipe", "rtn-int4", "--quiet")
    assert answer.stderr == ""
    assert "bits per weight" in answer.stdout


def interrupted(arguments, stdout):
    """`quantkit ...` that is sent a Ctrl-C after its first layer."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
    Listener.layer_finished = lambda self, record: os.kill(os.getpid(), signal.SIGINT)
    with stdout.open("w") as stream, contextlib.redirect_stdout(stream):
        main(arguments)


def test_an_interrupted_run_exits_with_130_and_the_same_command_resumes(invoke, tmp_path):
    options = ["--recipe", "gptq-int4", "--samples", "2", "--sequence-length", "32"]
    options += ["-o", str(tmp_path / "out"), "--json"]
    assert forked.run(interrupted, ["quantize", *options], tmp_path / "stdout") == 130
    assert (
        json.loads((tmp_path / "stdout").read_text())["error"]
        == "interrupted; to continue quantize, search or distill, run the same command again"
    )
    assert not (tmp_path / "out").exists()
    answer = invoke("quantize", *options)
    assert answer.exit_code == 0
    assert json.loads(answer.stdout)["resumed_layers"] == 1


def test_without_a_terminal_each_layer_is_a_line_on_stderr(invoke, calls):
    lines = invoke("quantize", "--recipe", "rtn-int4").stderr.splitlines()
    plan = "plan: 2 layers, 1 reused from an interrupted run, 4 samples, about 1.0 GiB of memory"
    assert lines[0] == f"{plan} at the peak"
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


def test_in_a_file_a_line_every_10_seconds_tells_what_is_done(monkeypatch, capsys):
    clock = iter((0.0, 4.0, 11.0, 11.0, 20.0))
    monkeypatch.setattr("quantkit.cli._progress.time.monotonic", lambda: next(clock))
    show = showing_layers(Output(as_json=False, quiet=False))
    for done in range(3):
        show(done, 3, f"layers.{done}")
    assert capsys.readouterr().err == "1/3 layers.1\n"
