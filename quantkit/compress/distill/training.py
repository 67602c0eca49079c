"""The training loop, and the state from which an interrupted run goes on."""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from quantkit.compress.calibration.dataset import Samples
from quantkit.compress.calibration.hidden_state_store import check_saved
from quantkit.compress.convert.source import Source
from quantkit.compress.distill.network import Embedder, Head, Student, last_states
from quantkit.compress.distill.options import DistillOptions
from quantkit.compress.pipeline.state import START_OVER, read_state, refuse_changes, with_threads_of, write_state
from quantkit.errors import CheckpointError
from quantkit.huggingface.skeleton import Skeleton
from quantkit.output.work_folder import WorkFolder
from quantkit.output.writer import write_shard

# One in this many samples is held out from training.
_HELD_OUT = 8
# Share of the steps in which the step size grows from zero.
_WARM_UP = 1 / 16
_BETAS = (0.9, 0.95)
_PROGRESS = "progress.json"

Progress = Callable[[str], None]


@dataclass(kw_only=True, slots=True)
class TrainingState:
    """Everything that a run has learned so far. *Mutable*.

    Args:
        identity: everything that affects the result, as plain data.
        step: number of finished steps.
        best_step: number of steps after which the held-out KL was lowest.
        failures: number of measurements since then.
        history: held-out KL at each measurement, keyed by step.
        changes, best: changes of all parameters, now and after `best_step`; a missing change is zero.
        optimizer: the optimizer's numbers, keyed by parameter and name.
    """

    identity: dict[str, Any]
    step: int = 0
    best_step: int = 0
    failures: int = 0
    history: dict[int, float] = field(default_factory=dict)
    changes: dict[str, Tensor] = field(default_factory=dict)
    best: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Tensor] = field(default_factory=dict)

    @property
    def threads(self) -> int:
        """Return the number of threads of the run; it affects how sums are divided."""
        return int(self.identity["compute"]["threads"])

    def record(self, step: int, kl: float, changes: Mapping[str, Tensor]) -> None:
        """Record a measurement, with the parameters at this step."""
        is_best = kl < min(self.history.values(), default=math.inf)
        self.step, self.history[step] = step, kl
        self.changes = {name: change.detach().cpu().clone() for name, change in changes.items()}
        self.failures = 0 if is_best or not step else self.failures + 1
        if is_best:
            self.best_step, self.best = step, self.changes

    def save(self, folder: Path) -> None:
        """Write the state; a run that is killed while it writes finds the state before."""
        groups = {"changes": self.changes, "best": self.best, "optimizer": self.optimizer}
        tensors = {f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()}
        file = f"training-{self.step}.safetensors"
        plain = {name: getattr(self, name) for name in ("identity", "step", "best_step", "failures")}
        saved = {"file": file, "digest": write_shard(folder / file, tensors), "history": list(self.history.items())}
        write_state(folder / _PROGRESS, {**plain, **saved})
        for old in folder.glob("training-*.safetensors"):
            if old.name != file:
                old.unlink()


def load_training(work: WorkFolder, identity: dict[str, Any], *, resume: bool) -> TrainingState:
    """Load the state of an interrupted run, or create the state of a new run.

    Args:
        work: work folder of this run.
        identity: identity of this run; an interrupted run with a different identity is refused.
        resume: continue an interrupted run; False = delete it.
    Raises:
        ResumeError: the interrupted run has a different identity, or its files are damaged.
    """
    path = work.path / _PROGRESS
    if not resume or not path.exists():
        work.clear()
        return TrainingState(identity=identity)
    saved = read_state(path)
    refuse_changes(
        saved["identity"],
        with_threads_of(saved["identity"], identity),
        f"the interrupted run in {work.path}",
        f"run the old command, or {START_OVER}",
    )
    file = work.path / saved.pop("file")
    check_saved(file, saved.pop("digest"))
    tensors = load_file(file)
    changes, best, optimizer = (
        {name.partition("/")[2]: value for name, value in tensors.items() if name.startswith(f"{group}/")}
        for group in ("changes", "best", "optimizer")
    )
    history = dict(saved.pop("history"))
    return TrainingState(**saved, history=history, changes=changes, best=best, optimizer=optimizer)


