"""How many cores a process may keep busy, and child processes in the folders of strangers."""

import os
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import quantkit
from quantkit.machine import devices, system
from quantkit.machine.system import ends_well, python
from quantkit.runtime.engine import threads

NOWHERE = Path("/nowhere")


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_the_quota_of_a_container_is_read(tmp_path, files, quota):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")
    assert system.cgroup_quota(tmp_path, NOWHERE) == quota


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/system.slice/job.service", {"system.slice/job.service/cpu.max": "100000 100000"}, 1),
        ("0::/job/step", {"job/cpu.max": "200000 100000", "job/step/cpu.max": "max 100000"}, 2),
        ("0::/job/step", {"job/cpu.max": "200000 100000", "job/step/cpu.max": "300000 100000"}, 2),
        ("0::/job", {"unified/job/cpu.max": "200000 100000"}, 2),
        ("4:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "300000", "cpu/job/cpu.cfs_period_us": "100000"}, 3),
        ("4:cpuset:/job", {"cpu/job/cpu.cfs_quota_us": "300000", "cpu/job/cpu.cfs_period_us": "100000"}, None),
        ("4:cpu:/docker/1", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ("0::/../elsewhere", {"elsewhere/cpu.max": "100000 100000"}, None),
        ("no line of Linux", {"cpu.max": "100000 100000"}, 1),
    ],
)
def test_the_quota_of_a_group_below_the_root_is_read(tmp_path, own, files, quota):
    for name, text in {**files, "own": own}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert system.cgroup_quota(tmp_path, tmp_path / "own") == quota


def test_every_default_keeps_within_the_quota(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    try:
        torch.set_num_threads(4)
        for module in (system, devices):
            monkeypatch.setattr(module, "cgroup_quota", lambda: 3)
        assert (system.available_cores(), threads.thread_limit(), devices.threads_within_quota()) == (3, 3, 3)
        for module in (system, devices):
            monkeypatch.setattr(module, "cgroup_quota", lambda: None)
        assert (system.available_cores(), threads.thread_limit(), devices.threads_within_quota()) == (8, 8, 4)
    finally:
        torch.set_num_threads(before)


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
    monkeypatch.setattr(system, "CAN_FORK", can_fork)
    assert ends_well(partial(int, "1"), seconds=60)
    assert not ends_well(partial(int, "x"), seconds=60)
    monkeypatch.setattr(system, "_START_S", 0)
    assert not ends_well(partial(time.sleep, 600), seconds=0.5)
