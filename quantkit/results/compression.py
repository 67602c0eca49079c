"""Records of a compression, of the contents of a checkpoint, and of what engines read, as plain data that JSON can
carry. Torch-free.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quantkit.results._record import SCHEMA_VERSION, Record


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReading(Record):
    """Answer of one engine's rules about a checkpoint.

    Args:
        engine, release: of which it is said.
        reads: "fast", "slow", "unknown" (no rule is about it), "wrong" (it loads and computes other numbers) or "no":
            of the linear that it takes worst.
        reason: why, or by which kernel.
        source: file and function of the release.
        cache: what becomes of the KV cache, where it is not what the checkpoint asks for.
        error: what the engine itself says where it refuses; "" = not known.
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
        """Whether it computes with the numbers that are stored."""
        return self.reads in ("fast", "slow")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearRecord(Record):
    """Error and storage of one quantized linear.

    Args:
        name: relative to its layer, e.g. `mlp.up_proj`.
        scheme: short form, e.g. `int4 g128`.
        shape: (outputs, inputs).
        bits_per_weight: codes, scales and zero points over the number of weights.
        rounding_error: relative error of plain rounding with the covering range, of the columns as they were before a
            step folded scales into them; a rotated model is taken as it was rotated.
        error: relative error of what was written.
        measure: "held-out": of the linear's outputs, against those that it has in the original model, on tokens that no
            statistic has seen, with the inputs that the quantized model feeds it, for both errors; "calibration":
            likewise on calibration tokens, no others being left; "weight": ||dW|| / ||W||, without data; "output", in
            documents of before: ||X dW|| / ||X W|| on calibration inputs X.
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
    """KV cache that a checkpoint asks for in one layer.

    Args:
        scheme: of keys and values, as config.json has it under `quantkit_kv_cache`.
        key_scale, value_scale: fixed scales as written, one or one per head; none where each token has its own.
        largest_key, typical_key: the largest magnitude seen, and the root mean square of an ordinary channel of the
            head whose is smallest; None without data.
        noise_asked: what rounding as the recipe asks adds to an ordinary key channel, as a share of its mean square.
        noise: the same as decided.
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
    """Compression of one decoder layer.

    Args:
        index: 0 for the first.
        name: full module name, e.g. `model.layers.0`.
        linears: one record each.
        output_snr_db: signal to noise of the layer's output, quantized against not, same inputs; None without data.
        notes: everything out of the ordinary, e.g. raised damping; one sentence each.
        seconds: wall time by phase ("load", "steps", "write", ...).
        peak_bytes: resident memory of the process at its highest so far.
        kv_cache: what keys and values are kept in; None where the recipe says nothing about them.
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
    """Data that the layers were calibrated on.

    Args:
        num_samples: sequences.
        num_tokens: in all of them; places of images count.
        num_with_images: sequences that had images in them.
        num_held_out: tokens beside these, which no statistic has seen and errors are measured on.
    """

    num_samples: int
    num_tokens: int
    num_with_images: int = 0
    num_held_out: int = 0

    def describe(self) -> str:
        """Short form for tables."""
        images = f", {self.num_with_images} of them with images" if self.num_with_images else ""
        held_out = f", and {self.num_held_out:,} held out" if self.num_held_out else ""
        return f"{self.num_samples} samples of {self.num_tokens:,} tokens{images}{held_out}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerRecord(Record):
    """Linears beside a language model, in vision and audio towers and their projectors, and what became of them.

    Args:
        num_linears: how many there are that could become codes.
        linears: those that did, rounded without data, with their full names.
    """

    num_linears: int
    linears: tuple[LinearRecord, ...] = ()

    def describe(self) -> str:
        """Short form for tables: `kept as they are`, or how many are what."""
        if not self.linears:
            return "kept as they are"
        kinds = Counter(linear.scheme for linear in self.linears)
        text = ", ".join(f"{count} linears {scheme}" for scheme, count in kinds.most_common())
        left = self.num_linears - len(self.linears)
        return f"quantized without data: {text}" + (f"; {left} kept as they are" if left else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionResult(Record):
    """Result of `quantkit quantize`, as printed by `--json` and kept in `quantkit.json`.

    Args:
        model: what was compressed, as given.
        output: directory of the finished checkpoint.
        recipe: name of the recipe.
        format: on-disk format.
        num_layers: decoder layers.
        num_quantized: linears that were quantized.
        ignored: full names of linears that were not.
        bits_per_weight: over the quantized linears, scales and zero points included.
        source_bytes, output_bytes: tensor bytes before and after, everything included.
        layers: one record each.
        warnings: from the calibration linter and the run.
        seconds: wall time by phase, over all layers.
        peak_bytes: highest resident memory of the process, as the kernel reports it.
        resumed_layers: layers taken over from an interrupted run.
        quantized_share: of the elements of all matrices in the decoder layers; None in documents of before.
        unquantized: elements of the others by what they are called, layer and expert numbers left out.
        tower: what became of vision and audio towers; None of a model that has none.
        calibration: what the layers were shown; None where they were shown nothing, and in documents of before.
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
    calibration: CalibrationRecord | None = None
    schema_version: int = SCHEMA_VERSION

    def worst_linears(self, count: int = 5) -> list[tuple[str, LinearRecord]]:
        """The linears with the largest error, worst first, with their full names."""
        named = [(f"{layer.name}.{linear.name}", linear) for layer in self.layers for linear in layer.linears]
        named += [(linear.name, linear) for linear in (self.tower.linears if self.tower else ())]
        return sorted(named, key=lambda pair: pair[1].error, reverse=True)[:count]


