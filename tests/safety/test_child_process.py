"""Processes of quantkit's own, in folders of strangers."""

import subprocess
import time
from functools import partial

import pytest

import quantkit
from quantkit.safety import child_process
from quantkit.safety.child_process import ends_well, python


def test_a_child_imports_what_this_process_would_and_nothing_of_its_folder(tmp_path):
    for name in ("json", "quantkit"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger')")
    words = [*python("import json, quantkit; print(quantkit.__file__, sys.argv[1])"), "--word"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{quantkit.__file__} --word\n", "")


def test_the_folder_of_now_is_that_of_the_parent(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "of_the_parent.py").write_text("name = 'found'")
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.syspath_prepend("")
    command = python("import of_the_parent; print(of_the_parent.name)")
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout == "found\n"


@pytest.mark.parametrize("can_fork", [True, False])
def test_work_ends_well_if_it_ends_in_time_and_without_an_error(monkeypatch, can_fork):
    monkeypatch.setattr(child_process, "CAN_FORK", can_fork)
    assert ends_well(partial(int, "1"), seconds=60)
    assert not ends_well(partial(int, "x"), seconds=60)
    monkeypatch.setattr(child_process, "_START_S", 0)
    assert not ends_well(partial(time.sleep, 600), seconds=0.5)
