"""kill -9 at any moment, then the same command: the result is that of an undisturbed run, byte for byte."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time

import pytest
import torch

import quantkit
from quantkit.compress.pipeline.state import read_state, write_state
from quantkit.errors import CheckpointError, InputError, OutputError, ResumeError
from quantkit.output.staging import open_stage
from quantkit.output.work_folder import work_folder
from tests import forked
from tests.compress.pipeline.killer import (
    AfterFirst,
    KillAfterFirst,
    Killed,
    compress,
    compress_in_group,
    compress_until_memory_is_full,
    compress_until_stage,
    renames_file,
)
from tests.helpers import edit_tensors, load_tensors, make_model
from tests.memory_cgroup import kills, memory_cgroup, most_used


def hashes(folder):
    """SHA-256 of every file of a checkpoint but the run log, which holds timings."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name != "quantkit-run.json"
    }


def quantize(model, output, text, **options):
    overrides = {
        "weights.group_size": 32,
        "calibration.data": str(text),
        "calibration.samples": 8,
        "calibration.sequence_length": 48,
        **options.pop("overrides", {}),
    }
    return quantkit.quantize(model, "gptq-int4", output, overrides=overrides, **options)


@pytest.fixture(scope="module")
def undisturbed(tiny_llama, tmp_path_factory, text_file):
    """Output name, hashes and number of renames of a run that nobody disturbs."""
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    assert forked.run(compress, -1, "after", tiny_llama, output, text_file) == 0
    return hashes(output), int(renames_file(output).read_text())


@pytest.mark.parametrize("tenth", [*range(0, 10, 3), pytest.param(5, marks=pytest.mark.slow)])
def test_killed_at_a_commit_point(tiny_llama, tmp_path, text_file, undisturbed, tenth):
    expected, renames = undisturbed
    moment = 1 + tenth * (renames - 1) // 9
    when, output = "after" if tenth % 2 else "before", tmp_path / "out"
    assert forked.run(compress, moment, when, tiny_llama, output, text_file) == -signal.SIGKILL
    result = quantize(tiny_llama, output, text_file)
    assert hashes(output) == expected
    assert not (tmp_path / "out.partial").exists()
    assert result.num_layers == 2


@pytest.mark.parametrize(("stage", "finished"), [(3, 0), (8, 1)])
def test_killed_between_stages_of_a_layer(tiny_llama, tmp_path, text_file, undisturbed, stage, finished):
    """What was stored of the stages before is gone with the process, and is computed again.

    A layer has four stages: q, k and v; o; gate and up; down.
    """
    output = tmp_path / "out"
    assert forked.run(compress_until_stage, stage, tiny_llama, output, text_file) == -signal.SIGKILL
    folders = [*(tmp_path / "out.partial").glob("*/beside")]
    assert folders
    assert not [path for folder in folders for path in folder.iterdir()]
    assert quantize(tiny_llama, output, text_file).resumed_layers == finished
    assert hashes(output) == undisturbed[0]


def finished_layers(progress):
    """Layers that a progress.json names; the file is replaced atomically, so it is never half written."""
    try:
        return len(json.loads(progress.read_text())["records"])
    except FileNotFoundError:
        return 0


@pytest.mark.slow
def test_killed_by_the_clock(tmp_path, text_file):
    """Three kills from outside at random times, always the same command, through the command line."""
    model = make_model(tmp_path / "model", num_hidden_layers=10)
    command = ["quantize", model, "--recipe", "gptq-int4", "--set", "weights.group_size=32", "--quiet"]
    command += ["--calibration", text_file, "--samples", "8", "--sequence-length", "48", "-o"]
    assert forked.Command(*command, tmp_path / "whole").finish()[0] == 0
    generator, progress = random.Random(0), []
    output, saved = tmp_path / "out", tmp_path / "out.partial" / "progress.json"
    for _ in range(3):
        run = forked.Command(*command, output)
        while run.process.is_alive() and finished_layers(saved) == (progress[-1] if progress else 0):
            time.sleep(0.002)
        time.sleep(generator.uniform(0, 0.05))
        run.process.kill()
        run.finish()
        progress.append(finished_layers(saved))
    assert progress[0] > 0, progress
    if not output.exists():
        assert forked.Command(*command, output).finish()[0] == 0
    assert hashes(output) == hashes(tmp_path / "whole")