class Training:
    """Both models and the data of a run, and the optimizer. *Mutable*.

    Args:
        source: the checkpoint.
        skeletons: the original and the checkpoint.
        samples: samples to train on and to hold out.
        options: options of the run.
        progress: called with progress messages.
    """

    def __init__(
        self,
        source: Source,
        skeletons: Sequence[Skeleton],
        samples: Samples,
        options: DistillOptions,
        progress: Progress,
    ) -> None:
        original, own = skeletons
        self._options, self._progress = options, progress
        texts = [torch.tensor([ids]) for ids in samples.texts]
        self._original = Head(original)
        self.student = Student(source, own, self._original.weight)
        self.parameters = self.student.parameters()
        self._texts, self._embed = texts, Embedder(own, texts)
        self._targets = last_states(
            original, texts, lambda done, total: progress(f"original: layer {done + 1} of {total}")
        )
        numbers = range(len(texts))
        self._held_out = [number for number in numbers if number % _HELD_OUT == 0]
        self._seen = [number for number in numbers if number % _HELD_OUT]
        for parameter in self.parameters.values():  # experts that no token reaches need a gradient too
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer = torch.optim.Adam(list(self.parameters.values()), lr=options.learning_rate, betas=_BETAS)

    def set(self, changes: dict[str, Tensor]) -> None:
        """Set all parameters; parameters without a value become zero."""
        for name, parameter in self.parameters.items():
            parameter.data.copy_(changes[name]) if name in changes else parameter.data.zero_()

    def train(self, state: TrainingState, folder: Path) -> None:
        """Run the remaining steps. After every measurement, `state` is updated and saved to `folder`."""
        options = self._options
        self.set(state.changes)
        if state.optimizer:
            self._restore_optimizer(state.optimizer)
        if not state.history:
            before = self._held_out_kl()
            if not math.isfinite(before):
                raise CheckpointError("the KL divergence from the original is NaN or infinite before any training")
            state.record(0, before, {})
            self._progress(f"KL {state.history[0]:.4g} before training, {len(self._held_out)} samples held out")
        while state.step < options.steps and state.failures < options.patience:
            started, last = time.perf_counter(), min(options.steps, state.step + options.check_every)
            steps = last - state.step
            for step in range(state.step, last):
                if not self._step(step):
                    self._progress(f"step {step + 1}: the KL or a gradient is not finite; training ends")
                    state.failures = options.patience
                    return
            state.record(last, self._held_out_kl(), self.parameters)
            state.optimizer = self._optimizer_numbers()
            state.save(folder)
            seconds = (time.perf_counter() - started) / steps
            self._progress(f"step {last} of {options.steps}: KL {state.history[last]:.4g}, {seconds:.1f} s per step")

    def _optimizer_numbers(self) -> dict[str, Tensor]:
        """Return the state of the optimizer, keyed by parameter and name."""
        states = {name: self._optimizer.state[parameter] for name, parameter in self.parameters.items()}
        return {f"{name}/{key}": value.clone() for name, state in states.items() for key, value in state.items()}

    def _restore_optimizer(self, numbers: Mapping[str, Tensor]) -> None:
        whole = self._optimizer.state_dict()
        for at, name in enumerate(self.parameters):
            keys = [key for key in numbers if key.rpartition("/")[0] == name]
            whole["state"][at] = {key.rpartition("/")[2]: numbers[key] for key in keys}
        self._optimizer.load_state_dict(whole)

    def _step(self, step: int) -> bool:
        """Run one step; return False, and change nothing, if the KL or a gradient is NaN or infinite."""
        options, chosen = self._options, self._chosen(step)
        warm_up = max(1, round(options.steps * _WARM_UP))
        falling = 0.5 * (1 + math.cos(math.pi * step / options.steps))
        for group in self._optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1.0, (step + 1) / warm_up) * falling
        self._optimizer.zero_grad(set_to_none=False)
        value = sum(self._kl(batch, train=True) for batch in self._batches(chosen))
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        if not math.isfinite(value) or not all(bool(torch.isfinite(each).all()) for each in gradients):
            return False
        self._optimizer.step()
        return True

    def _held_out_kl(self) -> float:
        tokens = sum(self._texts[number].numel() for number in self._held_out)
        batches = self._batches(self._held_out)
        return (
            sum(self._kl(batch[start : start + 4]) for batch in batches for start in range(0, len(batch), 4)) / tokens
        )

    def _kl(self, batch: Sequence[int], *, train: bool = False) -> float:
        ids = torch.cat([self._texts[number] for number in batch])
        target = torch.cat([self._targets[number] for number in batch])
        return self.student.kl(self._embed(ids), target, self._original, train=train)

    def _batches(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Yield the samples of equal length together."""

        def length(number: int) -> int:
            return self._texts[number].numel()

        for _, group in groupby(sorted(numbers, key=length), key=length):
            yield list(group)

    def _chosen(self, step: int) -> list[int]:
        """Return the samples of a step: each pass over the samples has its own random order."""
        first = step * self._options.batch_size
        return [
            self._order(at // len(self._seen))[at % len(self._seen)]
            for at in range(first, first + self._options.batch_size)
        ]

    def _order(self, turn: int) -> list[int]:
        digest = hashlib.sha256(f"{self._options.seed}/{turn}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
        return [self._seen[at] for at in torch.randperm(len(self._seen), generator=generator).tolist()]
