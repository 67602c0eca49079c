"""How many cores a process may keep busy: its affinity, and the quotas of its cgroups at any depth."""

import os
from pathlib import Path

import pytest
import torch

from quantkit.machine import cores, devices
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
    assert cores.cgroup_quota(tmp_path, NOWHERE) == quota


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
    assert cores.cgroup_quota(tmp_path, tmp_path / "own") == quota


def test_every_default_keeps_within_the_quota(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    try:
        torch.set_num_threads(4)
        for module in (cores, devices):
            monkeypatch.setattr(module, "cgroup_quota", lambda: 3)
        assert (cores.available_cores(), threads.thread_limit(), devices.threads_within_quota()) == (3, 3, 3)
        for module in (cores, devices):
            monkeypatch.setattr(module, "cgroup_quota", lambda: None)
        assert (cores.available_cores(), threads.thread_limit(), devices.threads_within_quota()) == (8, 8, 4)
    finally:
        torch.set_num_threads(before)
