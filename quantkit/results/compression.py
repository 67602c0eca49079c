"""Records of a compression, of a checkpoint's contents, and of the engines that can read it. Torch-free."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from quantkit.quantities import byte_size, counted, scaled_count
from quantkit.results._record import SCHEMA_VERSION, Record


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReading(Record):
    """Prediction of how one engine reads a checkpoint.

    Args:
        engine, release: engine and its version.
        reads: "fast", "slow", "unknown" (no rule applies), "wrong" (the engine loads the checkpoint but computes wrong
            numbers) or "no". If linears differ, the worst case.
        reason: why the engine reads the checkpoint in this way, or the name of the kernel that computes with it.
        source: file and function in the engine's source code that the prediction is based on.
        cache: how the engine stores the KV cache, if it ignores the checkpoint's request; otherwise empty.
        error: error message with which the engine refuses the checkpoint; "" if it does not, or the message is unknown.
    """

    engine: str
    release: str
    reads: str
    reason: str
    source: str = ""
    cache: str = ""
    error: str = ""

    @property
    def is_right(self) -> bool:
        """Whether the engine is predicted to load the checkpoint and to compute the right numbers."""
        return self.reads in ("fast", "slow")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearRecord(Record):
    """Error and storage of one quantized linear.

    Args:
        name: name relative to its layer, e.g. `mlp.up_proj`.
        scheme: short form of its scheme, e.g. `int4 g128`.
        shape: (outputs, inputs).
        bits_per_weight: bits of codes, scales and zero points divided by the number of weights.
        rounding_error: relative error of round-to-nearest with absmax ranges, for the weight after any rotation of the
            model but before a step folds scales into it.
        error: relative error of the written weight.
        measure: how both errors were measured. "held-out": error of the linear's outputs relative to the original
            model, on tokens that calibration did not use, with inputs from the quantized model; "calibration": the
            same error on calibration tokens, if there are no other tokens; "weight": ||dW|| / ||W||, without data;
            "output" (earlier documents): ||X dW|| / ||X W|| on calibration inputs X.
    """

    name: str
    scheme: str
    shape: tuple[int, int]
    bits_per_weight: float
    rounding_error: float
    error: float
    measure: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheRecord(Record):
    """KV cache that a checkpoint requests for one layer.

    Args:
        scheme: scheme of keys and values, as in config.json under `quantkit_kv_cache`.
        key_scale, value_scale: fixed scales: a single scale, or one per head; empty if every token has its own scale.
        largest_key: largest magnitude of any key; None without data.
        typical_key: root mean square of an ordinary channel of keys, the smallest over all heads; None without data. A
            head's ordinary channel is the channel whose mean square is the median over the head's channels.
        noise_asked: estimated rounding noise of the worst head with the recipe's scheme for keys, as a share of the
            mean square of the head's ordinary channel.
        noise: as `noise_asked`, with the chosen scheme for keys.
    """

    scheme: dict[str, Any]
    key_scale: tuple[float, ...] = ()
    value_scale: tuple[float, ...] = ()
    largest_key: float | None = None
    typical_key: float | None = None
    noise_asked: float | None = None
    noise: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRecord(Record):
    """Result of compressing one decoder layer.

    Args:
        index: layer number; the first layer is 0.
        name: full module name, e.g. `model.layers.0`.
        linears: one record per linear.
        output_snr_db: signal-to-noise ratio of the quantized layer's output, compared with the output of the original
            layer for the same inputs; None without data.
        notes: unusual events, e.g. raised damping; one sentence each.
        seconds: wall time by phase ("load", "steps", "write", ...).
        peak_bytes: highest resident memory of the process so far.
        kv_cache: KV cache that the checkpoint requests for this layer; None if the recipe does not set it.
        tokens_per_expert: calibration tokens that were routed to each expert; empty without experts or data.
    """

    index: int
    name: str
    linears: tuple[LinearRecord, ...]
    output_snr_db: float | None = None
    notes: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    kv_cache: CacheRecord | None = None
    tokens_per_expert: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationRecord(Record):
    """Size of the data that the layers were calibrated on.

    Args:
        num_samples: number of sequences.
        num_tokens: number of tokens in all sequences, including image tokens.
        num_with_images: number of sequences with images.
        num_held_out: number of further tokens that calibration does not use; errors are measured on them.
    """

    num_samples: int
    num_tokens: int
    num_with_images: int = 0
    num_held_out: int = 0

    def describe(self) -> str:
        """Return a short form for tables."""
        images = f" ({self.num_with_images} with images)" if self.num_with_images else ""
        held_out = f"; {self.num_held_out:,} other tokens held out" if self.num_held_out else ""
        return f"{counted(self.num_samples, 'sample')}{images}, {counted(self.num_tokens, 'token')} in all{held_out}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerRecord(Record):
    """Quantization of linears outside the decoder layers: in vision and audio towers with their projectors, or in MTP
    heads.

    Args:
        num_linears: number of linears that could be quantized.
        linears: linears that were quantized without calibration data; their names are full module names.
    """

    num_linears: int
    linears: tuple[LinearRecord, ...] = ()

    def describe(self) -> str:
        """Return a short form for tables: `not quantized`, or the number of linears per scheme."""
        if not self.linears:
            return "not quantized"
        kinds = Counter(linear.scheme for linear in self.linears)
        text = ", ".join(f"{counted(count, 'linear')} {scheme}" for scheme, count in kinds.most_common())
        left = self.num_linears - len(self.linears)
        return f"quantized without data: {text}" + (f"; {left} not quantized" if left else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterRecord(Record):
    """LoRA adapter that was merged into the model before it was quantized.

    Args:
        sha256: digest of the adapter's config and weights.
        rank: highest rank of the adapter's updates.
        num_linears: number of linears that the adapter changes.
        base: name of the base model in the adapter's config; None = the config names none.
        path: folder of the adapter; empty in `quantkit.json`, which names no folders.
    """

    sha256: str
    rank: int
    num_linears: int
    base: str | None = None
    path: str = ""

    def describe(self) -> str:
        """Return a short form for tables, without the folder's path."""
        name = f"{PurePath(self.path).name}, " if self.path else ""
        return f"{name}rank {self.rank}, merged into {self.num_linears} linears before quantizing"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionResult(Record):
    """Result of `quantkit quantize`, as printed by `--json` and stored in `quantkit-run.json`.

    Args:
        model: the model that was compressed, as the user named it.
        output: directory or GGUF file of the finished checkpoint.
        recipe: name of the recipe.
        format: on-disk format.
        num_layers: number of decoder layers.
        num_quantized: number of quantized linears.
        ignored: full names of linears that were not quantized.
        bits_per_weight: average over the quantized linears, including scales and zero points.
        source_bytes, output_bytes: bytes of all tensors before and after.
        layers: one record per layer.
        warnings: warnings about the calibration data and the run.
        seconds: wall time by phase, over all layers.
        peak_bytes: highest resident memory of the process, as the kernel reports it.
        resumed_layers: number of layers reused from an interrupted run.
        quantized_share: quantized share of the elements of all matrices in the decoder layers; None in earlier
            documents.
        unquantized: number of unquantized elements, keyed by module name without layer and expert numbers.
        tower: linears of vision and audio towers; None if the model has none.
        mtp: linears in the decoder layers of MTP heads; None if the files have no heads that quantkit describes.
        calibration: calibration data; None without data, and in earlier documents.
        adapter: LoRA adapter that was merged into the model; None = none.
    """

    model: str
    output: str
    recipe: str
    format: str
    num_layers: int
    num_quantized: int
    ignored: tuple[str, ...]
    bits_per_weight: float
    source_bytes: int
    output_bytes: int
    layers: tuple[LayerRecord, ...]
    warnings: tuple[str, ...]
    seconds: dict[str, float]
    peak_bytes: int
    resumed_layers: int
    quantized_share: float | None = None
    unquantized: dict[str, int] = field(default_factory=dict)
    tower: TowerRecord | None = None
    mtp: TowerRecord | None = None
    calibration: CalibrationRecord | None = None
    adapter: AdapterRecord | None = None
    schema_version: int = SCHEMA_VERSION

    def worst_linears(self, count: int = 5) -> list[tuple[str, LinearRecord]]:
        """Return the linears with the largest error, worst first, with their full names."""
        named = [(f"{layer.name}.{linear.name}", linear) for layer in self.layers for linear in layer.linears]
        named += [(one.name, one) for record in (self.tower, self.mtp) if record for one in record.linears]
        return sorted(named, key=lambda pair: pair[1].error, reverse=True)[:count]


