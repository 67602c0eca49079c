"""Processes of quantkit's own, in folders of strangers."""

import subprocess

import quantkit
from quantkit.safety.child_process import python


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
