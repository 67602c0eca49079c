"""State of a run in the work folder (identity and finished layers), and the listener that receives the run's events.

The identity is everything that affects the output, as plain data. Runs with equal identities write equal files.

`<output>.partial/` (see `output.staging`) holds the hidden states before the next layer, `progress.json`, and the
folder `checkpoint/`, which becomes the output. A layer counts as done once `progress.json` names it. That file is
replaced atomically, after everything that it names is on disk.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoints.reader import file_digest
from quantkit.compress.calibration.dataset import Samples
from quantkit.compress.calibration.hidden_state_store import check_saved
from quantkit.compress.pipeline.plan import Plan
from quantkit.compress.recipe import Recipe
from quantkit.distribution import installed_version, own_version
from quantkit.errors import ReportError, ResumeError
from quantkit.huggingface.skeleton import Skeleton
from quantkit.machine.devices import MAX_THREADS, threads_within_quota
from quantkit.numerics import native
from quantkit.numerics.matmul import keeps_precision
from quantkit.output.staging import MANIFEST, Stage
from quantkit.output.work_folder import WorkFolder
from quantkit.output.writer import write_json
from quantkit.quantities import dtype_name
from quantkit.results import LayerRecord, Record
from quantkit.safety.untrusted import read_object, shorten

START_OVER = "start over with --no-resume"


class Listener:
    """Receives the events of a running compression: `plan` once; for each layer `layer_started`, `phase` several times,
    and `layer_finished`; `note` and `warning` at any time. It decides what to show, but cannot change the run.

    Methods that a listener does not define do nothing.
    """

    def plan(self, summary: dict[str, Any]) -> None:
        """Called once, before the first layer.

        Args:
            summary: `num_layers`, `resumed_layers`, `predicted_bytes` (peak memory), `samples`; a key that does not
                apply may be missing.
        """

    def layer_started(self, index: int, name: str) -> None:
        """Called when a layer begins.

        Args:
            index: number of the layer in the model, from 0, even if the run was resumed.
            name: full module name, e.g. `model.layers.0`.
        """

    def phase(self, name: str) -> None:
        """Called when the current layer enters a phase.

        A phase is "load", a step's name, "round", "inputs", "kv cache", "errors", "write" or "advance".

        Between layers, the phase "original" advances the original model's hidden states.
        """

    def layer_finished(self, record: LayerRecord) -> None:
        """Called when a layer is on disk."""

    def note(self, text: str) -> None:
        """Called with information for the user, in one sentence."""

    def warning(self, text: str) -> None:
        """Called with a one-sentence warning; the run continues."""


SILENT = Listener()


@dataclass(kw_only=True, slots=True)
class RunState(Record):
    """Progress of one run, saved in `progress.json`. *Mutable*.

    Args:
        identity: everything that affects the result, as plain data.
        records: records of the finished layers.
        shards: SHA-256 of each finished shard, keyed by file name.
        weight_map: file name of each tensor, keyed by tensor name.
        activations: digests of the saved hidden states, see `ActivationStore`: first of the quantized model, then of
            the original.
        held_out: digests of the saved held-out states: first of the original model, then of the quantized one.
    """

    identity: dict[str, Any]
    records: tuple[LayerRecord, ...]
    shards: dict[str, str]
    weight_map: dict[str, str]
    activations: tuple[str, ...]
    held_out: tuple[str, ...] = ()

    def add_layer(
        self,
        record: LayerRecord,
        shard: str,
        digest: str,
        names: list[str],
        states: Sequence[str] = (),
        held_out: Sequence[str] = (),
    ) -> None:
        """Record a finished layer. Its shard and the hidden states after it must be on disk before `save` is called."""
        self.records += (record,)
        self.shards[shard] = digest
        self.weight_map |= dict.fromkeys(names, shard)
        self.activations, self.held_out = tuple(states), tuple(held_out)

    @property
    def threads(self) -> int:
        """Return the number of threads of the run. It determines in which order sums are computed."""
        return int(self.identity["compute"]["threads"])

    def save(self, folder: Path) -> None:
        """Write `progress.json` into the `.partial` folder, atomically."""
        write_state(folder / "progress.json", self.to_dict())


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionRun:
    """One compression of a model into a directory, new or resumed.

    Args:
        plan: plan of the run.
        samples: calibration samples, if the plan needs any.
        state: progress of the run.
        work: work folder.
        listener: called on progress.
        resumed: number of layers that an earlier run finished.
    """

    plan: Plan
    samples: Samples | None
    state: RunState
    work: WorkFolder
    listener: Listener
    resumed: int

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return warnings about plan and data, one sentence each."""
        return (*self.plan.warnings, *(self.samples.warnings if self.samples else ()))


