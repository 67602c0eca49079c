"""1,000 mutated checkpoints and GGUF files: never a traceback, never more memory than the file bears out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SEED, SECONDS = 20261121, 120


@pytest.mark.slow
@pytest.mark.parametrize("count", [1000])
def test_mutated_files_are_refused_or_read(tmp_path, count):
    command = [sys.executable, "-m", "tests.compress.convert.fuzz", str(tmp_path), str(SEED), str(count)]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["breaches"] == []
    assert sum(result["outcomes"].values()) == count
    # Mutations do something, and are not all noticed at the first byte.
    assert result["outcomes"]["CheckpointError"] > count / 4
    assert result["outcomes"]["SchemeError"] > count / 40
    assert result["outcomes"]["read"] > count / 10
