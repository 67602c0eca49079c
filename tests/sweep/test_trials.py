"""Trials: commands in turn as children, what ends them, and what each attempt finds of the last."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from quantkit.errors import InputError, ResourceError
from quantkit.sweep.trials import Trial, TrialCommand, check_place, planned_bytes, run_trial, run_trials

# In place of Python: `-c CODE WHAT FILE --json`.
STAND_IN = """#!/bin/sh
echo "$3" >> "$(dirname "$4")/ran"
case $3 in
  make) echo $OMP_NUM_THREADS > "$4" ;;
  gate) touch "$4"; exit 3 ;;
  nothing) ;;
  refuse) echo '{"error": "no such model", "exit_code": 4}'; exit 4 ;;
  crash) kill -SEGV $$ ;;
  kill) kill -KILL $$ ;;
esac
"""


@pytest.fixture
def trial(tmp_path, monkeypatch):
    script = tmp_path / "stand-in"
    script.write_text(STAND_IN)
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))

    def build(*words, name="one", **changes):
        commands = [
            TrialCommand(arguments=(word, str(tmp_path / f"{name}-{word}")), made=tmp_path / f"{name}-{word}")
            for word in words
        ]
        given = {"log": tmp_path / f"{name}.log", "threads": 3, "folder": tmp_path, **changes}
        return Trial(name=name, commands=tuple(commands), **given)

    return build


def test_commands_run_in_turn_with_their_threads_and_only_once(trial, tmp_path):
    first = run_trial(trial("make", "gate"))
    assert (first.exit_code, first.reason, first.attempts) == (0, "", 1)
    assert (tmp_path / "one-make").read_text() == "3\n"
    again = run_trial(trial("make", "gate"))
    assert (again.exit_code, again.attempts) == (0, 2)
    assert (tmp_path / "ran").read_text().split() == ["make", "gate"]


@pytest.mark.parametrize(
    ("word", "code", "reason"),
    [
        ("refuse", 4, "no such model"),
        ("crash", 1, "crashed (SIGSEGV); see "),
        ("kill", 5, "killed (SIGKILL), probably because memory ran out; see "),
        ("nothing", 1, "ended with exit code 0 without a reason; see "),
    ],
)
def test_what_ends_a_command_ends_the_trial_with_a_reason(trial, tmp_path, word, code, reason):
    outcome = run_trial(trial(word, "make"))
    assert outcome.exit_code == outcome.error.exit_code == code
    assert outcome.reason.startswith(reason)
    assert not (tmp_path / "one-make").exists()


def test_a_worker_that_does_not_see_the_folder_says_so(trial, tmp_path):
    outcome = run_trial(trial("make", folder=Path("/nowhere")))
    assert outcome.exit_code == 4
    assert outcome.reason.startswith("folder /nowhere does not exist on ")


def test_trials_end_one_by_one_and_one_that_fails_leaves_the_others_alone(trial):
    outcomes = run_trials([trial("make", name="a"), trial("crash", name="b"), trial("gate", name="c")], jobs=2)
    assert {outcome.name: outcome.exit_code for outcome in outcomes} == {"a": 0, "b": 1, "c": 0}


@pytest.mark.parametrize("on", ["", "remote", "local:8", "ray:"])
def test_other_places_are_refused(on):
    with pytest.raises(InputError, match="use local, ray or ray:ADDRESS"):
        check_place(on)


def test_memory_is_that_of_the_plan_and_nothing_where_there_is_none(tiny_llama):
    assert planned_bytes(str(tiny_llama), "rtn-int8") > 1 << 30
    assert planned_bytes("/no/model", "rtn-int4") == 0


class Ray:
    """As much of Ray as is asked before anything runs: a cluster of one small machine."""

    def is_initialized(self):
        return True

    def nodes(self):
        print("(raylet) a worker died")  # as Ray itself does
        return [{"Alive": True, "Resources": {"CPU": 2.0, "memory": 1e9}}, {"Alive": False, "Resources": {"CPU": 64.0}}]


def test_what_no_machine_of_the_cluster_has_is_refused_and_not_waited_for(trial, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", Ray())
    large = [
        trial("make", name="threads"),
        trial("make", name="memory", threads=1, num_bytes=2**40),
        trial("make", name="gpu", threads=1, device="cuda"),
    ]
    outcomes = {outcome.name: outcome for outcome in run_trials(large, "ray")}
    assert {outcome.exit_code for outcome in outcomes.values()} == {ResourceError.exit_code}
    assert "no machine of the cluster has {'CPU': 3, 'memory': 0}" in outcomes["threads"].reason
    assert len(outcomes) == 3
    assert capsys.readouterr().out == ""
