"""The life of a weight: layer after layer from source shards to finished ones, within the memory of one layer."""

from __future__ import annotations

import copy
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoints.memory import peak_bytes, release_freed_memory
from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.replaceable import MANIFEST
from quantkit.checkpoints.staging import Stage, open_stage
from quantkit.checkpoints.writer import copy_tensors, translate_os_error, write_index, write_json, write_shard
from quantkit.compress.calibration.activations import ActivationStore, Mode, finite
from quantkit.compress.calibration.dataset import Samples
from quantkit.compress.calibration.errors import signal_to_noise_db
from quantkit.compress.calibration.input_scales import calibrate_inputs
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.layer_state import LayerData
from quantkit.compress.pipeline.audit import check_checkpoint, check_weight, check_written
from quantkit.compress.pipeline.events import SILENT, Listener
from quantkit.compress.pipeline.file import write_file
from quantkit.compress.pipeline.inputs import embed, read_samples
from quantkit.compress.pipeline.kv_cache import (
    check_cache,
    check_cache_written,
    check_scales,
    find_cache,
    with_cache,
)
from quantkit.compress.pipeline.loaders import decode_at_load
from quantkit.compress.pipeline.model import with_stored_names
from quantkit.compress.pipeline.plan import Plan, describe_versions, make_plan, predicted_bytes
from quantkit.compress.pipeline.state import RunState, identity_digest, load_state, was_completed
from quantkit.compress.recipe import Recipe
from quantkit.results import CompressionResult, LayerRecord


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
        output: directory to write, or a file for the format gguf; None = `<model>-<recipe>` in the current one. Written
            under another name and renamed when everything has been checked.
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
    if recipe.format == "gguf":
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
    plan = make_plan(model, recipe, output, device)
    with open_stage(plan.output, "quantize", overwrite=overwrite, resumable=True, allow_finished=True) as stage:
        samples = read_samples(plan)
        for warning in (*plan.warnings, *(samples.warnings if samples else ())):
            listener.warning(warning)
        identity = _identity(plan, samples)
        if resume and was_completed(stage, identity):
            return CompressionResult.from_dict(json.loads((plan.output / "quantkit-run.json").read_text()))
        stage.check_output()
        try:
            state = load_state(stage.work, identity, resume=resume)
            run = _Run(plan=plan, stage=stage, state=state, listener=listener, mode=activations, samples=samples)
            with torch.inference_mode():
                run.layers()
            run.timer["prepare"] = time.perf_counter() - started - sum(sum(r.seconds.values()) for r in run.own_records)
            return run.finish()
        except OSError as error:
            raise translate_os_error(error, stage.work.path) from error


