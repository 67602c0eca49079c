"""A sweep on Ray whose worker is killed ends complete and equals one without Ray; the check has the full form."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "evals/checks"))

import sweep_on_ray


@pytest.mark.slow
def test_a_killed_worker_changes_nothing(tmp_path):
    result = sweep_on_ray.compare("rtn-int4,gptq-int4", "demo", sweep_on_ray.FEW, tmp_path)
    assert result["equal"], result
    assert not result["failed"]
    assert result["retried"] == [result["killed"]] != [""]