def test_killed_for_want_of_memory(tiny_llama, tmp_path, text_file, undisturbed):
    """By the kernel, in a control group whose limit the run reaches after its first layer."""
    output = tmp_path / "out"
    with memory_cgroup() as limit:
        code = forked.run(compress_until_memory_is_full, limit, tiny_llama, output, text_file)
        assert (code, kills(limit)) == (-signal.SIGKILL, 1)
    assert finished_layers(tmp_path / "out.partial" / "progress.json") == 1
    assert quantize(tiny_llama, output, text_file).resumed_layers == 1
    assert hashes(output) == undisturbed[0]
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.slow
def test_killed_for_want_of_memory_wherever_that_is(tiny_llama, tmp_path, text_file, undisturbed):
    """Limits between nothing and what a whole run takes."""
    with memory_cgroup() as limit:
        assert forked.run(compress_in_group, limit, None, tiny_llama, tmp_path / "whole", text_file) == 0
        most = most_used(limit)
    codes = []
    for tenth in range(1, 10):
        output = tmp_path / str(tenth)
        with memory_cgroup() as limit:
            codes.append(forked.run(compress_in_group, limit, most * tenth // 10, tiny_llama, output, text_file))
        quantize(tiny_llama, output, text_file)
        assert hashes(output) == undisturbed[0]
    assert set(codes) <= {0, -signal.SIGKILL}
    assert codes.count(-signal.SIGKILL) >= 3, codes


def interrupted(model, output, text, **options):
    """Leave a run behind that was killed after its first layer."""
    with pytest.raises(Killed):
        quantize(model, output, text, listener=KillAfterFirst(), **options)


def test_finished_layers_are_not_done_again(tiny_llama, tmp_path, text_file):
    interrupted(tiny_llama, tmp_path / "out", text_file)
    assert quantize(tiny_llama, tmp_path / "out", text_file).resumed_layers == 1


def test_the_original_models_states_are_resumed_too(tiny_llama, tmp_path, text_file):
    """A step that looks at the original model goes on, after an interruption, bit for bit where it was."""
    overrides = {"steps.gptq.asymmetric_calibration": 1.0}
    quantize(tiny_llama, tmp_path / "whole", text_file, overrides=overrides)
    for mode in ("ram", "disk"):
        output = tmp_path / mode
        interrupted(tiny_llama, output, text_file, overrides=overrides, activations=mode)
        assert quantize(tiny_llama, output, text_file, overrides=overrides, activations=mode).resumed_layers == 1
        assert hashes(output) == hashes(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"overrides": {"weights.group_size": 16}}, r"recipe\.weights\.group_size: 32 -> 16"),
        ({"overrides": {"calibration.samples": 6}}, r"recipe\.calibration\.samples: 8 -> 6"),
        ({"overrides": {"steps.gptq.damping": 0.05}}, r"damping"),
    ],
)
def test_another_recipe_is_refused_by_name(tiny_llama, tmp_path, text_file, change, named):
    interrupted(tiny_llama, tmp_path / "out", text_file)
    with pytest.raises(ResumeError, match="was started with different settings or files") as caught:
        quantize(tiny_llama, tmp_path / "out", text_file, **change)
    assert caught.match(named)
    assert quantize(tiny_llama, tmp_path / "out", text_file, resume=False, **change).resumed_layers == 0


