"""State of an unfinished run in its work folder: its identity, and the finished layers.

`<output>.partial/` (see `output.staging`) holds the hidden states before the next layer, `progress.json`, and the
folder `checkpoint/`, which becomes the output. A layer counts as done once `progress.json` names it. That file is
replaced atomically, after everything that it names is on disk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.compress.calibration.dataset import Samples
from quantkit.compress.calibration.hidden_state_store import check_saved
from quantkit.compress.pipeline.events import Listener
from quantkit.compress.pipeline.identity import START_OVER, read_state, refuse_changes, with_threads_of, write_state
from quantkit.compress.pipeline.plan import Plan
from quantkit.errors import ReportError, ResumeError
from quantkit.output.staging import MANIFEST, Stage
from quantkit.output.work_folder import WorkFolder
from quantkit.results import LayerRecord, Record
from quantkit.safety.untrusted import read_object


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
        """Return the number of threads of the run; it affects how sums are divided."""
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


def load_state(work: WorkFolder, identity: dict[str, Any], *, resume: bool) -> RunState:
    """Load the state of an interrupted run, or create the state of a new run.

    Args:
        work: work folder of this run.
        identity: identity of this run; an interrupted run with another identity is refused.
        resume: continue an interrupted run; False = delete it.
    Raises:
        ResumeError: the interrupted run has another identity; the message names the difference.
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
        state.identity,
        identity,
        f"the interrupted run in {work.path}",
        f"run the old command, or {START_OVER}",
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
