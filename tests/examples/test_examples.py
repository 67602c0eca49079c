"""examples/: each script runs on the demo model, as its docstring says."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quantkit.demo import DEMO_MODEL

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1"}
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def run(name: str, folder: Path, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_quantize_and_verify(tmp_path):
    printed = run("quantize_and_verify.py", tmp_path)
    assert re.search(r"demo-verified: 4\.\d\d bits per weight", printed)
    assert printed.count("  held: ") == 3
    assert (tmp_path / "demo-verified" / "report.json").is_file()


@pytest.mark.slow
def test_search_bits(tmp_path):
    printed = run("search_bits.py", tmp_path)
    bits = re.search(r"searched\.yaml: ([\d.]+) bits per weight", printed)
    assert bits
    assert float(bits[1]) <= 4.5
    assert "groups by choice: {" in printed
    assert (tmp_path / "searched-model" / "config.json").is_file()


@contextmanager
def server(model: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "quantkit", "serve", str(model), "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = re.search(r"http://\S+/v1", process.stderr.readline())
            assert found
            yield found[0]
        finally:
            process.send_signal(signal.SIGTERM)


@pytest.mark.slow
def test_call_a_tool(tmp_path):
    """The demo model has no chat template and gets one; a required call needs no model that knows tools."""
    pytest.importorskip("openai")
    model = tmp_path / "chat"
    shutil.copytree(DEMO_MODEL, model)
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    with server(model) as url:
        printed = run("call_a_tool.py", tmp_path, url)
    assert re.match(r"weather\((Oslo|Rome)\)\n", printed)
