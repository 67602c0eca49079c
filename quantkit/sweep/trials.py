"""Run independent quantkit commands as child processes, either of this process or of Ray workers.

A trial is a sequence of commands, each with an output path. A command whose output exists is not run again, so a trial
that was interrupted or lost its worker continues. If a command fails, the trial's outcome gives the reason, and no
exception is raised. The number of threads is the same on every machine, so the results are the same too.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from quantkit.distribution import install_command
from quantkit.errors import AuditError, GateFailure, InputError, QuantkitError, ResourceError, first_line
from quantkit.machine.system import QUANTKIT, killed_with_parent, lock, python
from quantkit.planning import estimate

RETRIES = 3  # attempts after the first one, if Ray loses the worker
_PROGRAM_BYTES = 1 << 30  # interpreter and libraries
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialCommand:
    """One command of a trial.

    Args:
        arguments: arguments after `quantkit`.
        made: absolute path of the command's output; if it exists, the command is not run.
    """

    arguments: tuple[str, ...]
    made: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A sequence of commands with the resources that they need.

    Args:
        name: name that no other trial has.
        commands: the commands in order; the trial ends at the first command that fails.
        log: absolute path of the file for stderr; it is locked, so that only one process runs the trial at a time.
        threads: number of threads.
        device: "auto", "cpu" or "cuda". On Ray, "cuda" requests one GPU, and "auto" does so if the cluster has any.
        num_bytes: memory that the trial needs.
        folder: working directory.
    """

    name: str
    commands: tuple[TrialCommand, ...]
    log: Path
    threads: int
    device: str = "cpu"
    num_bytes: int = 0
    folder: Path = field(default_factory=Path.cwd)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of a trial.

    Args:
        name: name of the trial.
        exit_code: exit code of the command that failed; 0 = all outputs exist.
        reason: why the trial failed.
        attempts: how often the trial was started, including by earlier sweeps.
        seconds: duration of the last attempt.
    """

    name: str
    exit_code: int = 0
    reason: str = ""
    attempts: int = 0
    seconds: float = 0.0

    @property
    def error(self) -> QuantkitError:
        """The error that the failed command would have raised in this process."""
        kinds = (InputError, GateFailure, ResourceError, AuditError)
        kind = next((kind for kind in kinds if kind.exit_code == self.exit_code), AuditError)
        return kind(f"{self.name}: {self.reason}")


def quantize_command(model: str | None, recipe: Path, made: Path, device: str, *further: str) -> TrialCommand:
    """Return the command that compresses a model with a recipe file; model None = the demo model."""
    words = ("quantize", *([] if model is None else [model]), "--recipe", str(recipe), "-o", str(made))
    return TrialCommand(arguments=(*words, "--device", device, *further), made=made)


def check_place(on: str) -> None:
    """Check that trials can run at a place; see the argument `on` of `run_trials`.

    Raises:
        InputError: the place is not valid, or Ray is not installed.
    """
    runner, colon, address = on.partition(":")
    if runner not in ("local", "ray") or (colon and (runner == "local" or not address)):
        raise InputError(f"--on {on!r} is not a place to run trials; use local, ray or ray:ADDRESS")
    if runner == "ray":
        _import_ray()


def planned_bytes(model: str | None, recipe: str | Path) -> int:
    """Estimate the memory for compressing a model and verifying the result against it; 0 = no estimate."""
    try:
        plan = estimate(model, recipe=recipe)
    except InputError:
        return 0  # the command itself reports the error
    # The original is loaded twice: in its own dtype, and in a different one for the noise floor.
    run = 2 * plan.weights[0].size.memory_bytes + plan.weights[-1].size.memory_bytes
    compression = {**(plan.compression or {}), "libraries": 0}  # `_PROGRAM_BYTES` includes them
    return _PROGRAM_BYTES + max(run, sum(compression.values()))


def run_trials(trials: Sequence[Trial], on: str = "local", jobs: int = 1) -> Generator[Outcome, None, None]:
    """Run trials on this machine or on Ray.

    Args:
        trials: the trials.
        on: `local`, `ray` (a running cluster, or a new one on this machine) or `ray:ADDRESS`.
        jobs: number of local trials at a time; Ray runs as many as fit its resources.
    Yields:
        The outcome of each trial when it ends.
    Raises:
        InputError: see `check_place`; or there is no cluster at the address.
    """
    check_place(on)
    runner, _, address = on.partition(":")
    if runner == "local":
        yield from _locally(trials, jobs)
    else:
        with contextlib.redirect_stdout(sys.stderr):  # Ray prints messages about lost workers
            yield from _on_ray(trials, address)


def _locally(trials: Sequence[Trial], jobs: int) -> Generator[Outcome, None, None]:
    running: list[subprocess.Popen[str]] = []
    stopped = threading.Event()
    pool = ThreadPoolExecutor(jobs)

    def started(process: subprocess.Popen[str]) -> None:
        running.append(process)
        if stopped.is_set():
            process.kill()

    try:
        for future in as_completed([pool.submit(run_trial, trial, started) for trial in trials]):
            yield future.result()
    finally:
        stopped.set()
        # Also reached when the caller stops early: kill the children, or the threads would wait for them.
        pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            process.kill()
        pool.shutdown()


def _on_ray(trials: Sequence[Trial], address: str) -> Generator[Outcome, None, None]:
    ray = _import_ray()
    is_guest = ray.is_initialized()
    if not is_guest:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(address=address or None, log_to_driver=False, logging_level="error")
        except (ConnectionError, ValueError, RuntimeError) as error:
            cluster = address or "this machine"
            raise InputError(f"cannot connect to Ray at {cluster} ({first_line(error)}); check --on") from None
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        pending = {}
        for trial in trials:
            needs = _needs(trial, nodes)
            if any(all(node.get(name, 0) >= amount for name, amount in needs.items()) for node in nodes):
                pending[_submit(ray, trial, needs)] = trial
            else:
                # Ray would wait forever for such a machine.
                reason = f"no machine of the cluster has {needs}; give fewer --threads, or add a larger machine"
                yield Outcome(name=trial.name, exit_code=ResourceError.exit_code, reason=reason)
        while pending:
            (done, *_), _ = ray.wait(list(pending), num_returns=1)
            yield _result(ray, done, pending.pop(done))
    finally:
        if not is_guest:
            ray.shutdown()


def _needs(trial: Trial, nodes: Sequence[dict[str, float]]) -> dict[str, int]:
    """Return the resources that a trial needs, keyed by Ray's names."""
    has_gpus = any(node.get("GPU") for node in nodes)
    gpus = trial.device.startswith("cuda") or (trial.device == "auto" and has_gpus)
    return {"CPU": trial.threads, "memory": trial.num_bytes, **({"GPU": 1} if gpus else {})}