def test_another_source_data_set_or_version_is_refused_by_name(tmp_path, text_file, monkeypatch):
    model = make_model(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(text_file.read_text())
    interrupted(model, tmp_path / "out", text)
    norm = load_tensors(model)["model.norm.weight"]
    edit_tensors(model, model__norm__weight=norm + 1)
    with pytest.raises(ResumeError, match=r"source\.model\.safetensors"):
        quantize(model, tmp_path / "out", text)
    edit_tensors(model, model__norm__weight=norm)
    text.write_text(text_file.read_text().replace("apples", "pears"))
    with pytest.raises(ResumeError, match="calibration"):
        quantize(model, tmp_path / "out", text)
    text.write_text(text_file.read_text())
    monkeypatch.setattr("quantkit.compress.pipeline.state.installed_version", lambda name, absent: "9.9")
    with pytest.raises(ResumeError, match=r"versions\..*9\.9"):
        quantize(model, tmp_path / "out", text)
    monkeypatch.undo()
    assert quantize(model, tmp_path / "out", text).resumed_layers == 1


@pytest.mark.parametrize("sensitivity", ["shard", "shard-missing", "shard-endless", "progress", "state"])
def test_damaged_leftovers_are_noticed(tiny_llama, tmp_path, text_file, sensitivity):
    interrupted(tiny_llama, tmp_path / "out", text_file)
    partial = tmp_path / "out.partial"
    target = {
        "progress": partial / "progress.json",
        "state": partial / "activations" / "1" / "00000.safetensors",
    }.get(sensitivity, partial / "checkpoint" / "model-00001-of-00003.safetensors")
    if sensitivity == "shard-missing":
        target.unlink()
    elif sensitivity == "shard-endless":
        os.truncate(target, 1 << 40)
    else:
        target.write_bytes(target.read_bytes()[:-3] + b"\x00\x01\x02")
    with pytest.raises(ResumeError, match="--no-resume"):
        quantize(tiny_llama, tmp_path / "out", text_file)
    quantize(tiny_llama, tmp_path / "out", text_file, resume=False)
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("how", ["in place", "another file of that name", "config.json"])
def test_a_source_that_changes_between_two_layers_is_refused(tmp_path, text_file, how):
    model = make_model(tmp_path / "model")
    weights = model / ("config.json" if how == "config.json" else "model.safetensors")

    def change():
        data = weights.read_bytes()
        if how == "another file of that name":
            weights.unlink()
        weights.write_bytes(data[:-1] + (b" " if how == "config.json" else b"\x40"))

    with pytest.raises(CheckpointError, match=rf"{weights.name} changed while it was read; run the command again"):
        quantize(model, tmp_path / "out", text_file, listener=AfterFirst(change))
    assert not (tmp_path / "out").exists()
    with pytest.raises(ResumeError, match=r"source\."):  # its first layer is of the old model
        quantize(model, tmp_path / "out", text_file)
    assert quantize(model, tmp_path / "out", text_file, resume=False).resumed_layers == 0


def test_a_clock_that_jumps_changes_nothing(tiny_llama, tmp_path, text_file, undisturbed, monkeypatch):
    generator = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: generator.uniform(-(10**9), 10**10))
    monkeypatch.setattr(time, "time_ns", lambda: generator.randrange(-(10**18), 10**19))
    interrupted(tiny_llama, tmp_path / "out", text_file)
    os.utime(tmp_path / "out.partial" / "progress.json", (10**10, 10**10))  # written in the year 2286
    quantize(tiny_llama, tmp_path / "out", text_file)
    assert hashes(tmp_path / "out") == undisturbed[0]


def test_an_existing_output_is_not_touched(tiny_llama, tmp_path, text_file):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(OutputError, match="exists already"):
        quantize(tiny_llama, tmp_path / "out", text_file)
    with pytest.raises(OutputError, match=r"has no quantkit\.json that quantkit wrote, so it is not replaced"):
        quantize(tiny_llama, tmp_path / "out", text_file, overwrite=True)
    (tmp_path / "out" / "config.json").write_text("{}")
    (tmp_path / "out" / "model.safetensors").touch()
    with pytest.raises(OutputError, match=r"has no quantkit\.json that quantkit wrote, so it is not replaced"):
        quantize(tiny_llama, tmp_path / "out", text_file, overwrite=True)
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"
    assert not (tmp_path / "out.partial").exists()


def test_a_second_writer_is_refused(tiny_llama, tmp_path, text_file):
    with (
        open_stage(tmp_path / "out", "quantize", overwrite=False, resumable=True),
        pytest.raises(OutputError, match=r"another run is writing .*out\.partial"),
    ):
        quantize(tiny_llama, tmp_path / "out", text_file)


def test_the_source_cannot_be_the_output(tmp_path, text_file):
    model = make_model(tmp_path / "model")
    for output in (model, model / "inside", tmp_path):
        with pytest.raises(InputError, match="overlap"):
            quantize(model, output, text_file, overwrite=True)
    assert (model / "model.safetensors").exists()


