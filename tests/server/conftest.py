"""A server on a real socket, in a thread of this process, with a tiny model that has a chat template."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from tests.helpers import save_tokenizer
from tests.runtime.helpers import make_loud_model

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from quantkit.runtime.llm import LLM
from quantkit.server.app import Server
from quantkit.server.bridge import Bridge
from quantkit.server.run import HttpServer, bind

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'judge' %}{{ raise_exception('no judge here') }}{% endif %}["
    "{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if tools %}tools: {{ tools | length }}\n{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    folder = make_loud_model(tmp_path_factory.mktemp("served"), "llama", max_position_embeddings=512)
    save_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return folder


class Served:
    """A running server.

    Args:
        llm: LLM whose model is not loaded yet.
        max_waiting: see `Bridge`.
        settings: further arguments of `Server`.
    """

    def __init__(self, llm: LLM, max_waiting: int = 64, **settings) -> None:
        self.llm = llm
        self.lines: list[str] = []
        self.bridge = Bridge(llm, max_waiting=max_waiting, say=self.lines.append)
        self.server = Server(bridge=self.bridge, name="tiny", **settings)
        self.http = HttpServer(self.server, self.lines.append)
        socket = bind("127.0.0.1", 0)
        self.port = socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.http.run_until_ended, args=[socket])
        self.thread.start()
        wait_until(lambda: self.bridge.is_ready or self.bridge.failure)

    def ask(self, path: str, body=None, **headers) -> tuple[int, dict]:
        """Return the status and the JSON of a response; a `body` of bytes is sent unchanged."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or "{}")

    def close(self) -> None:
        self.http.end()
        self.thread.join(timeout=30)
        if self.thread.is_alive():
            with tempfile.TemporaryFile("w+") as stacks:
                faulthandler.dump_traceback(stacks)
                stacks.seek(0)
                state = self.http.server_state
                pytest.fail(f"the server did not end: {state.connections}, {state.tasks}\n{stacks.read()}")


def wait_until(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"the condition did not become true within {seconds} s"
        time.sleep(0.002)


@contextlib.contextmanager
def serving(checkpoint: Path, *, max_waiting: int = 64, settings=None, **engine):
    server = Served(LLM(checkpoint, lazy=True, threads=1, **engine), max_waiting, **(settings or {}))
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def served(checkpoint):
    with serving(checkpoint, max_sequences=8) as server:
        yield server
        wait_until(lambda: not server.bridge.engine.has_work)
        server.bridge.engine.check_integrity()
        assert server.bridge.engine.pool.num_free == server.bridge.engine.pool.num_pages
        assert server.bridge.num_open == 0