@dataclass(kw_only=True, slots=True)
class _Run:
    """One run in progress."""

    plan: Plan
    stage: Stage
    state: RunState
    listener: Listener
    mode: Mode
    samples: Samples | None
    store: ActivationStore | None = None
    original_store: ActivationStore | None = None
    resumed: int = 0
    timer: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def own_records(self) -> list[LayerRecord]:
        """Records of the layers that this process has worked on."""
        return self.state.records[self.resumed :]

    def layers(self) -> None:
        """Work on every layer that is not done yet."""
        self.resumed = len(self.state.records)
        count = self.plan.skeleton.num_layers
        tokens = self.samples.num_tokens if self.samples and self.mode == "ram" else 0
        self.listener.plan(
            {
                "num_layers": count,
                "resumed_layers": self.resumed,
                "samples": len(self.samples.token_ids) if self.samples else 0,
                "predicted_bytes": peak_bytes() + sum(predicted_bytes(self.plan, tokens).values()),
            }
        )
        if self.samples and self.resumed < count:
            self._open_stores(self.samples)
        for index in range(self.resumed, count):
            self._layer(index)

    def _open_stores(self, samples: Samples) -> None:
        """Hidden states before the next layer: of the model being quantized, and of the original if a step needs them.

        The digests of both are recorded in one list, the original's last.
        """
        folders = [self.state.folder / "activations"]
        if self.plan.needs_original:
            folders.append(self.state.folder / "activations-original")
        digests = self.state.activations
        size = len(digests) // len(folders)
        stores: list[ActivationStore] = []
        for number, folder in enumerate(folders):
            if self.resumed:
                own = digests[number * size : (number + 1) * size]
                stores.append(ActivationStore.restore(folder, self.mode, self.resumed, own))
            else:
                shutil.rmtree(folder, ignore_errors=True)
                stores.append(ActivationStore(folder, self.mode, embed(self.plan, samples)))
        self.store = stores[0]
        self.original_store = stores[1] if len(stores) > 1 else None

    def _advance(self, layer: LayerContext) -> list[str]:
        """Turn the hidden states into those before the next layer; what to record about them."""
        digests: list[str] = []
        for store, forward in ((self.store, layer.forward), (self.original_store, layer.original_forward)):
            if store is not None:
                store.advance(forward)
                digests += store.digests
        return digests

    def _layer(self, index: int) -> None:
        plan, seconds = self.plan, defaultdict[str, float](float)
        name = plan.skeleton.layer_name(index)
        self.listener.layer_started(index, name)
        with self._phase("load", seconds):
            layer = self._context(index)
            layer.count_tokens()
            first = self.store[0][:1] if self.store else None
            reference = None if first is None else finite(layer.forward(first), name)  # before any step spends time
        for step, label in zip(plan.recipe.steps, plan.recipe.step_names, strict=True):
            with self._phase(label, seconds):
                step.apply(layer)
        with self._phase("round", seconds):
            layer.finish()
        if any(scheme.activation and scheme.activation.is_calibrated for scheme in layer.schemes.values()):
            with self._phase("inputs", seconds):
                calibrate_inputs(layer, plan.recipe.input_clip)
        cache = None
        if plan.recipe.kv_cache is not None:
            with self._phase("kv cache", seconds):
                cache = find_cache(plan.recipe.kv_cache, plan.architecture, layer)
        with self._phase("write", seconds):
            shard, digest, names = self._write(index, layer)
        snr, states = None, list[str]()
        with self._phase("advance", seconds):
            if self.store is not None and first is not None and reference is not None:
                snr = signal_to_noise_db(reference, layer.forward(first))
                if index + 1 < plan.skeleton.num_layers:
                    states = self._advance(layer)
        record = LayerRecord(
            index=index,
            name=name,
            linears=tuple(layer.chosen.records[linear] for linear in plan.layers[index]),
            output_snr_db=snr,
            notes=tuple(layer.chosen.notes),
            seconds={phase: round(value, 3) for phase, value in seconds.items()},
            peak_bytes=peak_bytes(),
            kv_cache=cache,
            tokens_per_expert=layer.data.tokens_per_expert,
        )
        self.state.finish_layer(record, shard, digest, names, states)
        for store in (self.store, self.original_store):
            if store is not None:
                store.forget_previous()
        release_freed_memory()
        self.listener.layer_finished(record)

    def _context(self, index: int) -> LayerContext:
        plan = self.plan
        name = plan.skeleton.layer_name(index)
        block = plan.skeleton.layer(index)
        return LayerContext(
            name=name,
            block=block,
            sets=plan.sets(index),
            schemes=plan.layers[index],
            scale_dtype={linear: plan.scale_dtype[f"{name}.{linear}"] for linear in plan.layers[index]},
            head_dim=plan.head_dim,
            data=LayerData(
                store=self.store,
                original_store=self.original_store,
                original=copy.deepcopy(block) if plan.needs_original else None,
                all_tokens=plan.all_tokens,
            ),
            arguments=partial(plan.skeleton.arguments, index),
            stored_dtype={
                key.removeprefix(f"{name}."): plan.reader.info(key).dtype
                for key in plan.reader.names
                if key.startswith(f"{name}.")
            },
            seed=plan.recipe.seed,
        )

    def _write(self, index: int, layer: LayerContext) -> tuple[str, str, list[str]]:
        """Write and read back one layer's shard; its name, SHA-256 and tensor names."""
        plan = self.plan
        scales = {f"{layer.name}.{key}": value for key, value in layer.chosen.cache_scales.items()}
        tensors = dict(scales)
        for linear, weight in layer.chosen.quantized.items():
            prefix = f"{layer.name}.{linear}"
            check_weight(prefix, weight)
            local = plan.format.encode(weight, plan.layers[index][linear])
            written = sum(t.numel() * t.element_size() for key, t in local.items() if not key.endswith("_shape"))
            bits = 8 * written / weight.codes.numel()
            layer.chosen.records[linear] = replace(layer.chosen.records[linear], bits_per_weight=bits)
            tensors |= {f"{prefix}.{key}": value.cpu() for key, value in local.items()}
        made = {*scales, *(f"{layer.name}.{linear}.weight" for linear in layer.chosen.quantized)}
        parameters = {f"{layer.name}.{key}": value for key, value in layer.block.named_parameters()}
        for key in (key for key in plan.reader.names if key.startswith(f"{layer.name}.") and key not in made):
            tensors[key], kept = plan.reader.tensor(key), parameters.get(key)
            if kept is not None and not torch.equal(tensors[key].to(kept.dtype), kept.cpu()):
                tensors[key] = kept.to(tensors[key].dtype).cpu()  # changed by a step
        shard = shard_name(index, plan.skeleton.num_layers)
        path = self.state.checkpoint / shard
        tensors = plan.reader.restore(tensors)
        digest = write_shard(path, tensors)
        written_back = ModelReader.of_file(path, plan.architecture)
        for linear, weight in layer.chosen.quantized.items():
            check_written(written_back, f"{layer.name}.{linear}", weight, plan.layers[index][linear], plan.format)
        check_scales(path, scales)
        return shard, digest, sorted(tensors)

    def finish(self) -> CompressionResult:
        """Write what is not a decoder layer, check everything, and give the checkpoint its name."""
        started = time.perf_counter()
        plan, folder = self.plan, self.state.checkpoint
        shard = shard_name(plan.skeleton.num_layers, plan.skeleton.num_layers)
        stored = plan.reader.stored_name
        digests = {**self.state.shards, shard: copy_tensors(plan.reader, plan.rest, folder / shard, stored)}
        weight_map = {**self.state.weight_map, **dict.fromkeys(map(stored, plan.rest), shard)}
        size = sum(_tensor_bytes(folder / name) for name in sorted(set(weight_map.values())))
        write_index(folder, weight_map, size)
        described = plan.format.config(
            *with_stored_names(plan.reader, plan.skeleton, plan.linears, plan.ignored), group_order=plan.group_order
        )
        described = decode_at_load(described, plan.architecture)
        config = with_cache(plan.recipe, plan.reader.config, described, self.state.records)
        write_json(folder / "config.json", config)
        for path in plan.reader.metadata_files():
            shutil.copyfile(path, folder / path.name)
        check_checkpoint(folder, plan, self.state.records)
        check_cache_written(folder, plan.recipe, config, self.state.records)
        self.timer["finish"] = time.perf_counter() - started
        result = self._result(size)
        self._write_manifest(result, digests)
        self.stage.promote(folder)
        return result

    def _result(self, size: int) -> CompressionResult:
        plan, records = self.plan, tuple(self.state.records)
        linears = [linear for record in records for linear in record.linears]
        weights = sum(linear.shape[0] * linear.shape[1] for linear in linears)
        bits = sum(linear.bits_per_weight * linear.shape[0] * linear.shape[1] for linear in linears)
        seconds = dict(self.timer)
        for record in records[self.resumed :]:
            for phase, value in record.seconds.items():
                seconds[phase] = seconds.get(phase, 0.0) + value
        return CompressionResult(
            model=plan.model,
            output=str(plan.output),
            recipe=plan.recipe.name,
            format=plan.recipe.format,
            num_layers=len(records),
            num_quantized=len(linears),
            ignored=plan.ignored,
            bits_per_weight=bits / weights if weights else 8.0 * plan.source_dtype.itemsize,
            source_bytes=plan.reader.num_bytes,
            output_bytes=size,
            layers=records,
            warnings=(*plan.warnings, *(self.samples.warnings if self.samples else ())),
            seconds={phase: round(value, 3) for phase, value in seconds.items()},
            peak_bytes=peak_bytes(),
            resumed_layers=self.resumed,
        )

    def _write_manifest(self, result: CompressionResult, digests: dict[str, str]) -> None:
        """`quantkit.json` says what was made and how; `quantkit-run.json` how long it took, and differs every time."""
        folder = self.state.checkpoint
        write_json(folder / "quantkit-run.json", result.to_dict())
        steady = result.to_dict()
        for key in ("model", "output", "seconds", "peak_bytes", "resumed_layers"):
            del steady[key]
        for layer in steady["layers"]:
            del layer["seconds"], layer["peak_bytes"]
        manifest = {
            "schema_version": result.schema_version,
            "recipe": self.plan.recipe.source,
            "gates": list(self.plan.recipe.gates),
            "files": {
                name: {"bytes": (folder / name).stat().st_size, "sha256": digests[name]} for name in sorted(digests)
            },
            "identity": self.state.identity,
            "identity_sha256": identity_digest(self.state.identity),
            "result": steady,
        }
        if self.plan.discovery is not None:
            manifest["discovered"] = self.plan.discovery.record
        write_json(folder / MANIFEST, manifest)

    @contextmanager
    def _phase(self, name: str, seconds: dict[str, float]) -> Iterator[None]:
        self.listener.phase(name)
        started = time.perf_counter()
        yield
        seconds[name] += time.perf_counter() - started


def shard_name(index: int, num_layers: int) -> str:
    """File of a layer; the one after the last holds everything else."""
    return f"model-{index + 1:05d}-of-{num_layers + 1:05d}.safetensors"


def _identity(plan: Plan, samples: Samples | None) -> dict[str, Any]:
    """Everything that decides the bits of the result."""
    identity = {
        "recipe": plan.recipe.source,
        "source": plan.reader.digests(),
        "calibration": None if samples is None else samples.digest,
        "versions": describe_versions(),
        "compute": {
            "device": plan.device.type,
            "dtype": str(plan.compute_dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "kernels": torch.cuda.get_device_name(plan.device)
            if plan.device.type == "cuda"
            else torch.backends.cpu.get_cpu_capability(),
            "matmul": torch.get_float32_matmul_precision(),
        },
    }
    if plan.discovery is not None:
        identity["discovered"] = plan.discovery.identity
    return identity


def _tensor_bytes(path: Path) -> int:
    """Size of a safetensors file without its header."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
