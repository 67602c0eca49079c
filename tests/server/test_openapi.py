"""The description is of what there is, and requests made from it at random end in no 5xx."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.server.conftest import serving

FIELDS = {"prompt", "messages", "max_tokens", "temperature", "stop", "stream", "logprobs", "echo", "tools", "tokens"}


def test_routes_are_described(served):
    status, document = served.ask("/openapi.json")
    assert status == 200
    for path, methods in document["paths"].items():
        actual = (
            served.ask(path.replace("{name}", "tiny"), {} if "post" in methods else None)[0]
            if path != "/metrics"
            else 200
        )
        assert actual != 404, path


def test_fields_are_described(served):
    schemas = served.ask("/openapi.json")[1]["components"]["schemas"]
    assert set().union(*(schema["properties"] for schema in schemas.values())) >= FIELDS


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed")
def test_random_requests(checkpoint, tmp_path):
    """So many requests, not so many seconds: told a time, schemathesis goes on until it is over."""
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    options = ["--phases", "coverage,fuzzing", "--max-examples", "6", "--checks", checks, "--no-color"]
    code = "import sys; from schemathesis.cli import schemathesis; sys.exit(schemathesis())"
    # Where nobody bounds an answer it is as long as the context, on whose length nothing else depends.
    with serving(checkpoint, max_sequences=8, max_length=64) as server:
        command = [sys.executable, "-c", code, "run", f"{server.url}/openapi.json", *options]
        run = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
        assert run.returncode == 0, run.stdout[-3000:]
        assert server.bridge.num_open == 0
