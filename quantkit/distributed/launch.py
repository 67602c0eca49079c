"""A command as several processes of this machine, started and watched by torch's own launcher."""

import logging
import os
import secrets
import signal
import sys
from collections.abc import Sequence

from quantkit.distributed.lifeline import LAUNCHED, RESUME, lost, say
from quantkit.errors import ResourceError
from quantkit.machine.cores import available_cores


def launch(nproc: int, command: Sequence[str]) -> int:
    """Run a command as that many processes of this machine; the exit code of all.

    What goes wrong inside of them they say themselves; who is killed cannot, so that is said here.

    Args:
        nproc: as many processes. The CPU's threads are divided among them, unless OMP_NUM_THREADS says how many.
        command: a program and its arguments.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // nproc)))
    os.environ[LAUNCHED] = str(os.getpid())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=secrets.token_hex(8),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
    )
    logging.disable(logging.CRITICAL)  # its own words about a failure are a page
    try:
        elastic_launch(config, command[0])(*command[1:])
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
        del os.environ[LAUNCHED]
        logging.disable(logging.NOTSET)
    return 0
