"""GPU kernels where they have never run: tried by children before a model is loaded; what came of it is kept.

A child per family, all at once: what crashes or hangs ends its child only. What gave no result is tried again at the
next load, which has the kernels that were compiled by then; after that torch does its work for good.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from quantkit.child import python
from quantkit.devices import entered
from quantkit.errors import InputError
from quantkit.kernels import gpu
from quantkit.native.build import cache_folder
from quantkit.registry import installed_version
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine.kernel_checks import Check, checks_of
from quantkit.untrusted import read_object

TOLERANCE = 0.03
"""Of the largest number: what 16 bits round to is less, a tile or a page that was left out is more."""

_SECONDS = 13.0
_CHILD = "from quantkit.runtime.engine.first_run import main; main()"
_LOG = logging.getLogger(__name__)


class Verdict(NamedTuple):
    """What is known about a check.

    Args:
        passed: whether the kernels do what they should.
        text: how far they are from torch, or why that is not known.
        is_final: whether it need not be tried again.
    """

    passed: bool
    text: str
    is_final: bool


def check_kernels(path: Path, config: EngineConfig, device: torch.device, *, draft: bool = False) -> None:
    """Let torch do the work of families that are wrong on a device; `QUANTKIT_TRITON=force` lets all of them be right.

    Args:
        path, config, device, draft: what is going to be loaded, see `checks_of`.
    """
    if not gpu.is_used(device) or os.environ.get("QUANTKIT_TRITON") == "force":
        return
    checks = {check.key: check for check in checks_of(path, config, device, draft=draft)}
    verdicts = read_verdicts(device)
    waiting = [check for key, check in checks.items() if key not in verdicts or not verdicts[key].is_final]
    if waiting:
        families = [[check for check in waiting if check.family == family] for family in gpu.FAMILIES]
        _LOG.warning("first run of GPU kernels on %s: comparing them with torch, %.0f s at most", device, _SECONDS)
        with ThreadPoolExecutor(len(families)) as pool:
            results = pool.map(partial(_try, device=device, known=frozenset(verdicts)), filter(None, families))
        verdicts |= dict(itertools.chain.from_iterable(results))
        _write(device, verdicts)
    for key, check in checks.items():
        if not verdicts[key].passed and gpu.why_replaced(check.family, device) is None:
            gpu.replace(check.family, device, f"{check.label}: {verdicts[key].text}")


def identity(device: torch.device) -> dict[str, str]:
    """What verdicts are about: on another device, driver or version, or launched otherwise, nothing has run yet.

    Raises:
        InputError: the kernels are not for this device.
    """
    if not gpu.is_used(device):
        raise InputError(f"no GPU kernels run on {device}; they need a CUDA device, Triton, and QUANTKIT_TRITON not 0")
    driver = Path("/proc/driver/nvidia/version")
    sources = sorted(Path(gpu.__file__).parent.glob("*.py"))
    return {
        "device": torch.cuda.get_device_name(device),
        "driver": driver.read_text().partition("\n")[0] if driver.is_file() else "unknown",
        "torch": str(torch.__version__),
        "triton": installed_version("triton", "unknown"),
        "dependent launches": os.environ.get("QUANTKIT_PDL", "0"),
        "kernels": hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:16],
    }


def read_verdicts(device: torch.device) -> dict[str, Verdict]:
    """Verdicts by check; those of other devices, drivers and versions are not read."""
    with contextlib.suppress(InputError, TypeError):
        return {key: Verdict(*entry) for key, entry in read_object(verdict_file(device), InputError).items()}
    return {}


def verdict_file(device: torch.device) -> Path:
    """Where they are kept, if there are any."""
    about = json.dumps(identity(device)).encode()
    return cache_folder() / f"kernel-checks-{hashlib.sha256(about).hexdigest()[:16]}.json"


def describe_kernels(device: torch.device) -> str:
    """What users should know about the kernels of a device."""
    reasons = {what: gpu.why_replaced(family, device) for family, what in gpu.FAMILIES.items()}
    replaced = "; ".join(f"torch in place of {what}: {reason}" for what, reason in reasons.items() if reason)
    is_forced = os.environ.get("QUANTKIT_TRITON") == "force"
    return replaced or ("not checked: QUANTKIT_TRITON=force" if is_forced else "as torch in all checks")


def main() -> None:
    """What a child does: say of each check that it is given how far it is off."""
    # From the parent through a pipe; no file is ever unpickled.
    device, checks = pickle.loads(sys.stdin.buffer.read())
    # What libraries print, also those in C, is no result.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # What Triton refuses is an error here: torch in a kernel's place would agree with itself.
    with entered(device), gpu.measuring(), torch.inference_mode():
        for check in checks:
            results.write(json.dumps([check.key, check.error(device)]) + "\n")
            # Line by line: what a child has said before it is ended for taking too long still counts.
            results.flush()


def _try(checks: list[Check], device: torch.device, known: frozenset[str]) -> Iterable[tuple[str, Verdict]]:
    """What comes of checks in a child; that it does not come to one is final if that is known already."""
    # One thread each: the children run at once, and pools of all processors would wait for each other.
    command, environment = python(_CHILD), {**os.environ, "OMP_NUM_THREADS": "1"}
    given = pickle.dumps((device, checks))
    try:
        done = subprocess.run(command, input=given, capture_output=True, timeout=_SECONDS, env=environment)
        lines, code = done.stderr.decode(errors="replace").splitlines(), done.returncode
        said, end = done.stdout, signal.Signals(-code).name if code < 0 else " ".join(lines[-1:])
    except subprocess.TimeoutExpired as error:
        said, end = error.stdout or b"", f"no result within {_SECONDS:.0f} s"
    verdicts = {check.key: Verdict(False, end, check.key in known) for check in checks}
    for line in said.splitlines():
        # Half a line, or what was printed by an import, says nothing.
        with contextlib.suppress(ValueError, TypeError):
            key, off = json.loads(line)
            if key in verdicts:  # what is not a number is not below
                verdicts[key] = Verdict(off <= TOLERANCE, f"{off:.2%} of the largest number off torch", True)
    return verdicts.items()


def _write(device: torch.device, verdicts: dict[str, Verdict]) -> None:
    """Whole or not at all; a folder that cannot be written costs another try at the next load."""
    path = verdict_file(device)
    partial = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        partial.write_text(json.dumps(verdicts, indent=1))
        partial.replace(path)
