"""The whole loop on real models, by the command line: what tiny models with random weights cannot show.

    QUANTKIT_REAL_MODELS=FOLDER pytest -m '' tests/test_real_models.py     # each of its folders is a model

Skipped without that folder.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

FOLDER = os.environ.get("QUANTKIT_REAL_MODELS")
MODELS = sorted(path.parent for path in Path(FOLDER).glob("*/config.json")) if FOLDER else []
TEXT = "The river rises in the hills north of the town. It turns south and reaches the sea after ninety miles. " * 10

pytestmark = pytest.mark.skipif(not MODELS, reason="QUANTKIT_REAL_MODELS names no folder with models")


def quantkit(*arguments: object, expected: tuple[int, ...] = (0,)) -> str:
    """What the command prints; it ends with one of the expected codes."""
    command = [sys.executable, "-m", "quantkit", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode in expected, (arguments, done.returncode, done.stderr[-2000:])
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.name)
def test_the_whole_loop(model, tmp_path):
    output, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text(TEXT)
    quantkit("quantize", model, "--recipe", "awq-int4", "--samples", 4, "--sequence-length", 128, "-o", output)
    about = json.loads(quantkit("inspect", output, "--json"))
    assert json.loads((output / "quantkit.json").read_text()) and about
    answer = quantkit("generate", output, "--chat", "--prompt", "Name a colour.", "--max-tokens", 8)
    assert answer.strip()
    measured = json.loads(quantkit("eval", output, "--suite", "none", "--text", text, "--json"))
    assert measured
    options = ["--suite", "none", "--text", text, "--no-bench", "--no-sensitivity"]
    quantkit("verify", output, "--baseline", model, *options, expected=(0, 3))  # so few samples may miss a gate
    report = json.loads((output / "report.json").read_text())
    assert report and (output / "report.html").stat().st_size > 10_000
    quantkit("convert", output, "--to", "dense", "-o", tmp_path / "dense")
    dense = quantkit("generate", tmp_path / "dense", "--chat", "--prompt", "Name a colour.", "--max-tokens", 8)
    assert dense.strip()
    assert served(output).strip()


def served(checkpoint: Path) -> str:
    """The answer of a server, which then ends when it is told to."""
    command = [sys.executable, "-m", "quantkit", "serve", str(checkpoint), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        address = next(found[0] for line in process.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        messages = [{"role": "user", "content": "Count to three."}]
        body = {"model": checkpoint.name, "messages": messages, "max_tokens": 16}
        request = urllib.request.Request(
            f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            answer = json.load(response)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
    return str(answer["choices"][0]["message"]["content"])
