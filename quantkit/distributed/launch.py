"""A command as several processes of this machine, started and watched by torch's own launcher."""

import atexit
import logging
import multiprocessing
import os
import runpy
import secrets
import signal
import sys
from collections.abc import Sequence
from multiprocessing import forkserver

from quantkit.distributed.lifeline import LAUNCHED, RESUME, lost, say
from quantkit.errors import ResourceError

# That of Python's that tidies up behind a launcher that was killed says so.
_QUIET = "ignore:resource_tracker:UserWarning"


def launch(
    nproc: int, arguments: Sequence[str], program: Sequence[str] = ("-m", "quantkit"), ready: Sequence[str] = ()
) -> int:
    """Run `quantkit` with these arguments as that many processes of this machine; the exit code of all.

    What goes wrong inside of them they say themselves; who is killed cannot, so that is said here.

    Args:
        nproc: as many processes. The CPU's threads are divided among them, unless OMP_NUM_THREADS says how many.
        arguments: of the command line.
        program: that Python runs with them.
        ready: modules that all of them need, imported once, by the process that they are forked from while this one
            imports the launcher; they must not touch a GPU.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    multiprocessing.set_forkserver_preload(list(ready))
    sys.warnoptions.append(_QUIET)
    try:
        forkserver.ensure_running()
    finally:
        sys.warnoptions.remove(_QUIET)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=secrets.token_hex(8),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        start_method="forkserver",
    )
    logging.disable(logging.CRITICAL)  # its own words about a failure are a page
    try:
        elastic_launch(config, _run)(tuple(program), tuple(arguments))
    except ChildFailedError as error:
        codes = {number: failure.exitcode for number, failure in error.failures.items()}
        killed = next((number for number, code in codes.items() if code < 0 and code != -signal.SIGTERM), None)
        if killed is None:
            return next((code for code in codes.values() if code > 0), ResourceError.exit_code)
        say(f"{lost(killed)} (signal {-codes[killed]}); {RESUME}", sys.stderr)
        return ResourceError.exit_code
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _run(program: Sequence[str], arguments: Sequence[str]) -> None:
    """In a process of the job: a program, as Python runs it."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "has been forked"
    os.environ[LAUNCHED] = str(parent.pid)
    sys.argv = [*program[program[0] == "-m" :], *arguments]
    try:
        if program[0] == "-m":
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which Python leaves out where it has forked