def describe_caches(layers: Sequence[LayerRecord]) -> str | None:
    """Describe, for tables, the KV cache that a checkpoint requests; None if it requests none.

    Args:
        layers: one record per layer.
    """
    texts = [_describe_cache(layer.kv_cache) for layer in layers if layer.kv_cache is not None]
    if not texts:
        return None
    usual = max(texts, key=texts.count)
    others: dict[str, list[str]] = {}
    for layer, text in zip(layers, texts, strict=True):
        if text != usual:
            others.setdefault(text, []).append(str(layer.index))
    different = [f"layer{'s' * (len(of) > 1)} {', '.join(of)}: {text}" for text, of in others.items()]
    return "; ".join([usual, *different])


def describe_experts(layers: Sequence[LayerRecord]) -> str | None:
    """Describe how many calibration tokens the experts received; None without experts or data.

    Args:
        layers: one record per layer.
    """
    counts = {layer.name: layer.tokens_per_expert for layer in layers if layer.tokens_per_expert}
    if not counts:
        return None
    name, few = min(counts.items(), key=lambda item: min(item[1]))
    notes = [note for layer in layers for note in layer.notes if "experts saw fewer than" in note]
    where = counted(len(counts), "layer")
    text = f"{len(few)} in each of {where}; fewest tokens routed to one expert: {min(few):,} ({name})"
    where = counted(len(notes), "layer")
    return f"{text}; under-calibrated in {where}: {notes[0].rpartition('; ')[2]}" if notes else text


