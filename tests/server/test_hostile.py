"""Test attacks on the server: costly bodies, host names of other sites, connections that send nothing."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
import threading
import time

import pytest

from quantkit.server import run
from quantkit.server.admission import known_hosts
from tests.server.conftest import serving, wait_until

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]


def listed(item: str, count: int) -> str:
    return "[" + ",".join([item] * count) + "]"


def schema(value: object) -> bytes:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}
    return json.dumps({"messages": HELLO, "max_tokens": 2, "response_format": form}).encode()


def prompt(text: str) -> bytes:
    return f'{{"prompt": {text}, "max_tokens": 1}}'.encode()


MANY = listed("{}", 4_000_000)
COSTLY = {
    "objects": (TEXT, prompt(MANY), "lists and objects"),
    "lists": (TEXT, prompt(listed("[]", 4_000_000)), "lists and objects"),
    "empty texts": (TEXT, prompt(f"[{listed(json.dumps(''), 4_000_000)}]"), "values"),
    "token ids": (TEXT, prompt(listed("5", 5_000_000)), "values"),
    "tools": (CHAT, f'{{"messages": {json.dumps(HELLO)}, "tools": {MANY}}}'.encode(), "lists and"),
    "parts": (
        CHAT,
        f'{{"messages": [{{"role": "user", "content": {MANY}}}]}}'.encode(),
        "lists and",
    ),
    "biases": (TEXT, b'{"prompt": "a", "logit_bias": {' + b'"5": 1,' * 1_000_000 + b'"6": 1}}', "entries"),
    "enum": (CHAT, schema({"enum": [str(number) for number in range(500_000)]}), "values"),
    "a long text": (TEXT, prompt(json.dumps("word, " * 660_000)), "tokens"),
    "many texts": (TEXT, prompt(json.dumps(["words of a prompt " * 200] * 1024)), "1024 prompts"),
}


def answered_beside_health(server, path: str, body: bytes) -> tuple[int, str]:
    """Return the status and the message for a body; meanwhile, `/health` must answer within two seconds."""
    answers, slowest = [], 0.0
    asking = threading.Thread(target=lambda: answers.append(server.ask(path, body)))
    asking.start()
    while asking.is_alive():
        began = time.monotonic()
        assert server.ask("/health")[0] == 200
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(0.01)
    assert slowest < 2
    ((status, answer),) = answers
    return status, answer["error"]["message"]


@pytest.mark.parametrize("case", COSTLY)
def test_a_costly_body_is_refused_while_others_are_answered(served, case):
    path, body, words = COSTLY[case]
    status, message = answered_beside_health(served, path, body)
    assert status == 400
    assert words in message


def test_a_schema_that_takes_long_holds_nobody_up(served):
    """Compiling this schema takes many seconds; it runs in a separate process, which is stopped."""
    body = schema({"type": "number", "multipleOf": 999_983, "minimum": 0, "maximum": 10**9})
    status, message = answered_beside_health(served, CHAT, body)
    assert status == 400
    assert "json_schema is too complex" in message


def test_tools_that_take_long_hold_nobody_up(served):
    age = {"type": "number", "multipleOf": 999_983, "minimum": 0, "maximum": 10**9}
    function = {"name": "f", "parameters": {"properties": {"age": age}, "required": ["age"]}}
    tools = [{"type": "function", "function": function}]
    body = json.dumps({"messages": HELLO, "max_tokens": 2, "tools": tools, "tool_choice": "required"}).encode()
    status, message = answered_beside_health(served, CHAT, body)
    assert status == 400
    assert "grammar is too complex" in message
    assert served.ask(CHAT, json.loads(body) | {"tool_choice": "auto"})[0] == 200


def test_marks_inside_texts_are_no_values(served):
    status, _ = served.ask(TEXT, {"prompt": '[{:,"\\' * 40, "max_tokens": 1})
    assert status == 200


def talk(port: int, *lines: str) -> tuple[int, bytes]:
    """Send one request as raw lines; return the status and the bytes of the response."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    return int(answer.split()[1]), answer


@pytest.fixture(scope="module")
def local(checkpoint):
    with serving(checkpoint, settings={"hosts": known_hosts("127.0.0.1", ("ally.example",))}) as server:
        yield server


