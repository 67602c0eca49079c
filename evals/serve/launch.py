"""Servers of models in processes of their own: ours, llama.cpp's, vLLM's. All speak OpenAI's API."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

READY_SECONDS = 900.0


class Server:
    """A running server.

    Args:
        url: to its root.
        process: of it.
    """

    def __init__(self, url: str, process: subprocess.Popen[str]) -> None:
        self.url, self.process = url, process


@contextlib.contextmanager
def quantkit(
    model: str | None, arguments: Sequence[str] = (), program: Sequence[str] = ("-m", "quantkit")
) -> Iterator[Server]:
    """Our server.

    Args:
        model: checkpoint; None = the demo model.
        arguments: further ones of `quantkit serve`.
        program: what Python runs.
    """
    command = [sys.executable, *program, "serve", *([model] if model else []), "--port", "0"]
    process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
    with _ended(process):
        assert process.stderr is not None
        line = process.stderr.readline()
        address = re.search(r"http://\S+:\d+", line)
        if address is None:
            raise SystemExit(f"quantkit serve does not start: {line}{process.stderr.read()}")
        yield Server(address.group(), process)


@contextlib.contextmanager
def llama_server(binary: str, model: Path, *, streams: int, threads: int, context: int) -> Iterator[Server]:
    """llama.cpp's, with a slot for each stream; prompts are not kept between requests."""
    port = _free_port()
    slots = ["--parallel", str(streams), "--ctx-size", str(streams * context), "--no-cache-prompt", "--no-webui"]
    computing = ["--threads", str(threads), "--threads-batch", str(threads), "--port", str(port)]
    with _other([binary, "--model", str(model), *slots, *computing], port, {}) as server:
        yield server


@contextlib.contextmanager
def vllm(python: str, model: Path, *, streams: int, threads: int, context: int) -> Iterator[Server]:
    """vLLM's on a CPU."""
    port = _free_port()
    shape = ["--max-num-seqs", str(streams), "--max-model-len", str(context), "--dtype", "bfloat16"]
    plain = ["--enforce-eager", "--no-enable-prefix-caching", "--port", str(port), "--host", "127.0.0.1"]
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:threads])
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    # Not `vllm serve`, which asks for the version of a package called vllm, and vllm-cpu is not called so.
    module = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    with _other([*module, *shape, *plain], port, environment) as server:
        yield server


@contextlib.contextmanager
def _other(command: Sequence[str], port: int, environment: dict[str, str]) -> Iterator[Server]:
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, text=True, env={**os.environ, **environment}, start_new_session=True
        )
        with _ended(process, group=True):
            url, end = f"http://127.0.0.1:{port}", time.monotonic() + READY_SECONDS
            while not _is_ready(url):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise SystemExit(f"{command[0]} does not start:\n{log.read()[-3000:]}")
                time.sleep(0.2)
            yield Server(url, process)


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str], *, group: bool = False) -> Iterator[None]:
    """At the end the process is gone, and with `group` whatever it started."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
        if group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])
