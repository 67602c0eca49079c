# ruff: noqa: RUF001 - the sign of times is meant
"""The GPU benches without a GPU: the page that committed figures give, the generator, the time limits, a rehearsal."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


def linear(kind: str, m: int, us: float, shape: str = "8192 squared") -> dict[str, object]:
    shares = {"speedup": 100 / us, "share_of_copy": 20 / us, "share_of_gemm": 10 / us}
    return {"shape": shape, "n": 8192, "k": 8192, "m": m, "kind": kind, "us": us, "p10": us, "p90": us, **shares}


@pytest.fixture
def results(tmp_path):
    """Figures that nobody measured."""
    folder = tmp_path / "results"
    rows = [linear("cublas bf16", 1, 100.0), linear("quantkit w4a16 g128", 1, 40.0), linear("torch tinygemm", 1, 50.0)]
    rows += [linear("quantkit w4a16 g128", 1, 50.0, "8B down"), linear("torch _int_mm", 1, 5.0)]
    rows += [{"kind": "torch _scaled_mm", "absent": "peer not present: no device"}]
    rows += [{"kind": "quantkit w8a16", "shape": "8B qkv", "m": 4, "error": "RuntimeError: out of luck"}]
    write(folder, "linears", rows)
    case = {"batch": 32, "context": 8192, "new": 1, "p10": 1.0, "p90": 1.0, "share_of_copy": 0.9}
    kinds = {"quantkit bf16": 100.0, "quantkit int8": 50.0, "torch sdpa bf16, contiguous": 110.0}
    attention = [{**case, "kind": kind, "us": us, "speedup_to_own_bf16": 100 / us} for kind, us in kinds.items()]
    write(folder, "attention", attention)
    step = {"part": "step", "batch": 1, "context": 1024, "kv": "auto", "share_of_copy": 0.8}
    steps = [{**step, "weights": "bf16", "eager_ms": 9.0, "graph_ms": 4.0}]
    steps += [{**step, "weights": "w4a16 head8", "eager_ms": 8.0, "graph_ms": 2.0}]
    engine = {"part": "engine", "batch": 32, "way": "graph, overlap", "step_ms": 5.0, "gpu_ms": 4.0, "host_share": 0.2}
    write(folder, "end_to_end", [*steps, {**engine, "weights": "bf16", "kv": "auto", "context": 512}])
    write(folder, "peer", [{"kind": "transformers generate", "batch": 1, "context": 1024, "step_ms": 20.0}])
    gptq = {"kind": "gptq-int4 g128", "model_minutes": 5.0, "peak_device_bytes": 5e9, "layer_seconds": 9.0}
    write(folder, "quantization", [gptq])
    return folder


def lines_of(text: str) -> dict[str, list[str]]:
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in cells}


def test_the_page_compares_with_what_is_wanted(results):
    text = page("--results", str(results))
    assert "### Test GPU" in text
    assert "copy 4.00 TB/s, large bf16 product 800 TFLOP/s" in text
    lines = lines_of(text)
    # The worst of two shapes; beside it the best of others with the same numbers.
    weights = lines["W4A16 g128, M = 1, 8192² and 8B layers"]
    assert weights[2:] == ["2.00×", "**missed**", "1.25×", "40 %", "01234567"]
    assert lines["INT8 KV against own bf16, 32 × 8k"][2:6] == ["2.00×", "goal", "2.20×", "90 %"]
    assert lines["8B shape, W4 with 8-bit head, batch 1"][2:5] == ["2.00×", "**missed**", "10.00×"]
    assert lines["8B shape, bf16, batch 1 decode, share of copy bandwidth"][2:4] == ["80 %", "least"]
    assert lines["host's share of a batch-32 step"][2:4] == ["20 %", "**missed**"]
    assert lines["8B GPTQ g128, 128 × 2048 tokens"][2:4] == ["5.0 min", "least"]
    assert lines["INT4 KV against own bf16, 32 × 8k"][2] == "not measured"
    assert "- linears: torch _scaled_mm: peer not present: no device" in text
    assert "- linears: quantkit w8a16, 8B qkv, 4: RuntimeError: out of luck" in text


def test_a_rehearsal_is_no_figure(results):
    write(results, "machine", [], rehearsal=True)
    text = page("--results", str(results))
    assert "no figures of a GPU" in text
    assert lines_of(text)["8B GPTQ g128, 128 × 2048 tokens"][2] == "not measured"


def parts() -> list[list[str]]:
    lines = [line.split() for line in (GPU / "parts.txt").read_text().splitlines()]
    return [words for words in lines if words[0] != "#"]


def test_all_parts_fit_into_three_calls_the_most_telling_into_the_first():
    seconds = {words[0]: int(words[1]) for words in parts()}
    assert len(seconds) == len(parts())
    assert sum(seconds.values()) <= 3 * 510
    names = list(seconds)
    assert names[:5] == ["machine", "smoke", "w4", "kv", "steps"]
    assert sum(seconds[name] for name in names[:6]) <= 510
    assert [name for name in names if name in ORDER] == ORDER


ORDER = ["smoke", "w4", "kv", "steps", "tests", "end_to_end", "peer", "greedy", "quantization", "sanitizer"]
KILLED = {"w4"}
# What they measure is the beginning of what another part does, and with tiny shapes all of it.
BEGINNINGS = {"w4", "kv", "steps"}
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
def test_without_wheels_each_part_can_be_imported_or_says_in_a_line_why_not(tmp_path):
    """In an environment of five packages and what these need; what is lacking is what wheels.txt lists."""
    python = environment(tmp_path / "five", "torch", "triton", "transformers", "safetensors", "numpy")
    done = call_run(tmp_path, "machine", "tests", python=python)
    assert done.returncode == 2, done.stdout + done.stderr
    rows = json.loads((tmp_path / "results/rehearsal/machine.json").read_text())["rows"]
    assert len([row for row in rows if "program" in row]) == len({words[2] for words in parts()})
    why = {row["program"]: row["error"] for row in rows if "error" in row}
    assert set(why) == {"run_tests", "greedy", "quantization"}
    listed = (GPU / "wheels.txt").read_text()
    for error in why.values():
        name = error.split("'")[1]
        assert f"\n{name}==" in listed
        assert error.endswith("; evals/gpu/wheels.sh fetches it")
    (dead,) = [line for line in done.stdout.splitlines() if "dead after" in line]
    assert dead.endswith("ModuleNotFoundError: No module named 'pytest'")


def environment(folder: Path, *names: str) -> str:
    """A Python that has these packages of this one, what these need, and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    todo, seen = list(names), set[str]()
    while todo:
        name = canonicalize_name(todo.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            known = distribution(name)
        except PackageNotFoundError:  # for another system
            continue
        for top in {path.parts[0] for path in known.files or ()} - {".."}:
            if not (packages / top).exists():
                (packages / top).symlink_to(known.locate_file(top))
        needed = [Requirement(line) for line in known.requires or ()]
        todo += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return str(folder / "bin/python")


@needs_triton
@pytest.mark.slow
def test_all_parts_run_on_tiny_shapes(tmp_path):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers")
    names = [words[0] for words in parts() if words[0] not in BEGINNINGS]
    written = rehearse(tmp_path, *names)
    assert set(written) == {*names}
    check_times(written["linears"], "speedup")
    for name in ("attention", "prefill"):
        check_times(written[name], "speedup_to_own_bf16")
    kinds = {row.get("part") for row in written["end_to_end"]["rows"]}
    assert kinds == {"step", "engine", "first token"}
    assert all(row["launches_per_layer"] > 0 for row in written["end_to_end"]["rows"] if row["part"] == "step")
    assert written["greedy"]["meta"]["wrong"] == 0


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
