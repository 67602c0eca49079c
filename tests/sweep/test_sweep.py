"""Sweeps: a record for each pair, kept as it ends; a second call goes on; other questions are refused."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext

import pytest
from click.testing import CliRunner

import quantkit.sweep.run as module
from quantkit.cli import main
from quantkit.compress.recipe import load
from quantkit.errors import InputError, OutputError, ResumeError
from quantkit.report.files import dumps
from quantkit.sweep.run import SweepOptions, compare_trials, sweep
from quantkit.sweep.trials import Outcome
from tests.report.synthetic import make_report

RECIPES = ("rtn-int4", "rtn-int8")


class Trials:
    """In place of real ones: each leaves a report, and those of `refused` a reason."""

    def __init__(self):
        self.ran, self.refused = [], set()
        # Without items, of which it has thousands: they are written and read again for every trial.
        self.report = dataclasses.replace(make_report(), evaluation=None, baseline=None)

    def run(self, trials, on, jobs):
        for trial in trials:
            self.ran.append(trial.name)
            if trial.name in self.refused:
                yield Outcome(name=trial.name, exit_code=4, reason="no such thing", attempts=1)
                continue
            model = dataclasses.replace(self.report.model, name=trial.name, num_bytes=len(trial.name))
            file = trial.commands[-1].made
            file.parent.mkdir()
            (file.parent / "quantkit.json").write_text('{"schema_version": 1, "identity": {}}')
            file.write_text(dumps(dataclasses.replace(self.report, model=model)))
            yield Outcome(name=trial.name, attempts=1, seconds=2.0)


@pytest.fixture
def trials(monkeypatch):
    pretended = Trials()
    monkeypatch.setattr(module, "run_trials", pretended.run)
    return pretended


@pytest.fixture
def blank_page(monkeypatch):
    """Drawing a page takes most of a sweep of pretended trials."""
    monkeypatch.setattr(module, "render_comparisons", lambda *_: "<!DOCTYPE html>")


def swept(folder, recipes=RECIPES, models=("demo",), changes=(), **options):
    loaded = [load(name, changes) for name in recipes]
    return sweep(loaded, models, SweepOptions(output=folder, **{"threads": 1, **options}))


def test_every_pair_is_a_record_that_is_kept_and_compared_by_model(trials, tiny_llama, tmp_path):
    records = swept(tmp_path / "out", models=("demo", str(tiny_llama)))
    names = [f"{model}-{recipe}" for model in ("demo", tiny_llama.name) for recipe in RECIPES]
    assert [record.name for record in records] == trials.ran == names
    assert json.loads((tmp_path / "out/trials/demo-rtn-int4.json").read_text())["report"]["model"]["name"] == names[0]
    compared = compare_trials(records)
    assert list(compared) == ["demo", str(tiny_llama)]
    assert [entry.name for entry in compared["demo"].entries[:2]] == names[:2]
    page = (tmp_path / "out/sweep.html").read_text()
    assert page.count('<svg class="plot"') == 4


def test_what_is_done_is_taken_over_and_what_failed_done_again(trials, blank_page, tmp_path):
    trials.refused.add("demo-rtn-int8")
    first = swept(tmp_path / "out")
    assert [record.exit_code for record in first] == [0, 4]
    assert first[1].reason == "no such thing"
    trials.refused.clear()
    trials.ran.clear()
    second = swept(tmp_path / "out", recipes=(*RECIPES, "fp8-dynamic"), threads=None)
    assert trials.ran == ["demo-rtn-int8", "demo-fp8-dynamic"]
    assert second[0] == first[0]
    assert all(record.report and record.identity["threads"] == 1 for record in second)
    trials.ran.clear()
    assert swept(tmp_path / "out", resume=False)
    assert trials.ran == ["demo-rtn-int4", "demo-rtn-int8"]
    assert (tmp_path / "out/demo-fp8-dynamic/report.json").exists()  # which nobody has asked to be made anew


def test_starting_over_deletes_nothing_that_no_trial_made(trials, blank_page, tmp_path):
    swept(tmp_path / "out")
    (tmp_path / "out/demo-rtn-int8/notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"holds notes\.txt"):
        swept(tmp_path / "out", resume=False)
    assert (tmp_path / "out/demo-rtn-int4/report.json").exists()


def test_a_checkpoint_without_a_record_is_not_taken_for_a_trial(trials, blank_page, tmp_path):
    swept(tmp_path / "out", recipes=("rtn-int4",))
    (tmp_path / "out/trials/demo-rtn-int4.json").unlink()
    with pytest.raises(ResumeError, match="no record says how it was made"):
        swept(tmp_path / "out", recipes=("rtn-int4",))


def test_another_text_under_the_same_name_is_another_question(trials, blank_page, tmp_path):
    text = tmp_path / "mine.txt"
    for words, outcome in (("one", nullcontext()), ("two", pytest.raises(ResumeError, match="asked"))):
        text.write_text(words)
        with outcome:
            swept(tmp_path / "out", recipes=("rtn-int4",), verify=("--text", str(text)))


@pytest.mark.parametrize(
    ("changes", "options", "what"),
    [
        (["weights.group_size=32"], {}, "recipe.weights.group_size: 128 -> 32"),
        ([], {"verify": ("--limit", "3")}, "verify:"),
        ([], {"threads": 2}, "threads: 1 -> 2"),
    ],
)
def test_kept_trials_of_something_else_are_refused(trials, blank_page, tmp_path, changes, options, what):
    swept(tmp_path / "out", recipes=("rtn-int4",))
    with pytest.raises(ResumeError, match="give another --output, or --no-resume") as refused:
        swept(tmp_path / "out", recipes=("rtn-int4",), changes=changes, **options)
    assert what in str(refused.value)


def test_two_trials_of_one_name_are_refused(trials, tmp_path):
    with pytest.raises(InputError, match="two trials would both be named 'demo-rtn-int4'"):
        swept(tmp_path / "out", recipes=("rtn-int4", "rtn-int4"))
    assert not trials.ran


def test_a_damaged_record_is_refused(trials, blank_page, tmp_path):
    swept(tmp_path / "out", recipes=("rtn-int4",))
    (tmp_path / "out/trials/demo-rtn-int4.json").write_text('{"name": 3}')
    with pytest.raises(ResumeError, match="damaged"):
        swept(tmp_path / "out", recipes=("rtn-int4",))


def test_commands_are_those_that_a_user_would_give(monkeypatch, tmp_path):
    planned = []
    monkeypatch.setattr(module, "run_trials", lambda trials, on, jobs: (planned.append(trial) for trial in trials))
    with pytest.raises(AttributeError):  # nothing ran, so nothing came out
        swept(tmp_path / "out", recipes=("rtn-int4",), device="cpu", verify=("--no-bench",))
    (trial,) = planned
    recipe, checkpoint = (
        str(tmp_path / "out" / name) for name in ("trials/demo-rtn-int4/rtn-int4.yaml", "demo-rtn-int4")
    )
    assert trial.commands[0].arguments == ("quantize", "--recipe", recipe, "-o", checkpoint, "--device", "cpu")
    said = ("--no-sensitivity", "--threads", "1", "--device", "cpu", "--no-bench")
    assert trial.commands[1].arguments == ("verify", checkpoint, *said)
    written, shipped = load(recipe), load("rtn-int4")
    assert (written.source, written.gates) == (shipped.source, shipped.gates)


def test_the_command_shows_rows_of_both_kinds_and_ends_with_the_code_of_what_failed(trials, blank_page, tmp_path):
    trials.refused.add("demo-rtn-int8")
    line = ["sweep", ",".join(RECIPES), "-o", str(tmp_path / "out"), "--limit", "3", "--no-bench", "--threads", "1"]
    shown = CliRunner().invoke(main, line)
    assert shown.exit_code == 4
    assert "demo, smallest first" in shown.stdout
    assert "no such thing" in shown.stdout
    assert "error: 1 of 2 trials failed; the first is demo-rtn-int8: no such thing" in shown.stderr
    answer = CliRunner().invoke(main, [*line, "--json"])
    assert answer.exit_code == 4
    numbers = json.loads(answer.stdout)
    assert [row["exit_code"] for row in numbers["trials"]] == [0, 4]
    assert numbers["trials"][0]["metrics"]["kl"] > 0
    kept = json.loads((tmp_path / "out/trials/demo-rtn-int4.json").read_text())
    assert kept["identity"]["verify"] == ["--limit", "3", "--no-bench"]
