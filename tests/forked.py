"""Processes of their own, forked from one that has imported what a compression needs: the imports take seconds."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import transformers.models.llama.modeling_llama  # noqa: F401

import quantkit.cli.quantize
import quantkit.compress.pipeline.run  # noqa: F401
from quantkit.cli import main


def start(function: Callable[..., object], *arguments: Any) -> BaseProcess:
    """A process in which a function of a module works; `join` waits, `exitcode` is negative after a signal."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=function, args=arguments)
    process.start()
    return process


def run(function: Callable[..., object], *arguments: Any) -> int | None:
    """Its exit code."""
    process = start(function, *arguments)
    process.join(300)
    return process.exitcode


def _main(arguments: list[str], stdout: Path, stderr: Path) -> None:
    with stdout.open("w") as out, stderr.open("w") as err, redirect_stdout(out), redirect_stderr(err):
        main(arguments)


class Command:
    """`quantkit ...`, started."""

    def __init__(self, *arguments: object):
        self._folder = tempfile.TemporaryDirectory()
        self._streams = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        self.process = start(_main, list(map(str, arguments)), *self._streams)

    def finish(self) -> tuple[int | None, str, str]:
        """Exit code, stdout, stderr."""
        self.process.join(300)
        stdout, stderr = (path.read_text() for path in self._streams)
        return self.process.exitcode, stdout, stderr