@pytest.mark.parametrize("leftover", ["progress.json", "activations/1"])
def test_a_run_killed_while_tidying_up_is_complete(tiny_llama, tmp_path, text_file, leftover):
    """Killed between the last rename and the removal of its leftovers: the same command tidies up and says done."""
    first = quantize(tiny_llama, tmp_path / "out", text_file)
    partial = left_behind(tmp_path / "out.partial", leftover)
    again = quantize(tiny_llama, tmp_path / "out", text_file)
    assert not partial.exists()
    assert again == first
    left_behind(partial, leftover)
    with pytest.raises(OutputError, match="exists already"):  # another recipe's output is not this one's
        quantize(tiny_llama, tmp_path / "out", text_file, overrides={"weights.group_size": 16})
    left_behind(partial, leftover)
    changed = {"weights.group_size": 16}
    assert quantize(tiny_llama, tmp_path / "out", text_file, overwrite=True, overrides=changed).num_layers == 2
    assert not partial.exists()


def left_behind(partial, leftover):
    """The work folder of a run that was killed, with one file."""
    with work_folder(partial, "quantize"):
        (partial / leftover).parent.mkdir(parents=True, exist_ok=True)
        (partial / leftover).touch()
    return partial


def test_leftovers_of_an_unknown_run_are_not_kept(tiny_llama, tmp_path, text_file):
    """Killed before it had written who it was: its files must not end up in this run's output."""
    left_behind(tmp_path / "out.partial", "checkpoint/model-00001-of-00099.safetensors")
    quantize(tiny_llama, tmp_path / "out", text_file)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3


def test_what_appears_at_the_output_meanwhile_is_not_destroyed(tiny_llama, tmp_path, text_file):
    class Listener:
        def __getattr__(self, name):
            return lambda *args: None

        def layer_finished(self, record):
            (tmp_path / "out").mkdir(exist_ok=True)
            (tmp_path / "out" / "precious.txt").write_text("keep")

    with pytest.raises(OutputError, match="exists already"):
        quantize(tiny_llama, tmp_path / "out", text_file, listener=Listener())
    assert (tmp_path / "out" / "precious.txt").read_text() == "keep"


def test_a_run_that_started_over_can_be_resumed(tiny_llama, tmp_path, text_file):
    interrupted(tiny_llama, tmp_path / "out", text_file, resume=False)
    assert quantize(tiny_llama, tmp_path / "out", text_file).resumed_layers == 1


@pytest.mark.parametrize("entry", ["name", "peak_bytes"])
def test_a_record_that_was_changed_is_noticed(tiny_llama, tmp_path, text_file, entry):
    interrupted(tiny_llama, tmp_path / "out", text_file)
    path = tmp_path / "out.partial" / "progress.json"
    saved = json.loads(path.read_text())
    saved["records"][0][entry] *= 2
    path.write_text(json.dumps(saved))
    with pytest.raises(ResumeError, match=r"progress\.json is damaged \(it was changed, .*--no-resume"):
        quantize(tiny_llama, tmp_path / "out", text_file)


def test_progress_is_plain_json(tiny_llama, tmp_path, text_file):
    interrupted(tiny_llama, tmp_path / "out", text_file)
    saved = json.loads((tmp_path / "out.partial" / "progress.json").read_text())
    assert saved["records"][0]["name"] == "model.layers.0"
    assert [path.name for path in (tmp_path / "out.partial" / "activations").iterdir()] == ["1"]


def test_an_interrupted_run_goes_on_with_the_threads_it_was_started_with(tiny_llama, tmp_path, text_file, undisturbed):
    expected, renames = undisturbed
    output, before = tmp_path / "out", torch.get_num_threads()
    assert forked.run(compress, renames // 2, "after", tiny_llama, output, text_file) == -signal.SIGKILL
    progress = json.loads((tmp_path / "out.partial" / "progress.json").read_text())
    try:
        torch.set_num_threads(progress["identity"]["compute"]["threads"] + 1)
        quantize(tiny_llama, output, text_file)
        assert torch.get_num_threads() == progress["identity"]["compute"]["threads"] + 1
    finally:
        torch.set_num_threads(before)
    assert hashes(output) == expected


@pytest.mark.parametrize(
    "entries", [{"identity": 5}, {"shards": [1]}, {"weight_map": {"a": 1}}, {"activations": 3}], ids=str
)
def test_progress_of_other_types_is_refused(tiny_llama, tmp_path, text_file, undisturbed, entries):
    assert (
        forked.run(compress, undisturbed[1] // 2, "after", tiny_llama, tmp_path / "out", text_file) == -signal.SIGKILL
    )
    path = tmp_path / "out.partial" / "progress.json"
    write_state(path, {**read_state(path), **entries})
    with pytest.raises(ResumeError, match="is damaged"):
        quantize(tiny_llama, tmp_path / "out", text_file)