def run_identity(plan: Plan, samples: Samples | None) -> dict[str, Any]:
    """Return everything that affects the output of a run."""
    identity = {
        "recipe": plan.recipe.source,
        "source": plan.reader.digests,
        "calibration": None if samples is None else samples.digest,
        "versions": describe_versions(),
        # Without data, a linear has one thread.
        "compute": compute_identity(plan.skeleton, threads_within_quota() if samples else 1),
    }
    if plan.recipe.imatrix is not None:
        identity["imatrix"] = file_digest(Path(plan.recipe.imatrix))
    if plan.adapter is not None:
        identity["adapter"] = plan.adapter.digest
    if plan.discovery is not None:
        identity["discovered"] = plan.discovery.identity
    return identity


def compute_identity(skeleton: Skeleton, threads: int) -> dict[str, Any]:
    """Return everything about the computation that affects its result.

    Args:
        skeleton: the model, with its device and dtype.
        threads: number of threads. They divide the sums, so their number affects the last bits.
    """
    on_gpu = skeleton.device.type == "cuda"
    return {
        "device": skeleton.device.type,
        "dtype": dtype_name(skeleton.dtype),
        "threads": threads,
        # The instruction set or the GPU decides which kernels run, and the kernels decide the order of sums.
        "kernels": torch.cuda.get_device_name(skeleton.device)
        if on_gpu
        # Leave out why the C library is off, because the reason may name a folder of this process.
        else f"{torch.backends.cpu.get_cpu_capability()}; C: {native.status() if native.library() else 'off'}",
        "matmul": [torch.get_float32_matmul_precision(), keeps_precision()],
    }


def with_threads_of(saved: Any, identity: dict[str, Any]) -> dict[str, Any]:
    """Return `identity` as it reads back from JSON, but with the number of threads from `saved`.

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
    """Return the SHA-256 of the calibration file that a recipe names; None if it names no local file."""
    data = None if recipe.calibration is None else Path(recipe.calibration.data)
    return hashlib.sha256(data.read_bytes()).hexdigest() if data is not None and data.is_file() else None


def describe_versions() -> dict[str, str]:
    """Return the versions of quantkit and of the packages that affect the output."""
    names = ("torch", "transformers", "compressed-tensors", "safetensors")
    return {"quantkit": own_version("unknown"), **{name: installed_version(name, "unknown") for name in names}}


def plain_digest(data: dict[str, Any]) -> str:
    """Return the SHA-256 of plain data, such as an identity."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def write_state(path: Path, data: dict[str, Any]) -> None:
    """Write the state from which an interrupted command resumes, atomically and with a digest."""
    write_json(path, {**data, "sha256": plain_digest(data)})


def read_state(path: Path) -> dict[str, Any]:
    """Return the data of a file that `write_state` wrote, after checking their digest.

    Raises:
        ResumeError: the file cannot be read, or its digest does not match.
    """
    data = read_object(path, ResumeError, START_OVER)
    if data.pop("sha256", None) != plain_digest(data):
        raise ResumeError(f"{path} is damaged (it was changed, or another version wrote it); {START_OVER}")
    return data


def refuse_changes(old: Any, new: Any, what: str, instead: str) -> None:
    """Raise ResumeError if an interrupted run does not have the identity of the current command.

    Args:
        old, new: the two identities, as read from JSON.
        what: name of the interrupted run, for the message.
        instead: what the user can do, for the message.
    """
    changes = list(_differences(old, new))
    if changes:
        raise ResumeError(f"{what} was started with different settings or files ({'; '.join(changes[:3])}); {instead}")


def _differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Yield `path: old -> new` for every difference between two nested structures of dicts and lists."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    elif old != new:
        yield f"{path}: {shorten(old, 40)} -> {shorten(new, 40)}"


def load_state(work: WorkFolder, identity: dict[str, Any], *, resume: bool) -> RunState:
    """Load the state of an interrupted run, or create the state of a new run.

    Args:
        work: work folder of this run.
        identity: identity of this run; an interrupted run with a different identity is refused.
        resume: continue an interrupted run; False = delete it.
    Raises:
        ResumeError: the interrupted run has a different identity; the message names the difference.
    """
    path = work.path / "progress.json"
    if not resume or not path.exists():  # no state: the run was killed before it saved one
        work.clear()
        work.checkpoint.mkdir()
        state = RunState(identity=identity, records=(), shards={}, weight_map={}, activations=())
        state.save(work.path)
        return state
    try:
        state = RunState.from_dict(read_state(path))
    except ReportError as error:
        raise ResumeError(f"{path} is damaged ({error}); {START_OVER}") from error
    identity = with_threads_of(state.identity, identity)
    refuse_changes(
        state.identity, identity, f"the interrupted run in {work.path}", f"run the old command, or {START_OVER}"
    )
    for name, digest in state.shards.items():
        check_saved(work.checkpoint / name, digest)
    return state


def was_completed(stage: Stage, identity: dict[str, Any]) -> bool:
    """Whether an earlier run was killed after it had renamed its output; delete the work folder that it left.

    Args:
        stage: work folder of the output.
        identity: identity of this run; the result is True only if the earlier run had the same identity.
    """
    if not stage.is_finished:
        return False
    stage.work.clear()
    try:
        made_from = read_object(stage.output / MANIFEST, ResumeError).get("identity")
    except ResumeError:
        return False
    return bool(made_from == with_threads_of(made_from, identity))