def describe_caches(layers: Sequence[LayerRecord]) -> str | None:
    """Describe the number types of a model's KV caches for tables; None where the checkpoint asks for none.

    Args:
        layers: one record each.
    """
    texts = [_describe_cache(layer.kv_cache) for layer in layers if layer.kv_cache is not None]
    if not texts:
        return None
    usual = max(texts, key=texts.count)
    others: dict[str, list[str]] = {}
    for layer, text in zip(layers, texts, strict=True):
        if text != usual:
            others.setdefault(text, []).append(str(layer.index))
    different = [f"layers {', '.join(numbers)}: {text}" for text, numbers in others.items()]
    return "; ".join([usual, *different])


def describe_experts(layers: Sequence[LayerRecord]) -> str | None:
    """Describe the calibration tokens that experts of all layers were given; None without experts or data.

    Args:
        layers: one record each.
    """
    counts = {layer.name: layer.tokens_per_expert for layer in layers if layer.tokens_per_expert}
    if not counts:
        return None
    name, few = min(counts.items(), key=lambda item: min(item[1]))
    notes = [note for layer in layers for note in layer.notes if "experts saw fewer than" in note]
    text = f"{len(few)} in each of {len(counts)} layers; fewest tokens routed to one: {min(few):,} ({name})"
    return f"{text}; under-calibrated in {len(notes)} layers: {notes[0].rpartition('; ')[2]}" if notes else text


def _describe_cache(record: CacheRecord) -> str:
    def side(name: str) -> str:
        kept = record.scheme.get(name)
        return f"{name} ignored" if kept is None else f"{name} {kept['dtype']} per {kept['granularity']}"

    rotated = ", keys rotated" if record.scheme.get("rotation", "none") != "none" else ""
    return f"{side('keys')}, {side('values')}{rotated}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleSummary(Record):
    """One kind of module in a checkpoint: how many, how stored, how large."""

    kind: str
    stored_as: str
    count: int
    num_parameters: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSummary(Record):
    """Result of `quantkit inspect`.

    Args:
        path: directory.
        architecture: class name of config.json.
        format: on-disk format; "dense" when nothing is quantized.
        num_parameters: weights of the model, codes counted as one each.
        num_bytes: tensor bytes on disk.
        bits_per_weight: over quantized linears only; None when there are none.
        modules: by kind of module.
        recipe: from quantkit.json, if it is there.
        layers: per-layer errors from quantkit.json, if it is there.
        tower: what became of vision and audio towers, likewise.
        engines: who reads it.
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
    engines: tuple[EngineReading, ...] = ()
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDifference(Record):
    """Result of `quantkit inspect A B`; every row is (name, in A, in B).

    Args:
        left, right: the checkpoints.
        facts: of the whole.
        modules: how modules of one kind are stored.
        entries: of config.json, or of the metadata of GGUF files.
    """

    left: str
    right: str
    facts: tuple[tuple[str, str, str], ...]
    modules: tuple[tuple[str, str, str], ...]
    entries: tuple[tuple[str, str, str], ...]
