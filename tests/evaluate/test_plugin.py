"""`lm_eval --model quantkit`, as its users type it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.demo import DEMO_MODEL
from quantkit.distribution import DISTRIBUTION
from quantkit.evaluate import plugin

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def entry_points(group):
    """Of every quantkit that Python finds here: a source folder may hold older metadata beside the installed ones."""
    ours = [one for one in importlib.metadata.distributions() if one.metadata["Name"] == DISTRIBUTION]
    return {entry.name: entry.value for one in ours for entry in one.entry_points.select(group=group)}


def test_newer_releases_find_the_model_and_torch_finds_nothing():
    assert entry_points("lm_eval.models") == {plugin.NAME: plugin.TARGET}
    assert entry_points("torch.backends") == {}


def test_one_import_gives_older_releases_the_name_and_keeps_theirs(tmp_path):
    code = """
import quantkit.evaluate.plugin
from lm_eval.api.registry import get_model, model_registry
print(get_model("quantkit").__name__, "hf" in model_registry)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "QuantkitLM True", done.stderr


@pytest.mark.slow
def test_lm_evals_own_command_line(tmp_path):
    command = (sys.executable, "-m", "quantkit.evaluate.plugin")
    arguments = f"pretrained={DEMO_MODEL},kv_cache=int8,threads=1"
    done = subprocess.run(
        [
            *(*command, "--model", "quantkit", "--model_args", arguments, "--include_path", "evals/tasks/demo"),
            *("--tasks", "demo_facts,demo_answers", "--limit", "5", "--output_path", tmp_path, "--log_samples"),
        ],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = tmp_path.rglob("results_*.json")
    written = json.loads(path.read_text())
    assert {task: numbers["sample_len"] for task, numbers in written["results"].items()} == {
        "demo_facts": 5,
        "demo_answers": 5,
    }
    assert written["results"]["demo_facts"]["acc,none"] == 1.0
    assert written["config"]["kv_cache"] == "int8"
