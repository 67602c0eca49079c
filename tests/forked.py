"""Processes that may be killed: forked from one that has imported what a compression needs, which takes seconds."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import transformers.models.llama.modeling_llama  # noqa: F401

import quantkit.cli.quantize
import quantkit.compress.pipeline.run  # noqa: F401


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
