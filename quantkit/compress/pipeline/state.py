"""The folder of an unfinished run: what it was started with, and which layers are done.

`<output>.partial/` (see `checkpoints.staging`) holds `checkpoint/`, which becomes the output, the hidden states before
the next layer, and `progress.json`. A layer counts as done once `progress.json` names it, and that file is replaced
atomically after everything it names is on disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.checkpoints.replaceable import MANIFEST
from quantkit.checkpoints.staging import Stage
from quantkit.checkpoints.work_folder import WorkFolder
from quantkit.checkpoints.writer import write_json
from quantkit.compress.calibration.activations import check_saved
from quantkit.compress.pipeline.identity import differences, with_threads_of
from quantkit.errors import ReportError, ResumeError
from quantkit.results import LayerRecord
from quantkit.results._record import Record
from quantkit.untrusted import read_object


@dataclass(kw_only=True, slots=True)
class RunState:
    """Progress of one run. Modified by `finish_layer`, which also saves it.

    Args:
        folder: the `.partial` folder.
        identity: everything that decides the result, as plain data.
        records: of the finished layers.
        shards: SHA-256 by file name of the finished shards.
        weight_map: tensor name to file name.
        activations: digests of the saved hidden states, see `ActivationStore`.
    """

    folder: Path
    identity: dict[str, Any]
    records: list[LayerRecord] = field(default_factory=list)
    shards: dict[str, str] = field(default_factory=dict)
    weight_map: dict[str, str] = field(default_factory=dict)
    activations: list[str] = field(default_factory=list)

    @property
    def checkpoint(self) -> Path:
        """Where the files of the output are written."""
        return self.folder / "checkpoint"

    def finish_layer(self, record: LayerRecord, shard: str, digest: str, names: list[str], states: list[str]) -> None:
        """Count a layer as done; its shard and the states after it must be on disk already."""
        self.records.append(record)
        self.shards[shard] = digest
        self.weight_map.update(dict.fromkeys(names, shard))
        self.activations = states
        self.save()

    def save(self) -> None:
        """Write `progress.json` atomically."""
        content = {name: getattr(self, name) for name in ("identity", "shards", "weight_map", "activations")}
        records = [record.to_dict() for record in self.records]
        write_json(self.folder / "progress.json", {**content, "records": records})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Saved(Record):
    """What `RunState.save` writes."""

    identity: dict[str, Any]
    records: tuple[LayerRecord, ...]
    shards: dict[str, str]
    weight_map: dict[str, str]
    activations: tuple[str, ...]


def load_state(work: WorkFolder, identity: dict[str, Any], *, resume: bool) -> RunState:
    """The state of a new or interrupted run.

    Args:
        work: of this run.
        identity: of this run; an interrupted run with another one is refused.
        resume: go on with an interrupted run; otherwise it is deleted.
    Raises:
        ResumeError: the interrupted run was started from something else; the message names what.
    """
    path = work.path / "progress.json"
    if not resume or not path.exists():  # of a run that was killed before it knew what it was
        work.clear()
        work.checkpoint.mkdir()
        state = RunState(folder=work.path, identity=identity)
        state.save()
        return state
    try:
        saved = _Saved.from_dict(read_object(path, ResumeError, "start over with --no-resume"))
    except ReportError as error:
        raise ResumeError(f"{path} is damaged ({error}); start over with --no-resume") from error
    identity = with_threads_of(saved.identity, identity)
    state = RunState(
        folder=work.path,
        identity=identity,
        records=list(saved.records),
        shards=saved.shards,
        weight_map=saved.weight_map,
        activations=list(saved.activations),
    )
    changes = list(differences(saved.identity, identity))
    if changes:
        raise ResumeError(
            f"the interrupted run in {work.path} was started from something else ({'; '.join(changes[:3])}); "
            "run the old command, or start over with --no-resume"
        )
    for name, digest in state.shards.items():
        check_saved(state.checkpoint / name, digest)
    return state


def was_completed(stage: Stage, identity: dict[str, Any]) -> bool:
    """Whether an earlier run gave the output its name but was killed before it could tidy up; that is done now.

    Args:
        stage: of the output.
        identity: of this run; true only if that run had the same.
    """
    if not stage.is_finished:
        return False
    stage.work.clear()
    try:
        made_from = read_object(stage.output / MANIFEST, ResumeError).get("identity")
    except ResumeError:
        return False
    return bool(made_from == with_threads_of(made_from, identity))
