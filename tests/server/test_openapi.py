"""Test that the OpenAPI description matches the routes, and that random requests made from it never get a 5xx."""

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
    """The number of requests is limited, not the time, because schemathesis always uses up a time limit."""
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    options = ["--phases", "coverage,fuzzing", "--max-examples", "6", "--checks", checks, "--no-color"]
    code = "import sys; from schemathesis.cli import schemathesis; sys.exit(schemathesis())"
    # Answers without a limit fill the context, so a short context saves time. Nothing else depends on its length.
    with serving(checkpoint, max_sequences=8, max_length=64) as server:
        command = [sys.executable, "-c", code, "run", f"{server.url}/openapi.json", *options]
        run = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
        assert run.returncode == 0, run.stdout[-3000:]
        assert server.bridge.num_open == 0
