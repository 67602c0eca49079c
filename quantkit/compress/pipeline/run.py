"""The life of a weight: layer after layer from source shards to finished ones, within the memory of one layer."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoints.memory import peak_bytes, release_freed_memory
from quantkit.checkpoints.staging import open_stage
from quantkit.checkpoints.writer import translate_os_error
from quantkit.compress.calibration.activations import Mode, require_finite
from quantkit.compress.calibration.dataset import Samples
from quantkit.compress.calibration.errors import signal_to_noise_db
from quantkit.compress.calibration.input_scales import calibrate_inputs
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.layer_state import LayerData
from quantkit.compress.pipeline.events import SILENT, Listener
from quantkit.compress.pipeline.file import write_file
from quantkit.compress.pipeline.finish import describe_run, finish_checkpoint, write_manifest
from quantkit.compress.pipeline.identity import run_identity
from quantkit.compress.pipeline.inputs import HiddenStates, read_samples
from quantkit.compress.pipeline.kv_cache import check_cache, choose_cache
from quantkit.compress.pipeline.plan import Plan, build_plan, predicted_bytes
from quantkit.compress.pipeline.shard import write_layer
from quantkit.compress.pipeline.state import RunState, load_state, was_completed
from quantkit.compress.recipe import Recipe
from quantkit.errors import CheckpointError
from quantkit.formats import REGISTRY as FORMATS
from quantkit.results import CacheRecord, CompressionResult, LayerRecord
from quantkit.untrusted import read_json


def quantize(
    model: str | None,
    recipe: Recipe,
    output: str | Path | None = None,
    *,
    device: str = "auto",
    activations: Mode = "ram",
    resume: bool = True,
    overwrite: bool = False,
    listener: Listener = SILENT,
) -> CompressionResult:
    """Compress a model layer by layer and write a checkpoint.

    Args:
        model: directory or hub id; None = the bundled demo model.
        recipe: what to do.
        output: directory to write, or file for a format that is one; None = `<model>-<recipe>` in the current one.
            Written under another name and renamed when everything has been checked.
        device: "auto", "cpu", "cuda" or "cuda:<i>".
        activations: keep hidden states in memory or on disk.
        resume: go on where an interrupted run stopped; False starts over.
        overwrite: replace an existing output.
        listener: told what happens.
    Raises:
        InputError: model, recipe, data or output cannot be used.
        ResourceError: out of disk or memory; the same command resumes.
    """
    run = partial(_quantize, device=device, activations=activations, resume=resume, listener=listener)
    if FORMATS.load(recipe.format).suffix:  # one file
        check_cache(recipe, {})
        return write_file(model, recipe, output, overwrite=overwrite, run=run)
    return run(model, recipe, output, overwrite=overwrite)


def _quantize(
    model: str | None,
    recipe: Recipe,
    output: str | Path | None,
    *,
    device: str,
    activations: Mode,
    resume: bool,
    overwrite: bool,
    listener: Listener,
) -> CompressionResult:
    """`quantize` to a directory."""
    started = time.perf_counter()
    plan = build_plan(model, recipe, output, device)
    with open_stage(plan.output, "quantize", overwrite=overwrite, resumable=True, allow_finished=True) as stage:
        samples = read_samples(plan)
        warnings = (*plan.warnings, *(samples.warnings if samples else ()))
        for warning in warnings:
            listener.warning(warning)
        identity = run_identity(plan, samples)
        if resume and was_completed(stage, identity):
            return CompressionResult.from_dict(read_json(plan.output / "quantkit-run.json", CheckpointError))
        stage.check_output()
        threads = torch.get_num_threads()
        try:
            state = load_state(stage.work, identity, resume=resume)
            torch.set_num_threads(state.identity["compute"]["threads"])
            run = _Run(plan=plan, state=state, samples=samples, mode=activations, listener=listener)
            with torch.inference_mode():
                run.layers()
            result = run.finish(warnings, started)
            stage.promote(state.checkpoint)
            return result
        except OSError as error:
            raise translate_os_error(error, stage.work.path) from error
        finally:
            torch.set_num_threads(threads)


@dataclass(kw_only=True, slots=True)
class _Phases:
    """How long what takes, and who wants to know."""

    listener: Listener
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.listener.phase(name)
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started


@dataclass(kw_only=True, slots=True)
class _Run:
    """One run in progress."""

    plan: Plan
    state: RunState
    samples: Samples | None
    mode: Mode
    listener: Listener
    resumed: int = field(init=False)
    states: HiddenStates = field(init=False)

    def layers(self) -> None:
        """Work on every layer that is not done yet."""
        self.resumed = len(self.state.records)
        self.listener.plan(self._summary())
        self.states = HiddenStates(
            self.plan,
            self.samples,
            self.state.folder,
            self.mode,
            layer=self.resumed,
            digests=self.state.activations,
        )
        for index in range(self.resumed, self.plan.skeleton.num_layers):
            self._layer(index)

    def finish(self, warnings: tuple[str, ...], started: float) -> CompressionResult:
        """Write the rest of the checkpoint; what has been done since `started`."""
        in_layers = sum(sum(record.seconds.values()) for record in self.state.records[self.resumed :])
        finishing = time.perf_counter()
        size = finish_checkpoint(self.plan, self.state)
        seconds = {"prepare": finishing - started - in_layers, "finish": time.perf_counter() - finishing}
        result = describe_run(
            self.plan, self.state, resumed=self.resumed, warnings=warnings, seconds=seconds, size=size
        )
        write_manifest(self.plan, self.state, result)
        return result

    def _summary(self) -> dict[str, Any]:
        """What a listener is told; see `Listener.plan`."""
        tokens = self.samples.num_tokens if self.samples and self.mode == "ram" else 0
        return {
            "num_layers": self.plan.skeleton.num_layers,
            "resumed_layers": self.resumed,
            "samples": len(self.samples.token_ids) if self.samples else 0,
            "predicted_bytes": peak_bytes() + sum(predicted_bytes(self.plan, tokens).values()),
        }

    def _layer(self, index: int) -> None:
        plan, name = self.plan, self.plan.skeleton.layer_name(index)
        self.listener.layer_started(index, name)
        phases, store = _Phases(listener=self.listener), self.states.quantized
        with phases("load"):
            layer = self._context(index)
            layer.count_tokens()
            first = None if store is None else store[0][:1]
            # Before any step spends time on a layer that is broken.
            reference = None if first is None else require_finite(layer.forward(first), name)
        cache = self._choose(layer, phases)
        with phases("write"):
            shard, digest, names = write_layer(plan, index, layer, self.state.checkpoint)
        snr, states = None, list[str]()
        with phases("advance"):
            if first is not None and reference is not None:
                snr = signal_to_noise_db(reference, layer.forward(first))
                if index + 1 < plan.skeleton.num_layers:
                    states = self.states.advance(layer)
        record = LayerRecord(
            index=index,
            name=name,
            linears=tuple(layer.chosen.records[linear] for linear in plan.layers[index]),
            output_snr_db=snr,
            notes=tuple(layer.chosen.notes),
            seconds={phase: round(value, 3) for phase, value in phases.seconds.items()},
            peak_bytes=peak_bytes(),
            kv_cache=cache,
            tokens_per_expert=layer.data.tokens_per_expert,
        )
        self.state.finish_layer(record, shard, digest, names, states)
        self.states.forget_previous()
        release_freed_memory()
        self.listener.layer_finished(record)

    def _choose(self, layer: LayerContext, phases: _Phases) -> CacheRecord | None:
        """Codes of every linear, then scales of its input and of the KV cache, which depend on the codes."""
        recipe = self.plan.recipe
        for step, label in zip(recipe.steps, recipe.step_names, strict=True):
            with phases(label):
                step.apply(layer)
        with phases("round"):
            layer.finish()
        if any(scheme.activation and scheme.activation.is_calibrated for scheme in layer.schemes.values()):
            with phases("inputs"):
                calibrate_inputs(layer, recipe.input_clip)
        if recipe.kv_cache is None:
            return None
        with phases("kv cache"):
            return choose_cache(recipe.kv_cache, self.plan.family, layer)

    def _context(self, index: int) -> LayerContext:
        plan, name, block = self.plan, self.plan.skeleton.layer_name(index), self.plan.skeleton.layer(index)
        return LayerContext(
            name=name,
            block=block,
            sets=plan.sets(index),
            schemes=plan.layers[index],
            scale_dtype={linear: plan.scale_dtype[f"{name}.{linear}"] for linear in plan.layers[index]},
            head_dim=plan.skeleton.head_dim,
            arguments=partial(plan.skeleton.arguments, index),
            stored_dtype={
                key.removeprefix(f"{name}."): plan.reader.info(key).dtype
                for key in plan.reader.names
                if key.startswith(f"{name}.")
            },
            seed=plan.recipe.seed,
            data=LayerData(
                store=self.states.quantized,
                original_store=self.states.original,
                original=copy.deepcopy(block) if plan.needs_original else None,
                all_tokens=plan.all_tokens,
            ),
        )
