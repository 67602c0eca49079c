# ruff: noqa: RUF001 - the sign of times is meant
"""The GPU benches without a GPU: the page that committed figures give, the generator, the time limits, a rehearsal."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.gpu.interpreter import is_too_old, needs_triton

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "evals/gpu"
META = {
    "device": "Test GPU",
    "torch": "2.13",
    "triton": "3.9",
    "python": "3.12",
    "cuda": "13.0",
    "commit": "0123456789abcdef",
    "copy_bandwidth": 4e12,
    "gemm_rate": 8e14,
}


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run([*command], capture_output=True, text=True, cwd=ROOT, env=environment, check=False)


def page(*arguments: str) -> str:
    done = run(sys.executable, str(GPU / "page.py"), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_committed_page_is_what_the_results_give(tmp_path):
    """Both ways: a figure without its file, and a file whose figures are not on the page, make a difference."""
    committed = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    (tmp_path / "page.md").write_text(committed, encoding="utf-8")
    page("--write", str(tmp_path / "page.md"))
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == committed, "run: python evals/gpu/page.py --write ..."


def write(folder: Path, part: str, rows: list[dict[str, object]], **meta: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{part}.json").write_text(json.dumps({"meta": {**META, **meta}, "rows": rows}))


def linear(kind: str, m: int, us: float) -> dict[str, object]:
    shares = {"speedup": 100 / us, "share_of_copy": 20 / us, "share_of_gemm": 10 / us}
    return {
        "shape": "8192 squared",
        "n": 8192,
        "k": 8192,
        "m": m,
        "kind": kind,
        "us": us,
        "p10": us,
        "p90": us,
        **shares,
    }


@pytest.fixture
def results(tmp_path):
    """Figures that nobody measured."""
    folder = tmp_path / "results"
    rows = [linear("cublas bf16", 1, 100.0), linear("quantkit w4a16 g128", 1, 80.0)]
    rows += [{"kind": "quantkit w4a16 g128", "shape": "8192 squared", "m": 4, "error": "RuntimeError: out of luck"}]
    write(folder, "linears", rows)
    write(folder, "sanitizer", [{"kind": "compute-sanitizer", "absent": "peer not present: no device"}])
    case = {"batch": 32, "context": 8192, "p10": 1.0, "p90": 1.0, "share_of_copy": 0.9}
    kinds = {"quantkit bf16": 100.0, "quantkit int8": 50.0, "torch sdpa bf16, contiguous": 110.0}
    attention = [{**case, "kind": kind, "us": us, "speedup_to_own_bf16": 100 / us} for kind, us in kinds.items()]
    write(folder, "attention", attention)
    step = {"batch": 1, "context": 1024, "kv": "auto", "share_of_copy": 0.8}
    steps = [{**step, "weights": "bf16", "eager_ms": 9.0, "graph_ms": 4.0}]
    steps += [{**step, "weights": "w4a16 head8", "eager_ms": 8.0, "graph_ms": 2.0}]
    write(folder, "end_to_end", steps)
    write(folder, "peer", [{"kind": "transformers generate", "batch": 1, "context": 1024, "step_ms": 20.0}])
    gptq = {"kind": "gptq-int4 g128", "model_minutes": 5.0, "peak_device_bytes": 5e9, "layer_seconds": 9.0}
    write(folder, "quantization", [gptq])
    return folder


def test_the_page_shows_rows_beside_their_base_and_names_what_is_missing(results):
    text = page("--results", str(results))
    assert "### Test GPU" in text
    assert "copy 4.00 TB/s, large bf16 product 800 TFLOP/s" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| 8192 squared | 1 | quantkit w4a16 g128 |")]
    assert "| 1.25× |" in row
    assert "- sanitizer: compute-sanitizer: peer not present: no device" in text
    assert "- linears: quantkit w4a16 g128, 8192 squared, 4: RuntimeError: out of luck" in text


def test_a_rehearsal_is_no_figure(results):
    write(results, "smoke", [], rehearsal=True)
    assert "no figures of a GPU" in page("--results", str(results))


def test_pages_say_not_yet_run_only_while_no_result_is_there(results, monkeypatch):
    """Those that name the kernels, without results and with made-up ones."""
    monkeypatch.syspath_prepend(str(ROOT / "evals"))
    made = importlib.import_module("pages").generator("gpu/page.py")
    for folder, is_there in ((results / "nothing", False), (results.parent, True)):
        folders = made.gpu_folders(folder)
        for text in (made.standing(folders), made.section(folders)):
            assert ("not yet run on a GPU" in text) == (not is_there)
            assert ("Test GPU" in text) == is_there


def test_predictions_stand_beside_what_is_measured(results):
    row = {"model": "demo", "recipe": "awq-int4", "stage": "quantize", "seconds": 4.0, "predicted_seconds": 3.0}
    write(results, "main_job", [row])
    (results / "state").write_text("smoke done\nw4 unfinished\nw4 dead its process ended with 1: no such library\n")
    text = page("--results", str(results))
    assert "| demo | awq-int4 | quantize | 4 | 3 |" in text
    assert "- w4: dead its process ended with 1: no such library" in text
    assert "- smoke" not in text


def parts() -> list[list[str]]:
    lines = [line.split() for line in (GPU / "parts.txt").read_text().splitlines()]
    return [words for words in lines if words[0] != "#"]


def test_all_parts_fit_into_one_call():
    """Seconds of each group of parts; what is left of 480 is for starting and for packing what comes back."""
    seconds = {words[0]: int(words[1]) for words in parts()}
    groups = [
        (40, ["smoke"]),
        (60, ["main_job"]),
        (120, ["steps", "peer"]),
        (80, ["w4", "kv"]),
        (60, ["quantization"]),
        (95, ["tests", "sanitizer"]),
    ]
    assert [name for _, names in groups for name in names] == list(seconds)
    assert [sum(seconds[name] for name in names) for _, names in groups] == [most for most, _ in groups]
    assert sum(seconds.values()) <= 460
    assert all((GPU / words[2]).exists() for words in parts())


KILLED = {"w4"}
TIMES = {"us", "p10", "p90", "how", "kind", "share_of_copy", "share_of_gemm"}


def call_run(folder: Path, *words: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    places = {"WORK": folder, "OUT": folder / "out", "CARRIED": folder, "TRITON_CACHE_DIR": folder / "cache"}
    variables = {name: str(place) for name, place in places.items()}
    return run("bash", str(GPU / "run.sh"), "--rehearse", *words, PYTHON=python, REHEARSAL="20", **variables)


def rehearse(folder: Path, *names: str) -> dict[str, dict[str, Any]]:
    """What parts write that run through Triton's interpreter: machine, versions, commit, and rows with times."""
    if is_too_old():
        pytest.skip("Triton before 3.9 with NumPy from 2.4 on cannot interpret loops")
    done = call_run(folder, *names)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    written = {path.stem: json.loads(path.read_text()) for path in (folder / "results/rehearsal").glob("*.json")}
    for name, part in written.items():
        assert part["meta"].keys() >= {"device", "torch", "triton", "python", "commit", "copy_bandwidth"}, name
        assert part["rows"], name
        assert [row for row in part["rows"] if "error" in row] == [], name
        assert all(row["absent"].startswith("peer not present: ") for row in part["rows"] if "absent" in row), name
    assert "no figures of a GPU" in (folder / "results/rehearsal/performance.md").read_text()
    return written