def _submit(ray: Any, trial: Trial, needs: dict[str, int]) -> Any:
    options = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0), "memory": needs["memory"]}
    return ray.remote(run_trial).options(name=trial.name, max_retries=RETRIES, **options).remote(trial)


def _result(ray: Any, done: Any, trial: Trial) -> Outcome:
    try:
        outcome: Outcome = ray.get(done)
        return outcome
    except ray.exceptions.RayTaskError as error:
        reason = f"quantkit could not run the trial: {first_line(error.cause)}"
        return Outcome(name=trial.name, exit_code=1, reason=reason)
    except ray.exceptions.RayError as error:  # the base class for lost workers and machines
        reason = f"Ray lost the worker in the first attempt and in {RETRIES} retries ({type(error).__name__})"
        return Outcome(name=trial.name, exit_code=ResourceError.exit_code, reason=reason)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        extra = f"--on ray needs Ray, which is not installed; run {install_command('ray')}"
        raise InputError(f"{extra} ({first_line(error)})") from error
    return ray


def run_trial(trial: Trial, started: Callable[[subprocess.Popen[str]], object] = lambda _: None) -> Outcome:
    """Run one trial on this machine.

    Args:
        trial: the trial; this machine must have its folders.
        started: called with each child process.
    """
    began = time.perf_counter()
    unseen = next((folder for folder in (trial.folder, trial.log.parent) if not folder.is_dir()), None)
    if unseen is not None:
        reason = f"folder {unseen} does not exist on {platform.node()}; all workers must share one file system"
        return Outcome(name=trial.name, exit_code=InputError.exit_code, reason=reason)
    with trial.log.open("a+", encoding="utf-8", errors="replace") as log:
        # Except on Windows, children inherit the lock: after a lost worker, the next attempt waits here until the old
        # child is gone.
        lock(log.fileno(), wait=True)
        print(f"attempt on {platform.node()}", file=log, flush=True)
        code, reason = 0, ""
        for command in trial.commands:
            if code == 0 and not command.made.exists():
                code, reason = _run(command, trial, log, started)
        log.seek(0)
        attempts = sum(line.startswith("attempt on ") for line in log)
    seconds = time.perf_counter() - began
    return Outcome(name=trial.name, exit_code=code, reason=reason, attempts=attempts, seconds=seconds)


def _run(
    command: TrialCommand, trial: Trial, log: TextIO, started: Callable[[subprocess.Popen[str]], object]
) -> tuple[int, str]:
    """Run one command; return its exit code and, if it failed, the reason.

    A failed gate counts as success if the output exists.
    """
    process = subprocess.Popen(
        [*python(QUANTKIT), *command.arguments, "--json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        cwd=trial.folder,
        # A trial is a separate job, not a rank of the job that starts it.
        env={
            **{name: value for name, value in os.environ.items() if name not in _RANKS},
            **dict.fromkeys(_THREADS, str(trial.threads)),
        },
        encoding="utf-8",
        errors="replace",
        preexec_fn=killed_with_parent(),  # an orphan would write where the next attempt writes
    )
    started(process)
    said = process.communicate()[0]
    code = process.returncode
    if code < 0:
        name = signal.Signals(-code).name
        if name == "SIGKILL":
            return ResourceError.exit_code, f"killed ({name}), probably because memory ran out; see {trial.log}"
        return 1, f"crashed ({name}); see {trial.log}"
    if code in (0, GateFailure.exit_code) and command.made.exists():
        return 0, ""
    try:
        return code or 1, str(json.loads(said)["error"])
    except (ValueError, KeyError, TypeError):
        return code or 1, f"ended with exit code {code} without a reason; see {trial.log}"
