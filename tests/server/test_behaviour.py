"""Test keys, limits, clients that disconnect or do not read, failing steps, and shutdown."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner

from quantkit.cli import main
from quantkit.server import streams
from quantkit.server.bridge import seconds_to_wait
from quantkit.server.run import bind
from tests.server.conftest import serving, wait_until

LONG = {"prompt": "a", "max_tokens": 480, "temperature": 0, "ignore_eos": True}


def open_stream(server, body) -> socket.socket:
    """Return a connection on which a stream has begun."""
    data = json.dumps({**body, "stream": True}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    connection.sendall(f"{head}\r\n\r\n".encode() + data)
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


def is_idle(server) -> bool:
    return server.bridge.num_open == 0 and not server.bridge.engine.has_work


def test_key(checkpoint):
    with serving(checkpoint, settings={"key": "s3cret", "log": None}) as server:
        body = {"prompt": "a", "max_tokens": 1}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
            status, answer = server.ask("/v1/completions", body, **headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert "s3cret" not in json.dumps(answer)
        assert server.ask("/metrics")[0] == server.ask("/openapi.json")[0] == 401
        assert server.ask("/v1/completions", body, Authorization="Bearer s3cret")[0] == 200
        assert server.ask("/health")[0] == server.ask("/ready")[0] == 200
        assert not any("s3cret" in line for line in server.lines)


def test_who_waits_too_long_in_line_is_sent_away(checkpoint):
    with serving(checkpoint, max_waiting=1, max_sequences=1) as server:
        streams = [open_stream(server, LONG) for _ in range(2)]
        request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(LONG).encode())
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request)
        assert caught.value.code == 429
        assert caught.value.headers["Retry-After"] == "1"  # no request has ended yet
        status, answer = server.ask("/v1/completions", {**LONG, "prompt": ["a"] * 3})
        assert (status, "accepts at most 2 answers at once" in answer["error"]["message"]) == (400, True)
        for stream in streams:
            stream.close()
        wait_until(lambda: is_idle(server))
        assert server.ask("/v1/completions", {**LONG, "max_tokens": 2})[0] == 200


@pytest.mark.parametrize(("ends", "num_waiting", "seconds"), [
    ((), 256, 1),
    ((100.0,), 256, 1),
    ((90.0, 95.0, 100.0), 8, 20),  # one request ends every 5 s; 4 of 8 must have started
    ((98.0, 99.0), 3, 3),  # one request in the last 2 s
    ((99.0, 99.1, 99.2, 100.0), 2, 1),
    ((0.0, 100.0), 256, 60),
])  # fmt: skip
def test_how_long_to_stay_away(ends, num_waiting, seconds):
    assert seconds_to_wait(ends, num_waiting, now=100.0) == seconds


def test_longest_prompt(checkpoint):
    with serving(checkpoint, settings={"max_prompt": 10}) as server:
        assert server.ask("/v1/completions", {"prompt": [5] * 10, "max_tokens": 1})[0] == 200
        status, answer = server.ask("/v1/completions", {"prompt": [5] * 11, "max_tokens": 1})
        assert status == 400
        assert answer["error"]["message"] == "the prompt has 11 tokens; this server accepts at most 10, so shorten it"


def test_a_client_that_leaves_frees_its_pages_within_a_step(served):
    stream = open_stream(served, LONG)
    wait_until(lambda: served.bridge.engine.scheduler.running)
    sequence = served.bridge.engine.scheduler.running[0]
    stream.close()
    wait_until(lambda: is_idle(served))
    assert len(sequence.ids) < 400, "the request was computed to its end"
    assert not sequence.pages


def test_a_waiting_client_that_leaves_is_taken_out_of_the_line(checkpoint):
    with serving(checkpoint, max_sequences=1) as server:
        first, second = open_stream(server, LONG), open_stream(server, LONG)
        wait_until(lambda: server.bridge.engine.scheduler.waiting)
        second.close()
        wait_until(lambda: not server.bridge.engine.scheduler.waiting)
        assert server.bridge.num_open == 1
        first.close()
        wait_until(lambda: is_idle(server))


def test_who_does_not_read_keeps_nobody_waiting(served, monkeypatch):
    monkeypatch.setattr(streams, "SEND_SECONDS", 0.2)
    slow = [open_stream(served, {**LONG, "logprobs": 20, "prompt": ["a"] * 4}) for _ in range(2)]
    assert served.ask("/v1/completions", {**LONG, "max_tokens": 20})[0] == 200
    wait_until(lambda: is_idle(served))
    for stream in slow:
        stream.close()


def test_a_failing_step_ends_its_requests_alone(checkpoint):
    with serving(checkpoint) as server:
        step, engine = server.bridge.engine.runner.step, server.bridge.engine

        def fail(chunks, tokens=None):
            engine.runner.step = step
            raise RuntimeError("planted")

        engine.runner.step = fail
        status, answer = server.ask("/v1/completions", LONG)
        assert (status, answer["error"]["type"]) == (500, "server_error")
        assert any("planted" in line for line in server.lines)
        assert server.ask("/v1/completions", {**LONG, "max_tokens": 3})[0] == 200

        def fail_always(chunks, tokens=None):
            raise RuntimeError("planted")

        engine.runner.step = fail_always
        for _ in range(3):
            server.ask("/v1/completions", LONG)
        assert server.ask("/health")[0] == 503
        engine.runner.step = step
        assert server.ask("/v1/completions", {**LONG, "max_tokens": 3})[0] == 200
        assert server.ask("/health")[0] == 200


def test_an_error_in_a_stream_is_told(checkpoint):
    with serving(checkpoint) as server:

        def fail(chunks, tokens=None):
            raise RuntimeError("planted")

        server.bridge.engine.runner.step = fail
        request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps({**LONG, "stream": True}).encode())
        with urllib.request.urlopen(request) as answer:
            lines = [line for line in answer.read().decode().splitlines() if line]
        assert json.loads(lines[0].removeprefix("data: "))["error"]["type"] == "server_error"
        assert lines[-1] == "data: [DONE]"


def test_tokens_do_not_wait_for_acknowledgements():
    """asyncio sets TCP_NODELAY only on sockets that name their protocol."""
    with bind("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        assert accepted.proto == socket.IPPROTO_TCP
        accepted.close()


def test_metrics(checkpoint):
    with serving(checkpoint) as server:
        server.ask("/v1/completions", {**LONG, "prompt": [5] * 7, "max_tokens": 4})
        server.ask("/v1/completions", {"prompt": 5})
        with urllib.request.urlopen(f"{server.url}/metrics") as answer:
            values = dict(re.findall(r"^(\S+) ([0-9.e+]+)$", answer.read().decode(), re.M))
        for name, value in {
            "quantkit_prompt_tokens_total": 7,
            "quantkit_generated_tokens_total": 4,
            'quantkit_requests_ended_total{reason="length"}': 1,
            'quantkit_requests_rejected_total{status="400"}': 1,
            "quantkit_time_to_first_token_seconds_count": 1,
            "quantkit_inter_token_seconds_count": 3,
            "quantkit_requests_running": 0,
            "quantkit_kv_pages_used": 0,
        }.items():
            assert float(values[name]) == value, name


def test_a_request_arrives_when_it_comes_and_not_after_the_step(checkpoint):
    with serving(checkpoint) as server:
        engine, began, go_on = server.bridge.engine, threading.Event(), threading.Event()
        step, arrived = engine.runner.step, []

        def hold(chunks, tokens=None):
            began.set()
            assert go_on.wait(30)
            arrived.extend(chunk.holder.arrived for chunk in chunks)
            return step(chunks, tokens)

        engine.runner.step = hold
        with ThreadPoolExecutor() as pool:
            asked = [pool.submit(server.ask, "/v1/completions", {**LONG, "max_tokens": 2})]
            assert began.wait(30)
            asked.append(pool.submit(server.ask, "/v1/completions", {**LONG, "max_tokens": 1}))
            wait_until(lambda: server.bridge.num_open == 2)
            released = time.perf_counter()
            go_on.set()
            assert [each.result()[0] for each in asked] == [200, 200]
        assert len(set(arrived)) == 2
        assert max(arrived) < released


def test_pages_of_other_origins(checkpoint):
    origin, other = "http://chat.example", "http://other.example"
    with serving(checkpoint, settings={"key": "k", "origins": (origin,)}) as server:

        def ask(method, path, **headers):
            request = urllib.request.Request(server.url + path, method=method, headers=headers)
            try:
                with urllib.request.urlopen(request) as answer:
                    return answer.status, answer.headers.get("Access-Control-Allow-Origin")
            except urllib.error.HTTPError as error:
                return error.code, error.headers.get("Access-Control-Allow-Origin")

        question = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        assert ask("OPTIONS", "/v1/completions", Origin=origin, **question) == (200, origin)
        assert ask("OPTIONS", "/v1/completions", Origin=other, **question) == (400, None)
        assert ask("GET", "/v1/models", Origin=origin, Authorization="Bearer k") == (200, origin)
        assert ask("GET", "/v1/models", Origin=other, Authorization="Bearer k") == (403, None)
        assert ask("GET", "/v1/models", Origin=server.url, Authorization="Bearer k") == (200, None)
        assert ask("GET", "/v1/models", Origin=origin) == (401, origin)
        assert ask("GET", "/v1/models/", Authorization="Bearer k") == (200, None)


def test_pages_ask_no_server_that_allows_none(served):
    """A browser sends a page's plain text without asking the server first."""
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    for origin, status in {"http://other.example": 403, "null": 403, served.url: 200}.items():
        got, answer = served.ask("/v1/completions", body, **{"Content-Type": "text/plain"}, Origin=origin)
        assert got == status
        assert status == 200 or answer["error"]["code"] == "origin_not_allowed"


