"""A sweep on a local cluster of Ray, one worker killed in the middle, writes what the same sweep without Ray writes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

FEW = ("weights.group_size=32", "calibration.samples=8", "calibration.sequence_length=64")
TEXT = "The small fox walks along the river and sleeps. " * 40
TIMED = ("seconds", "created", "peak_bytes", "benchmark", "baseline_benchmark", "diagnosis", "command")
ASKED = ("--suite", "none", "--no-bench", "--device", "cpu", "--threads", "1")


def compare(recipes: str, models: str, changes: list[str] | tuple[str, ...], work: Path) -> dict[str, Any]:
    """Both sweeps, and in what they differ."""
    settings = [word for change in changes for word in ("--set", change)]
    text = work / "text"
    text.write_text(TEXT)
    command = [sys.executable, "-m", "quantkit", "sweep", recipes, models, *settings, *ASKED]
    command += ["--text", str(text), "--json"]
    local = subprocess.Popen([*command, "-o", str(work / "local"), "--jobs", "2"], stdout=subprocess.PIPE, text=True)
    count = len(recipes.split(",")) * len(models.split(","))
    with cluster() as address:
        process = subprocess.Popen(
            [*command, "-o", str(work / "ray"), "--on", f"ray:{address}"], stdout=subprocess.PIPE, text=True
        )
        killed = kill_worker(process, work / "ray", count // 2)
        ray = finished(process)
    sweeps = finished(local), ray
    trials = {row["name"]: row["attempts"] for row in ray["trials"]}
    differing = [name for name in trials if facts(work / "local", name) != facts(work / "ray", name)]
    return {
        "trials": trials,
        "killed": killed,
        "retried": [name for name, attempts in trials.items() if attempts > 1],
        "failed": [row["name"] for sweep in sweeps for row in sweep["trials"] if row["exit_code"]],
        "differing": differing,
        "equal": not differing and len(trials) == count and all(facts(work / "ray", name) for name in trials),
    }


class cluster:
    """A cluster of Ray on this machine: two nodes of one CPU each; its address while open."""

    def __enter__(self) -> str:
        from ray.cluster_utils import Cluster

        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}  # as polite as the local ones
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        self._cluster.add_node(num_cpus=1)
        return str(self._cluster.address)

    def __exit__(self, *_: object) -> None:
        self._cluster.shutdown()


def kill_worker(sweep: subprocess.Popen[str], folder: Path, after: int) -> str:
    """Kill the worker of a trial that runs once so many have ended; its name."""
    while sweep.poll() is None:
        records = [json.loads(path.read_text()) for path in (folder / "trials").glob("*.json")]
        if sum(record["report"] is not None for record in records) >= after:
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    words = (process / "cmdline").read_bytes().decode().split("\0")
                    if words[1:2] != ["-c"] or words[3:4] not in (["quantize"], ["verify"]):
                        continue
                    status = (process / "status").read_text()
                except OSError:
                    continue
                checkpoint = Path(words[words.index("-o") + 1] if words[3] == "quantize" else words[4])
                if checkpoint.parent == folder:
                    os.kill(int(re.search(r"PPid:\s+(\d+)", status)[1]), signal.SIGKILL)  # type: ignore[index]
                    return checkpoint.name
        time.sleep(0.02)
    return ""


def finished(sweep: subprocess.Popen[str]) -> dict[str, Any]:
    """What a sweep prints."""
    printed: dict[str, Any] = json.loads(sweep.communicate()[0])
    return printed


def facts(sweep: Path, name: str) -> Any:
    """The report of a trial and its files, without what may differ; nothing, if there is none."""
    text = (sweep / "trials" / f"{name}.json").read_text().replace(str(sweep), "SWEEP")
    report = json.loads(text)["report"]
    files = json.loads((sweep / name / "quantkit.json").read_text())["files"] if report else None
    return report and [without_times(report), files]


def without_times(value: Any) -> Any:
    """The same without entries of these names, at any depth."""
    if isinstance(value, dict):
        return {key: without_times(entry) for key, entry in value.items() if key not in TIMED}
    return [without_times(entry) for entry in value] if isinstance(value, list) else value


@pytest.mark.slow
def test_a_killed_worker_changes_nothing(tmp_path):
    result = compare("rtn-int4,gptq-int4", "demo", FEW, tmp_path)
    assert result["equal"], result
    assert not result["failed"]
    assert result["retried"] == [result["killed"]] != [""]
