"""One compression by several processes: every byte is that of one, whoever is killed on the way."""

from __future__ import annotations

import hashlib
import signal

import pytest

from tests.distributed import jobs
from tests.helpers import make_model


def hashes(folder):
    """SHA-256 of every file of a checkpoint but the run log, which holds timings."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name != "quantkit-run.json"
    }


def arguments(model, text, recipe, output, *more):
    small = ["--samples", "8", "--sequence-length", "48"]
    data = ["--calibration", str(text), *small] if not recipe.startswith(("rtn", "fp8-d")) else []
    group = ["--set", "weights.group_size=32"] if "int4" in recipe else []
    steps = ["--set", "steps.autoround.iterations=8"] if recipe == "autoround-int4" else []
    return ["quantize", str(model), "--recipe", recipe, "--quiet", *data, *group, *steps, *more, "-o", str(output)]


def compress(tmp_path, count, *given):
    output = tmp_path / f"by-{count}"
    codes, said = jobs.run(tmp_path, count, jobs.command, arguments(*given[:3], output, *given[3:]), jobs.THREE_BATCHES)
    assert codes == [0] * count, said
    return hashes(output)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


RECIPES = ["gptq-int4", *map(slow, ("awq-int4-kv8", "autoround-int4", "w8a8-int8", "rtn-int4", "nvfp4-a4"))]


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_processes_write_what_one_writes(tiny_llama, tmp_path, text_file, recipe):
    assert compress(tmp_path, 2, tiny_llama, text_file, recipe) == compress(tmp_path, 1, tiny_llama, text_file, recipe)


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["all", "routed"])
def test_experts_are_summed_and_solved_by_their_owners(tmp_path, text_file, experts):
    model = make_model(tmp_path / "moe", "qwen3_moe")
    given = (model, text_file, "gptq-int4", "--set", f"calibration.experts={experts}")
    assert compress(tmp_path, 3, *given) == compress(tmp_path, 1, *given)


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "first", "then"), [(0, 2, 1), (1, 2, 3), (2, 3, 2)])
def test_a_killed_job_is_finished_by_any_number(tiny_llama, tmp_path, text_file, killed, first, then):
    expected, output = compress(tmp_path, 1, tiny_llama, text_file, "gptq-int4"), tmp_path / "out"
    given = arguments(tiny_llama, text_file, "gptq-int4", output)
    codes, said = jobs.run(tmp_path, first, jobs.command, given, jobs.THREE_BATCHES, 1, killed)
    assert codes == [-signal.SIGKILL if number == killed else -signal.SIGTERM for number in range(first)], said
    assert said.count("\n") <= 1
    assert (tmp_path / "out.partial" / "progress.json").exists()
    codes, said = jobs.run(tmp_path, then, jobs.command, given, jobs.THREE_BATCHES)
    assert codes == [0] * then, said
    assert hashes(output) == expected
