"""`quantkit tune` as its users see it: what it prints, what it writes, and what it says where there is no GPU."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from quantkit.benchmark import tune_cases, tune_device
from quantkit.benchmark.options import TuneOptions
from quantkit.benchmark.tune import Case, Outcome
from quantkit.cli import main
from quantkit.kernels import gpu as gpu_kernels
from quantkit.kernels.gpu import choices, tuned

ROOT = Path(__file__).parents[2]
NARROW = choices.Tile(block_m=8, block_n=32, warps=2, stages=1, programs=4)


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("QUANTKIT_TUNE_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(tuned, "_SHIPPED", tmp_path / "shipped")
    runner = CliRunner()
    return lambda *args: runner.invoke(main, ["tune", *args])


def entry(outputs=4096, choice=NARROW, ratio=1.5):
    return tuned.TunedChoice(
        kernel="product",
        kind="4 bits, groups of 128, span 64",
        sizes={"rows": 1, "outputs": outputs, "inputs": 4096},
        choice=choice,
        microseconds=10.0,
        default_microseconds=10.0 * ratio,
        ratio=ratio,
    )


def table(*entries, device="GPU"):
    return tuned.TunedTable(
        device=device, capability=90, versions={"quantkit": "1", "torch": "2", "triton": "3"}, entries=entries
    )


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which every case takes as long as the fake search says; `asked` is what the command asked for."""
    asked = {}

    def measure(options, *, report):
        asked.update(options=options)
        entries = entry(), entry(8192, choices.default_product(1, 90), 1.0)
        outcomes = [
            Outcome(case=case(one), entry=one, num_tried=9, dropped={"spills": 2} if one.ratio > 1 else {})
            for one in entries
        ]
        outcomes.append(
            Outcome(case=case(entry(1)), entry=None, num_tried=0, dropped={}, problem="the default: spills")
        )
        for number, outcome in enumerate(outcomes, 1):
            report(outcome, number, 5)
        report(None, 4, 5)
        return tune_device.Tuning(
            table=replace(table(*entries), path=Path("gpu.json")),
            outcomes=tuple(outcomes),
            num_kept=1,
            num_left=1,
            seconds=12.0,
        )

    monkeypatch.setattr(tune_device, "tune_device", measure)
    return asked


def case(one):
    label = f"int4 g128, {one.sizes['outputs']} x 4096, 1 rows"
    return Case(kernel=one.kernel, kind=one.kind, sizes=one.sizes, label=label, default=NARROW, candidates=())


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so_in_one_line(run):
    for device in ("auto", "cpu"):
        answer = run("--device", device)
        assert (answer.exit_code, answer.stdout) == (4, "")
        assert answer.stderr.startswith("error: there is no CUDA device here to tune for")
        assert answer.stderr.count("\n") == 1
    answer = run("--json", "--device", "cuda:3")
    assert answer.exit_code == 4
    assert json.loads(answer.stdout)["exit_code"] == 4