def check_times(part: dict[str, Any], ratio: str) -> None:
    measured = [row for row in part["rows"] if "absent" not in row]
    assert all(row.keys() >= {*TIMES, ratio} for row in measured)
    assert any("Triton" in row.get("kernel", "Triton") for row in measured)


@needs_triton
@pytest.mark.slow
def test_a_part_runs_on_tiny_shapes(tmp_path):
    """The others: `evals/gpu/run.sh --rehearse`, which takes minutes."""
    check_times(rehearse(tmp_path, "w4")["linears"], "speedup")


def measured(row: dict[str, Any]) -> dict[str, Any]:
    """What a row is about, and its time."""
    return {name: row.get(name) for name in ("shape", "m", "kind", "family", "case", "file", "us", "error")}


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("words", [words for words in parts() if words[0] in KILLED], ids=lambda words: words[0])
def test_what_a_part_has_measured_survives_its_end(tmp_path, words):
    """Killed at its first row, or before; what is in the archive is whole."""
    _, _, program, *arguments = words
    places = {"RESULTS": str(tmp_path / "results/rehearsal"), "OUT": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(GPU / program), *arguments, "--device", "cpu", "--tiny"]
    environment = {**os.environ, **places, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    rows: list[Any] = []
    while process.poll() is None and not rows:
        time.sleep(0.05)
        for path in (tmp_path / "results/rehearsal").glob("*.json"):
            rows = json.loads(path.read_text())["rows"]
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert rows
    run(sys.executable, str(GPU / "results.py"), "close", words[0], "137", "1", **places)
    with tarfile.open(tmp_path / "results.tar.gz") as tar:
        (name,) = [name for name in tar.getnames() if name.endswith(".json")]
        file = tar.extractfile(name)
        assert file is not None
        kept = json.load(file)
    # A row that was read while others of its shape were measured may have got its shares of them since.
    assert [measured(row) for row in kept["rows"][: len(rows)]] == [measured(row) for row in rows]
    assert "running" not in kept
