"""Jobs of several processes, forked ready to work: what a launcher does, without its seconds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests import forked

THREE_BATCHES = 128  # tokens, of 8 samples of 48


def _work(number: int, count: int, port: int, errors: Path, function: Callable[..., object], arguments: Any) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with errors.open("w", buffering=1) as stream, redirect_stderr(stream):
        function(*arguments)


def run(folder: Path, count: int, function: Callable[..., object], *arguments: Any) -> tuple[list[int | None], str]:
    """`function(*arguments)` of a module in so many processes, ended together as torchrun ends them.

    Returns:
        Exit codes, and all that was said on stderr.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    files = [folder / str(number) for number in range(count)]
    processes: list[BaseProcess] = [
        forked.start(_work, number, count, store.port, files[number], function, arguments) for number in range(count)
    ]
    end = time.monotonic() + 120
    while time.monotonic() < end and any(process.exitcode is None for process in processes):
        if any(process.exitcode for process in processes):
            break
        time.sleep(0.1)
    for process in processes:
        process.terminate()
        process.join()
    return [process.exitcode for process in processes], "".join(file.read_text() for file in files if file.exists())


def launch_and_die(folder: Path, function: Callable[..., object]) -> None:
    """As torchrun does, and killed once two processes are at work, which leave `<pid>.ready` in the folder."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for number in range(2):
        if os.fork() == 0:
            try:
                _work(number, 2, store.port, folder / str(number), function, (folder,))
            finally:
                os._exit(0)
    while len(list(folder.glob("*.ready"))) < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def command(arguments: list[str], batch_tokens: int, layers: int | None = None, killed: int | None = None) -> None:
    """`quantkit ...` on small batches, with matrices cut that are small.

    Args:
        arguments: of the command line.
        batch_tokens: that go through a layer at once.
        layers: after which process `killed` dies.
    """
    from quantkit.cli import main
    from quantkit.compress.algorithms import _gptq_jobs, gptq
    from quantkit.compress.calibration import observers
    from quantkit.compress.pipeline import inputs
    from quantkit.compress.pipeline.state import RunState

    inputs._BATCH_TOKENS_ON_CPU = batch_tokens
    _gptq_jobs._SHORTEST, gptq._DIVIDED_ROWS, observers._PANEL = 32, 16, 16
    if layers is not None and int(os.environ["RANK"]) == killed:
        _die_after(layers, RunState)
    main(arguments)


def _die_after(layers: int, state: Any) -> None:
    """In the first process once a layer is recorded, in another once it has moved on to the next one."""
    from quantkit.compress.pipeline import layers as pipeline

    if os.environ["RANK"] == "0":
        save = state.save

        def saved(self: Any, folder: Path) -> None:
            save(self, folder)
            if len(self.records) == layers:
                os.kill(os.getpid(), 9)

        state.save = saved
        return
    context = pipeline.layer_context

    def layer(plan: Any, index: int, *rest: Any) -> Any:
        if index == layers:
            os.kill(os.getpid(), 9)
        return context(plan, index, *rest)

    pipeline.layer_context = layer