def test_without_triton_it_names_what_to_install(run, monkeypatch):
    monkeypatch.setattr(tune_device, "pick_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(gpu_kernels, "is_installed", lambda: False)
    answer = run()
    assert answer.exit_code == 4
    assert "pip install 'quantkit[cuda]'" in answer.stderr


def test_the_table_the_progress_and_what_is_left(run, gpu):
    answer = run()
    assert answer.exit_code == 0
    lines = answer.stdout.splitlines()
    assert re.fullmatch(r"kernel +shape +default us +tuned us +ratio *", lines[0])
    assert re.fullmatch(r"product +int4 g128, 4096 x 4096, 1 rows +15\.0 +10\.0 +1\.50 *", lines[1])
    assert re.fullmatch(r"product +int4 g128, 8192 x 4096, 1 rows +10\.0 +10\.0 +1\.00 *", lines[2])
    assert "the default: spills" in lines[3]
    assert lines[-1] == "2 measured in 12 s, 1 known before, 1 left: the same command goes on with them; gpu.json"
    assert answer.stderr.splitlines() == [
        "1/5 int4 g128, 4096 x 4096, 1 rows: 10.0 us, 1.50 times as fast as the default (9 candidates, 2 spills)",
        "2/5 int4 g128, 8192 x 4096, 1 rows: 10.0 us, the default stays (9 candidates)",
        "3/5 int4 g128, 1 x 4096, 1 rows: the default: spills",
    ]
    assert run("--quiet").stderr == ""


def test_json(run, gpu):
    answer = run("--json")
    document = json.loads(answer.stdout)
    assert answer.stderr == ""
    assert (document["file"], document["device"], document["finished"], document["known_before"], document["left"]) == (
        *("gpu.json", "GPU"),
        *(3, 1, 1),
    )
    assert document["dropped"] == {"spills": 2}
    assert document["failed"] == {"int4 g128, 1 x 4096, 1 rows": "the default: spills"}
    assert document["entries"][0] == tuned.to_entry(entry())


def test_options_arrive(run, gpu, tmp_path):
    run()
    assert gpu["options"] == TuneOptions()
    line = (
        "model --shapes 1B --shapes 70B --bits 8 --group 0 --asymmetric --rows 1,4 --batch 2 --context 99 "
        "--kv-cache int8,auto --seconds 9 --again -o x.json --device cuda:1"
    )
    assert run(*line.split()).exit_code == 0
    assert gpu["options"] == TuneOptions(
        model="model",
        shapes=("1B", "70B"),
        bits=8,
        group=0,
        asymmetric=True,
        rows=(1, 4),
        batches=(2,),
        context=99,
        kv_types=("int8", "auto"),
        seconds=9,
        again=True,
        output=Path("x.json"),
        device="cuda:1",
    )
    run("--kv-cache", "none")
    assert gpu["options"].kv_types == ()


@pytest.mark.parametrize(
    "words",
    [("--shapes", "9B"), ("--bits", "3"), ("--rows", "0"), ("--kv-cache", "int9"), ("--seconds", "0"), ("a", "b")],
    ids=" ".join,
)
def test_usage(run, words):
    assert run(*words).exit_code == 2


def test_which_shapes_are_meant(monkeypatch, models):
    names = []
    monkeypatch.setattr(tune_cases, "shapes_of_preset", lambda name, **kind: names.append((name, kind)))
    tune_cases.read_shapes(TuneOptions())
    tune_cases.read_shapes(TuneOptions(shapes=("1B", "70B"), bits=8, group=0))
    (shapes,) = tune_cases.read_shapes(TuneOptions(model=str(models / "out")))
    assert [name for name, _ in names] == ["8B", "1B", "70B"]
    assert names[-1][1] == {"bits": 8, "group": None, "symmetric": True}
    assert shapes.linears


def test_no_such_model(run, monkeypatch):
    monkeypatch.setattr(tune_device, "find_gpu", lambda name: torch.device("cuda", 0))
    answer = run("./not-there")
    assert answer.exit_code == 4
    assert "not-there" in answer.stderr


def test_a_run_from_end_to_end(run, monkeypatch, tmp_path):
    """Everything but the GPU: cases of a preset, a problem in its place, the file, and that launches ask it."""
    from contextlib import contextmanager, nullcontext

    class Problem:
        def check(self, choice):
            return ""

        def times(self, among, samples):
            fast = {"Tile": 5.0}
            return [[fast.get(type(one).__name__, 10.0) + getattr(one, "block_n", 0) / 1000] * samples for one in among]

    monkeypatch.setattr(tune_device, "find_gpu", lambda name: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Test GPU")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(tune_device, "opener", lambda device, dtype: contextmanager(lambda case: iter([Problem()])))
    answer = run("--shapes", "1B", "--rows", "1,16", "--kv-cache", "int8", "--batch", "1", "--json")
    assert answer.exit_code == 0, answer.stderr
    document = json.loads(answer.stdout)
    assert document["file"] == str(tmp_path / "user" / "test-gpu.json")
    assert (document["finished"], document["left"]) == (10, 0)
    assert len(tuned.read(tuned.user_file("Test GPU"), "Test GPU").entries) == 10
    assert (
        json.loads(run("--shapes", "1B", "--rows", "1,16", "--kv-cache", "int8", "--batch", "1", "--json").stdout)[
            "known_before"
        ]
        == 10
    )


def test_list_without_anything(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    answer = run("--list")
    assert (answer.exit_code, answer.stdout) == (
        0,
        "no GPU here and no file of tuned choices; kernels run with their defaults\n",
    )
    assert json.loads(run("--list", "--json").stdout) == {"files": []}


def test_list(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GPU One")
    tuned.write(tuned.user_file("GPU One"), table(entry(), entry(1), device="GPU One"))
    tuned.write(tuned.shipped_file("GPU Two"), table(entry(), device="GPU Two"))
    tuned.user_file("broken").write_text("{")
    files = {Path(item["file"]).name: item for item in json.loads(run("--list", "--json").stdout)["files"]}
    assert len(files) == 3
    listed = json.loads(run("--list", "--json").stdout)["files"]
    assert [(item["device"], item["in_force"], item["entries"]) for item in listed] == [
        ("GPU One", True, 2),
        ("GPU One", False, None),
        ("broken", False, None),
        ("GPU Two", False, 1),
    ]
    assert "is not valid JSON" in listed[2]["problem"]
    lines = run("--list").stdout
    assert "there is none" in lines
    assert "quantkit 1, torch 2, triton 3" in lines


def test_help_names_everything_and_ends_with_examples(run):
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    shown = run("--help").stdout
    assert shown.splitlines()[-1].strip().startswith("quantkit tune")
    for option in re.findall(r"--[a-z-]+", shown):
        assert option in text, option
