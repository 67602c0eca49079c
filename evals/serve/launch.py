"""Start servers of quantkit, llama.cpp and vLLM in separate processes. All have OpenAI's API."""

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
        url: address of the server's root.
        process: process of the server.
    """

    def __init__(self, url: str, process: subprocess.Popen[str]) -> None:
        self.url, self.process = url, process


@contextlib.contextmanager
def quantkit(
    model: str | None, arguments: Sequence[str] = (), program: Sequence[str] = ("-m", "quantkit")
) -> Iterator[Server]:
    """Start quantkit's server.

    Args:
        model: checkpoint; None = the demo model.
        arguments: further arguments of `quantkit serve`.
        program: arguments that tell Python which program to run.
    """
    command = [sys.executable, *program, "serve", *([model] if model else []), "--port", "0"]
    process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
    with _ended(process):
        assert process.stderr is not None
        line = process.stderr.readline()
        address = re.search(r"http://\S+:\d+", line)
        if address is None:
            raise SystemExit(f"quantkit serve did not start: {line}{process.stderr.read()}")
        yield Server(address.group(), process)


@contextlib.contextmanager
def llama_server(binary: str, model: Path, *, streams: int, threads: int, context: int) -> Iterator[Server]:
    """Start llama.cpp's server with a slot for each stream; it does not keep prompts between requests."""
    port = _free_port()
    slots = ["--parallel", str(streams), "--ctx-size", str(streams * context), "--no-cache-prompt", "--no-webui"]
    computing = ["--threads", str(threads), "--threads-batch", str(threads), "--port", str(port)]
    with _other([binary, "--model", str(model), *slots, *computing], port, {}) as server:
        yield server


@contextlib.contextmanager
def vllm(python: str, model: Path, *, streams: int, threads: int, context: int) -> Iterator[Server]:
    """Start vLLM's server on a CPU."""
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
    # Not `vllm serve`, which looks for a package named vllm and does not find vllm-cpu.
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
                    raise SystemExit(f"{command[0]} did not start:\n{log.read()[-3000:]}")
                time.sleep(0.2)
            yield Server(url, process)


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str], *, group: bool = False) -> Iterator[None]:
    """End the process when the block ends; with `group`, end all processes that it started too."""
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
