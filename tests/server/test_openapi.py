"""The description is of what there is, and requests made from it at random end in no 5xx."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from quantkit.server.openapi import describe

FIELDS = {"prompt", "messages", "max_tokens", "temperature", "stop", "stream", "logprobs", "echo", "tools", "tokens"}


def test_routes_are_described(served):
    status, document = served.ask("/openapi.json")
    assert status == 200
    assert document == describe()
    for path, methods in document["paths"].items():
        actual = served.ask(path, {} if "post" in methods else None)[0] if path != "/metrics" else 200
        assert actual != 404, path


def test_fields_are_described(served):
    schemas = describe()["components"]["schemas"]
    assert set().union(*(schema["properties"] for schema in schemas.values())) >= FIELDS


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed")
def test_random_requests(served):
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    options = ["--phases", "coverage,fuzzing", "--max-examples", "20", "--checks", checks, "--no-color"]
    code = "import sys; from schemathesis.cli import schemathesis; sys.exit(schemathesis())"
    command = [sys.executable, "-c", code, "run", f"{served.url}/openapi.json", "--max-time", "50"]
    run = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout[-3000:]
    assert served.bridge.num_open == 0
