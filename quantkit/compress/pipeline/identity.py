"""Identity of a run: everything that affects its output, as plain data. Runs with equal identities write
equal files.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoints.reader import file_digest
from quantkit.compress.calibration.dataset import Samples
from quantkit.compress.pipeline.plan import Plan
from quantkit.compress.recipe import Recipe
from quantkit.distribution import installed_version, own_version
from quantkit.errors import ResumeError
from quantkit.machine.devices import MAX_THREADS, threads_within_quota
from quantkit.numerics import native
from quantkit.numerics.matmul import keeps_precision
from quantkit.output.writer import write_json
from quantkit.quantities import dtype_name
from quantkit.safety.untrusted import read_object, shorten

START_OVER = "start over with --no-resume"


def run_identity(plan: Plan, samples: Samples | None) -> dict[str, Any]:
    """Return everything that affects the output of a run."""
    identity = {
        "recipe": plan.recipe.source,
        "source": plan.reader.digests,
        "calibration": None if samples is None else samples.digest,
        "versions": describe_versions(),
        "compute": {
            "device": plan.skeleton.device.type,
            "dtype": dtype_name(plan.skeleton.dtype),
            # Threads divide the sums, so their number affects the last bits. Without data, a linear has one thread.
            "threads": threads_within_quota() if samples else 1,
            # The instruction set or the GPU decides which kernels run, and the kernels decide the order of sums.
            "kernels": torch.cuda.get_device_name(plan.skeleton.device)
            if plan.skeleton.device.type == "cuda"
            # Leave out why the C library is off, because the reason may name a folder of this process.
            else f"{torch.backends.cpu.get_cpu_capability()}; C: {native.status() if native.library() else 'off'}",
            "matmul": [torch.get_float32_matmul_precision(), keeps_precision()],
        },
    }
    if plan.recipe.imatrix is not None:
        identity["imatrix"] = file_digest(Path(plan.recipe.imatrix))
    if plan.adapter is not None:
        identity["adapter"] = plan.adapter.digest
    if plan.discovery is not None:
        identity["discovered"] = plan.discovery.identity
    return identity


def with_threads_of(saved: Any, identity: dict[str, Any]) -> dict[str, Any]:
    """Return an identity in the form that JSON gives, with the number of threads of the interrupted run.

    The number of threads can differ when a command runs again, but a run must finish with the number that it started
    with.

    Args:
        saved: identity of the interrupted run, as read from JSON.
        identity: identity of the current command.
    """
    new: dict[str, Any] = json.loads(json.dumps(identity))
    compute = saved.get("compute") if isinstance(saved, dict) else None
    threads = compute.get("threads") if isinstance(compute, dict) else None
    if type(threads) is int and 0 < threads <= MAX_THREADS:
        new["compute"]["threads"] = threads
    return new


def calibration_digest(recipe: Recipe) -> str | None:
    """Return the SHA-256 of the calibration file that a recipe names; None if its data are not a local file."""
    data = None if recipe.calibration is None else Path(recipe.calibration.data)
    return hashlib.sha256(data.read_bytes()).hexdigest() if data is not None and data.is_file() else None


def describe_versions() -> dict[str, str]:
    """Return the versions of everything that affects the output."""
    names = ("torch", "transformers", "compressed-tensors", "safetensors")
    return {"quantkit": own_version("unknown"), **{name: installed_version(name, "unknown") for name in names}}


def plain_digest(data: dict[str, Any]) -> str:
    """Return the SHA-256 of plain data, such as an identity."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def write_state(path: Path, data: dict[str, Any]) -> None:
    """Write the state from which an interrupted command resumes, atomically and with a digest."""
    write_json(path, {**data, "sha256": plain_digest(data)})


def read_state(path: Path) -> dict[str, Any]:
    """Read a file that `write_state` wrote.

    Raises:
        ResumeError: the file cannot be read, or its digest does not match.
    """
    data = read_object(path, ResumeError, START_OVER)
    if data.pop("sha256", None) != plain_digest(data):
        raise ResumeError(f"{path} is damaged (it was changed, or another version wrote it); {START_OVER}")
    return data


def refuse_changes(old: Any, new: Any, what: str, instead: str) -> None:
    """Raise ResumeError if an interrupted run has another identity than the current command.

    Args:
        old, new: the two identities, as read from JSON.
        what: name of the interrupted run, for the message.
        instead: what the user can do, for the message.
    """
    changes = list(_differences(old, new))
    if changes:
        raise ResumeError(f"{what} was started with other settings or files ({'; '.join(changes[:3])}); {instead}")


def _differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Yield `path: old -> new` for every difference between two nested structures of dicts and lists."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    elif old != new:
        yield f"{path}: {shorten(old, 40)} -> {shorten(new, 40)}"
