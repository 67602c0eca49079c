"""Jobs of several processes, forked ready to work: what a launcher does, without its seconds."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from quantkit.distributed import lifeline
from tests import forked

THREE_BATCHES = 128  # tokens, of 8 samples of 48
_HELD: list[Any] = []  # files, open as long as the process


def _work(number: int, count: int, port: int, errors: Path, function: Callable[..., object], arguments: Any) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with errors.open("w", buffering=1) as stream, redirect_stderr(stream):
        function(*arguments)


def free_port() -> int:
    """On which the processes of a job can meet."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def start(folder: Path, count: int, function: Callable[..., object], *arguments: Any) -> list[BaseProcess]:
    """`function(*arguments)` of a module in so many processes; what each says on stderr goes to `folder/<number>`."""
    port = free_port()
    return [
        forked.start(_work, number, count, port, folder / str(number), function, arguments) for number in range(count)
    ]


def finish(folder: Path, processes: list[BaseProcess]) -> tuple[list[int | None], str]:
    """Exit codes, and all that was said on stderr."""
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes], "".join(
        (folder / str(number)).read_text() for number in range(len(processes)) if (folder / str(number)).exists()
    )


def run(folder: Path, count: int, function: Callable[..., object], *arguments: Any) -> tuple[list[int | None], str]:
    """Start and finish."""
    return finish(folder, start(folder, count, function, *arguments))


def hold(folder: Path) -> None:
    """Keep a file locked until this process is gone; see `run_until_launcher_is_killed`."""
    file = (folder / f"{os.environ['RANK']}.held").open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    _HELD.append(file)


def get_ready(folder: Path) -> None:
    """From here on the launcher may be killed."""
    (folder / f"{os.environ['RANK']}.ready").touch()


def _launch_and_die(folder: Path, port: int, function: Callable[..., object]) -> None:
    """As `launch` does, and killed once two processes are at work."""
    os.environ |= {lifeline.LAUNCHED: str(os.getpid()), lifeline._STARTED: "job"}
    for number in range(2):
        if os.fork() == 0:
            try:
                _work(number, 2, port, folder / str(number), function, (folder,))
            finally:
                os._exit(0)
    while len(list(folder.glob("*.ready"))) < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def run_until_launcher_is_killed(folder: Path, function: Callable[[Path], object]) -> list[str]:
    """What each of two processes has said when both are gone; `function` calls `hold`, then `get_ready`."""
    assert forked.run(_launch_and_die, folder, free_port(), function) == -signal.SIGKILL
    for number in range(2):
        with (folder / f"{number}.held").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # as soon as the process is gone
    return [(folder / str(number)).read_text() for number in range(2)]


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
    from quantkit.compress.pipeline import run as pipeline

    if os.environ["RANK"] == "0":
        save = state.save

        def saved(self: Any, folder: Path) -> None:
            save(self, folder)
            if len(self.records) == layers:
                os.kill(os.getpid(), 9)

        state.save = saved
        return
    context = pipeline._layer_context

    def layer(plan: Any, index: int, *rest: Any) -> Any:
        if index == layers:
            os.kill(os.getpid(), 9)
        return context(plan, index, *rest)

    pipeline._layer_context = layer