@pytest.mark.parametrize(("host", "status"), [
    ("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("LOCALHOST.", 200), ("ally.example:9", 200),
    ("attacker.example", 403), ("localhost.attacker.example", 403), ("localhost@attacker.example", 403), ("", 403),
])  # fmt: skip
def test_only_names_of_this_machine_are_answered(local, host, status):
    """A page whose domain was made to resolve to 127.0.0.1 sends this domain as Host and in Origin."""
    origin = f"Origin: http://{host}"
    assert talk(local.port, "GET /v1/models HTTP/1.1", f"Host: {host}", origin, "Connection: close")[0] == status


def test_two_origins_are_refused(local):
    own = f"Origin: http://localhost:{local.port}"
    lines = ("GET /v1/models HTTP/1.1", f"Host: localhost:{local.port}", own, "Connection: close")
    assert talk(local.port, *lines)[0] == 200
    assert talk(local.port, *lines, "Origin: http://attacker.example")[0] == 403
    assert talk(local.port, lines[0], lines[1], "Origin: http://attacker.example", *lines[2:])[0] == 403


def test_two_lengths_are_refused_and_the_connection_is_closed(local):
    """A proxy and the server could disagree on where the body ends; one would take its rest for the next request."""
    lines = (f"POST {TEXT} HTTP/1.1", "Host: localhost", "Content-Length: 5", "Transfer-Encoding: chunked")
    status, answer = talk(local.port, *lines, "", "0")
    assert status == 400
    assert answer.count(b"HTTP/1.1") == 1


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_half_a_head_is_waited_for_so_long_only(local, monkeypatch):
    monkeypatch.setattr(run, "HEAD_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", local.port)) as half:
        half.sendall(b"GET /health HTTP/1.1\r\nHost: local")
        wait_until(lambda: is_closed(half), 5)
    assert local.ask("/health")[0] == 200


@pytest.mark.slow
def test_idle_connections_give_way_to_new_ones(checkpoint):
    """This also holds with a low limit of open files. asyncio would log each connection for which it has no file."""
    patient = "from quantkit.server import run; run.HEAD_SECONDS = 999.0; from quantkit.cli import main; main()"
    command = shlex.join([sys.executable, "-c", patient, "serve", str(checkpoint), "--port", "0", "--threads", "1"])
    limited = ["bash", "-c", f"ulimit -n 256; exec {command}"]
    with subprocess.Popen(limited, stderr=subprocess.PIPE, text=True) as server:
        port = int(re.search(r":(\d+)/v1", server.stderr.readline()).group(1))
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(400)]
        try:
            assert talk(port, "GET /health HTTP/1.1", "Host: localhost", "Connection: close")[0] == 200
            wait_until(lambda: sum(map(is_closed, held)) >= 400 - 256 // 2)
            assert not is_closed(held[-1])
        finally:
            for connection in held:
                connection.close()
            server.terminate()
        said = server.stderr.read()
    assert said.count("\n") == 1, said
    assert said.startswith("shutting down")


@pytest.mark.parametrize("number", [-1, 10**6, 10**30])
def test_a_stop_token_that_cannot_be_is_refused(served, number):
    status, answer = served.ask(TEXT, {"prompt": "a", "max_tokens": 1, "stop_token_ids": [number]})
    assert status == 400
    assert "stop_token_ids" in answer["error"]["message"] or answer["error"]["param"] == "stop_token_ids"


def test_draining_ends_after_its_seconds(checkpoint):
    with serving(checkpoint) as server:
        server.http.config.timeout_graceful_shutdown = 0.2
        go_on, runner = threading.Event(), server.bridge.engine.runner
        step = runner.step
        runner.step = lambda *args: go_on.wait(30) and step(*args)
        body = json.dumps({"prompt": "a", "max_tokens": 9}).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + body)
            wait_until(lambda: server.bridge.num_open == 1)
            began = time.monotonic()
            server.http.end()
            wait_until(lambda: any("cut off" in line for line in server.lines), 10)
            assert time.monotonic() - began < 5
            go_on.set()