def _describe_cache(record: CacheRecord) -> str:
    def side(name: str) -> str:
        kept = record.scheme.get(name)
        return f"{name} unquantized" if kept is None else f"{name} {kept['dtype']} per {kept['granularity']}"

    rotated = ", keys rotated" if record.scheme.get("rotation", "none") != "none" else ""
    return f"{side('keys')}, {side('values')}{rotated}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleSummary(Record):
    """Number and size of a checkpoint's modules of one kind and number type, e.g. all `mlp.up_proj` in int4."""

    kind: str
    stored_as: str
    count: int
    num_parameters: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadsSummary(Record):
    """Storage of the MTP heads of a checkpoint.

    Args:
        num_heads: number of heads; 0 if it is unknown.
        stored_as: number types and schemes of the heads' tensors.
        num_parameters: number of parameters.
        num_bytes: bytes in files.
    """

    num_heads: int
    stored_as: tuple[str, ...]
    num_parameters: int
    num_bytes: int

    def describe(self) -> str:
        """Return a short form for tables, e.g. `1: int8 channel and bfloat16, 95.2 M parameters, 110.1 MiB`."""
        number = f"{self.num_heads}: " if self.num_heads else ""
        stored = " and ".join(self.stored_as)
        return f"{number}{stored}, {scaled_count(self.num_parameters)} parameters, {byte_size(self.num_bytes)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSummary(Record):
    """Summary of a checkpoint: the result of `quantkit inspect`.

    Args:
        path: directory or GGUF file.
        architecture: class name in config.json, or architecture in the metadata of a GGUF file.
        format: on-disk format; "dense" if nothing is quantized.
        num_parameters: number of parameters; a code of a quantized weight counts as one.
        num_bytes: tensor bytes on disk.
        bits_per_weight: average over the quantized linears; None if there are none.
        modules: one summary per kind of module and number type.
        recipe: name of the recipe from quantkit.json, if the file exists.
        layers: per-layer errors from quantkit.json, if the file exists.
        tower: linears of vision and audio towers from quantkit.json, if the file exists.
        adapter: adapter that was merged before quantizing, from quantkit.json, if the file exists.
        mtp: storage of MTP heads; None if the files have none.
        engines: predictions of how engines read the checkpoint.
        made_by: entries `quantkit.*` of a GGUF file: the recipe as YAML, digests of its calibration text, and the KL
            that a search measured. Of a checkpoint that `quantkit distill` made: `distilled`. Otherwise empty.
    """

    path: str
    architecture: str
    format: str
    num_parameters: int
    num_bytes: int
    bits_per_weight: float | None
    modules: tuple[ModuleSummary, ...]
    recipe: str | None = None
    layers: tuple[LayerRecord, ...] = field(default=())
    tower: TowerRecord | None = None
    adapter: AdapterRecord | None = None
    mtp: HeadsSummary | None = None
    engines: tuple[EngineReading, ...] = ()
    made_by: dict[str, str] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDifference(Record):
    """Result of `quantkit inspect A B`; every row is (name, value in A, value in B).

    Args:
        left, right: the two checkpoints.
        facts: differences in format, size, recipe and other properties of the whole checkpoint.
        modules: differences in the storage of each kind of module.
        entries: differences in config.json, or in the metadata of GGUF files.
    """

    left: str
    right: str
    facts: tuple[tuple[str, str, str], ...]
    modules: tuple[tuple[str, str, str], ...]
    entries: tuple[tuple[str, str, str], ...]