def test_what_is_under_way_is_answered_before_the_end(checkpoint):
    with serving(checkpoint) as server, ThreadPoolExecutor() as pool:
        asked = [pool.submit(server.ask, "/v1/completions", LONG) for _ in range(3)]
        wait_until(lambda: server.bridge.num_open == 3)
        server.http.end()
        assert [each.result()[0] for each in asked] == [200] * 3
        server.thread.join(timeout=30)
        assert not server.thread.is_alive()


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path, checkpoint):
    from quantkit.runtime.llm import LLM
    from tests.server.conftest import Served

    llm = LLM(checkpoint, lazy=True, threads=1)
    llm._load = lambda: (_ for _ in ()).throw(MemoryError("planted"))
    caught = []
    before, threading.excepthook = threading.excepthook, lambda info: caught.append(info.exc_value)
    try:
        server = Served(llm)
        server.thread.join(timeout=30)
    finally:
        threading.excepthook = before
    assert not server.thread.is_alive()
    assert [str(error) for error in caught] == ["planted"]


@pytest.mark.parametrize(("arguments", "words"), [
    (["--host", "0.0.0.0"], "no key is set; give --api-key, or --no-api-key"),
    (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid:8000"),
    (["nowhere-at-all"], "nowhere-at-all"),
    (["--allow-origin", "chat.example"], "--allow-origin 'chat.example' is not an origin; give SCHEME://HOST[:PORT]"),
])  # fmt: skip
def test_refused_before_anything_is_loaded(arguments, words, monkeypatch):
    monkeypatch.delenv("QUANTKIT_API_KEY", raising=False)
    result = CliRunner().invoke(main, ["serve", *(["--api-key", "k"] if "invalid" in words else []), *arguments])
    assert result.exit_code == 4
    assert words in result.output


def test_a_port_that_is_taken_is_one_line(checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = CliRunner().invoke(main, ["serve", "--port", str(taken.getsockname()[1])])
    assert result.exit_code == 4
    assert "Address already in use" in result.output


@pytest.mark.slow
@pytest.mark.parametrize(("signals", "code"), [([signal.SIGTERM], 0), ([signal.SIGINT, signal.SIGINT], 130)])
def test_signals(checkpoint, signals, code):
    command = [sys.executable, "-m", "quantkit", "serve", str(checkpoint), "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        line = process.stderr.readline()
        port = int(re.search(r":(\d+)/v1", line).group(1))
        body = json.dumps({**LONG, "prompt": ["a"] * 30, "stream": True}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body)
        with urllib.request.urlopen(request) as answer:
            answer.readline()
            process.send_signal(signals[0])
            assert "answered first" in process.stderr.readline()
            for number in signals[1:]:
                process.send_signal(number)
            rest = answer.read() if code == 0 else b""
        assert process.wait(timeout=30) == code
    if code == 0:
        assert rest.endswith(b"data: [DONE]\n\n")
