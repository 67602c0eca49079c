"""Read a low-rank adapter (LoRA) in PEFT's format, and merge it into a checkpoint's weights as they are read.

An adapter is a folder with adapter_config.json and adapter_model.safetensors. It changes the weight of some linears:
W + scale * B A. An adapter that computes anything else is refused, so that no change is lost silently.
Source: Hu et al. 2021, LoRA; Kalajdzievski 2023, rsLoRA; PEFT `tuners/lora/config.py` and `tuners/lora/layer.py`.
Shapes: N outputs, K inputs, R rank.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoints.encoded_weight import EncodedInfo, Read
from quantkit.checkpoints.header import kind_of
from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.checkpoints.symlinks import check_links
from quantkit.errors import CheckpointError, ModelError, SchemeError
from quantkit.formats import is_gguf
from quantkit.formats.base import FLOAT_DTYPES
from quantkit.models.config import ConfigReader
from quantkit.models.family import Family
from quantkit.numerics.name_patterns import Budget, matches
from quantkit.quantities import counted
from quantkit.safety.untrusted import check_path, read_object, shorten

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_ENTRY = "quantkit.adapter.sha256"
"""Entry of a GGUF file: digests of the merged adapters, separated by commas; absent if no adapter is merged."""

_WEIGHTS = "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt")
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_END = re.compile(r"\.(lora_|base_layer\.|modules_to_save\.).*|\.weight$")
_MERGE = "merge the adapter with PEFT's merge_and_unload, and give the merged model"
# Entries that describe the training, or that the tensors and `_scale` already account for.
_KNOWN = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "exclude_modules"),
    *("inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout"),
    *("megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision"),
    *("target_modules", "task_type", "use_rslora", "eva_config"),
}
_FLOATS = tuple(kind_of(dtype) for dtype in FLOAT_DTYPES)
_SHOWN = 3  # names in a message
# Ways to initialize A and B that do not change the base's weights.
_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class LowRankUpdate:
    """The change of one linear: W + scale * B A.

    Args:
        a: lora_A (R, K), as stored.
        b: lora_B (N, R), as stored.
        scale: lora_alpha / r, or lora_alpha / sqrt(r) for rsLoRA.
    """

    a: Tensor
    b: Tensor
    scale: float

    def merged(self, weight: Tensor) -> Tensor:
        """Return W + scale * B A in the dtype of `weight` (N, K), computed in float32 and rounded once."""
        # PEFT's order of operations, so that the result equals that of its `merge_and_unload` bit for bit.
        update = (self.b.float() @ self.a.float()).mul_(self.scale)
        return update.add_(weight).to(weight.dtype)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Adapter:
    """An adapter that fits a base model.

    Args:
        path: folder of the adapter.
        digest: see `adapter_digest`.
        base: the adapter's own name for its base model; None = the adapter does not name its base.
        updates: changes of linears, keyed by the linear's name in the base's `ModelReader`.
        warnings: reasons to doubt that the adapter was trained for this base, one sentence each.
    """

    path: Path
    digest: str
    base: str | None
    updates: Mapping[str, LowRankUpdate]
    warnings: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """The highest rank of an update."""
        return max(update.a.shape[0] for update in self.updates.values())


def read_adapter(path: Path | str, reader: ModelReader) -> Adapter:
    """Read an adapter, and check that it fits a base model.

    Args:
        path: folder with adapter_config.json and adapter_model.safetensors.
        reader: reader of the base model; for a quantized base, a view from `open_dense`, which has the shapes of the
            dequantized weights.
    Raises:
        ModelError: the folder holds no adapter, the adapter is not a plain LoRA, or it is for a different base.
        CheckpointError: a file is damaged, or holds values that are not finite.
    """
    folder = Path(path)
    config, weights = _read_folder(folder)
    _check_config(config, folder)
    _check_ends(weights, reader, folder)
    pairs = _pairs(weights)
    names = _own_names(pairs, reader, folder)
    budget, updates = Budget(), {}
    for module, name in names.items():
        rank, scale = _scale(config, module, folder, budget)
        a, b = pairs[module]["A"], pairs[module]["B"]
        _check_shapes(name, weights.info(a).shape, weights.info(b).shape, rank, reader, folder)
        updates[name] = LowRankUpdate(a=_read(weights, a), b=_read(weights, b), scale=scale)
    base = config.get("base_model_name_or_path")
    return Adapter(
        path=folder,
        digest=adapter_digest(folder),
        base=base if isinstance(base, str) else None,
        updates=updates,
        warnings=() if config.get("layers_to_transform") else tuple(_uncovered(folder, updates, reader)),
    )


def _uncovered(folder: Path, names: Iterable[str], reader: ModelReader) -> Iterator[str]:
    """Yield a warning if an adapter changes linears of the first layers only, although later layers have them too.

    Such an adapter was probably trained for a model with fewer layers. There is no warning if later layers lack the
    changed linears, e.g. if only the dense layers before layers of experts have them.
    """
    layers, changed = reader.family.layers, dict[int, set[str]]()
    for name in names:
        index, _, local = name.removeprefix(f"{layers}.").partition(".")
        if name.startswith(f"{layers}.") and index.isdecimal():
            changed.setdefault(int(index), set()).add(local)
    count = ConfigReader(reader.config, keys=reader.family.keys).optional_count("num_hidden_layers") or 0
    covered = len(changed)
    later = (f"{layers}.{i}.{local}.weight" for i in range(covered, count) for local in changed.get(0, ()))
    if set(changed) == set(range(covered)) and any(name in reader for name in later):
        shown = "layer 0" if covered == 1 else f"layers 0 to {covered - 1}"
        yield f"adapter {folder.name} covers {shown} of {count}; it may have been trained for a different base"


def adapter_digest(folder: Path) -> str:
    """Return the SHA-256 of what an adapter computes: the name and scale of each update, and its A and B in float32.

    An adapter therefore keeps its digest when it is saved again, e.g. with its config entries in a different order.

    Raises:
        ModelError, CheckpointError: see `read_adapter`.
    """
    config, weights = _read_folder(folder)
    total, budget = hashlib.sha256(), Budget()
    for module, pair in sorted(_pairs(weights).items()):
        total.update(f"{module} {_scale(config, module, folder, budget)[1]!r}".encode())
        for kind in "AB":
            values = _read(weights, pair[kind]).float().contiguous()
            total.update(f" {tuple(values.shape)}\n".encode() + values.numpy().tobytes())
    return total.hexdigest()


def merged(reader: CheckpointReader, adapter: Adapter, family: Family) -> CheckpointReader:
    """Return a view of a base model that merges an adapter into each weight when the weight is read.

    Args:
        reader: reader of the base, as `open_dense` returns it.
        adapter: the adapter.
        family: family of the model.
    Raises:
        ModelError: the base is a GGUF file, or stores a weight that the adapter changes as codes or as a part of a
            larger tensor.
    """
    if is_gguf(reader.path):  # the file's row order may differ from the adapter's
        raise ModelError(f"{reader.path} is a GGUF file; to merge an adapter, give the folder of its base model")
    model = ModelReader.of(reader, family)
    tensors = {name: reader.info(name) for name in reader.names}
    for name, update in adapter.updates.items():
        stored = model.stored_name(f"{name}.weight")
        info = tensors.get(stored)
        if isinstance(info, EncodedInfo):
            raise ModelError(
                f"{reader.path} is quantized, and an adapter is never merged into quantized weights; quantize the "
                "unquantized base model with --adapter, or use `generate --adapter`"
            )
        if info is None or info.shape != model.info(f"{name}.weight").shape:
            raise ModelError(
                f"{adapter.path} changes {name}, which {reader.path} stores as a part of a larger tensor; {_MERGE}"
            )
        where, parts = f"{info.file}: {stored}", {"weight": info}
        tensors[stored] = _MergedInfo.of(info, info.shape, info.dtype, where=where, parts=parts, update=update)
    return reader.view(tensors, reader.config, merge_note(adapter))


def merge_note(adapter: Adapter) -> str:
    """Return the note that tells the user that an adapter is merged into weights when they are read."""
    count = counted(len(adapter.updates), "weight")
    return f"an adapter of rank {adapter.rank} is merged into {count} when quantkit reads them"


@dataclass(frozen=True, kw_only=True, slots=True)
class _MergedInfo(EncodedInfo):
    """Description of a weight with an adapter's update merged into it. It can be read only as values, not as codes."""

    update: LowRankUpdate

    def values(self, read: Read) -> Tensor:
        return self.update.merged(read(self.parts["weight"]))


def _read_folder(folder: Path) -> tuple[dict[str, Any], CheckpointReader]:
    """Return the config of an adapter and a reader of its tensors."""
    check_path(folder, ModelError)
    if not folder.is_dir():
        raise ModelError(f"no such adapter: {folder}; give the folder that holds {ADAPTER_CONFIG} and {_WEIGHTS}")
    check_links(folder)
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ModelError(f"{folder} has no {ADAPTER_CONFIG}; give the folder of an adapter that PEFT has saved")
    if not (folder / _WEIGHTS).is_file():
        pickles = [name for name in _PICKLES if (folder / name).is_file()]
        raise ModelError(
            f"{folder} has no {_WEIGHTS}"
            + (
                f", only {pickles[0]}; quantkit never loads pickle files, which can run code; if you trust the file, "
                "load the adapter with PEFT and save it again"
                if pickles
                else "; download or copy it again"
            )
        )
    return read_object(folder / ADAPTER_CONFIG, ModelError), CheckpointReader.of_file(folder / _WEIGHTS)


def _check_config(config: Mapping[str, Any], folder: Path) -> None:
    """Raise ModelError if the adapter is not a plain LoRA."""
    where = folder / ADAPTER_CONFIG
    if config.get("peft_type") != "LORA":
        raise ModelError(
            f"{where}: peft_type is {shorten(config.get('peft_type'))}; only 'LORA' is supported; {_MERGE}"
        )
    # PEFT gives every feature an entry that is empty or false while the feature is off.
    for key, value in config.items():
        if key not in _KNOWN and value:
            raise ModelError(f"{where}: {shorten(key)} is {shorten(value)}, which is not supported; {_MERGE}")
    if config.get("bias", "none") != "none":
        raise ModelError(f"{where}: bias is {shorten(config['bias'])}, which changes biases of the base; {_MERGE}")
    initial = config.get("init_lora_weights")
    if initial not in _INITIAL:
        raise ModelError(
            f"{where}: init_lora_weights is {shorten(initial)}, which may have changed the base's weights; save the "
            "adapter with PEFT's path_initial_model_for_weight_conversion"
        )


def _check_ends(weights: CheckpointReader, reader: ModelReader, folder: Path) -> None:
    """Raise ModelError if an adapter changes the embedding or the output head."""
    ends = {reader.family.embedding: "embedding", reader.family.head: "output head"}
    for name in weights.names:
        module = _END.sub("", name.removeprefix("base_model.model."))
        own = reader.own_name(f"{module}.weight").removesuffix(".weight")
        if own in ends:
            raise ModelError(f"{folder} changes {own}, but adapters of the {ends[own]} are not supported; {_MERGE}")


def _pairs(weights: CheckpointReader) -> dict[str, dict[str, str]]:
    """Return the tensor names of each module's A and B, keyed by the module's name in PEFT, then by "A" and "B"."""
    (file,) = weights.files
    pairs: dict[str, dict[str, str]] = {}
    strange = [name for name in weights.names if _TENSOR.fullmatch(name) is None]
    if strange:
        raise ModelError(
            f"{file} holds {_some(strange)}; only linears of decoder layers are supported, and their tensors must be "
            f"named base_model.model.<linear>.lora_A.weight and lora_B.weight; {_MERGE}"
        )
    for name in weights.names:
        module, kind = _TENSOR.findall(name)[0]
        pairs.setdefault(module, {})[kind] = name
    single = [module for module, pair in pairs.items() if len(pair) == 1]
    if single:
        raise CheckpointError(f"{file}: lora_A or lora_B of {_some(single)} is missing; download the file again")
    if not pairs:
        raise ModelError(f"{file} holds no tensors; save the adapter again")
    return pairs


def _own_names(modules: Iterable[str], reader: ModelReader, folder: Path) -> dict[str, str]:
    """Return the names of the adapted modules in the base model, keyed by their names in PEFT."""
    names = {module: reader.own_name(f"{module}.weight").removesuffix(".weight") for module in modules}
    missing = [module for module, name in names.items() if f"{name}.weight" not in reader]
    if missing:
        raise ModelError(
            f"{folder} is for a different base model: {reader.path} does not have {_some(missing)} "
            f"({len(missing)} of the adapter's {len(names)} linears); give the base that the adapter was trained on"
        )
    if len(set(names.values())) < len(names):
        raise ModelError(f"{folder} has two updates for the same linear, under two names; save the adapter again")
    return names


def _scale(config: Mapping[str, Any], module: str, folder: Path, budget: Budget) -> tuple[int, float]:
    """Return the rank of a module's update, and the factor on the product B A."""
    rank = _of_module(config, "rank_pattern", "r", module, folder, budget)
    alpha = _of_module(config, "alpha_pattern", "lora_alpha", module, folder, budget)
    if rank < 1 or rank != int(rank):
        raise ModelError(
            f"{folder / ADAPTER_CONFIG}: the rank of {module} is {rank}, not a whole number above 0; correct r or "
            "rank_pattern"
        )
    return int(rank), alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_module(
    config: Mapping[str, Any], patterns: str, default: str, module: str, folder: Path, budget: Budget
) -> float:
    """Return a setting of one module, e.g. its rank.

    Args:
        config: contents of adapter_config.json.
        patterns: entry that maps patterns of module names to numbers; the first match applies, as in PEFT.
        default: entry with the number for all other modules.
        module: name of the module in PEFT.
        folder: folder of the adapter, for messages.
        budget: limit on the time for matching patterns.
    """
    where, table = folder / ADAPTER_CONFIG, config.get(patterns) or {}
    if not isinstance(table, dict):
        raise ModelError(f"{where}: {patterns} is {shorten(table)}, not an object; save the adapter again")
    value, key = config.get(default), default
    try:
        for pattern, number in table.items():
            if matches(rf"re:(.*\.)?({pattern})", module, budget):
                value, key = number, f"{patterns}[{pattern!r}]"
                break
    except SchemeError as error:
        raise ModelError(f"{where}: {patterns}: {error}") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(f"{where}: {shorten(key)} is {shorten(value)}, not a number; save the adapter again")
    return value


def _check_shapes(
    name: str, a: tuple[int, ...], b: tuple[int, ...], rank: int, reader: ModelReader, folder: Path
) -> None:
    """Raise ModelError if the shapes of A and B do not fit the base's weight and the rank in the config."""
    shape = reader.info(f"{name}.weight").shape
    if len(shape) != 2:
        raise ModelError(
            f"{folder} changes {name}, whose weight has shape {shape}, but only linears can be changed; {_MERGE}"
        )
    expected = ((rank, shape[1]), (shape[0], rank))
    if (a, b) == expected:
        return
    shapes = f"{name} has lora_A {a} and lora_B {b}, expected {expected[0]} and {expected[1]} for rank {rank}"
    if len(a) == len(b) == 2 and (a[1], b[0]) == (shape[1], shape[0]):  # the base is right
        raise ModelError(
            f"{folder / ADAPTER_CONFIG} does not fit the adapter's weights: {shapes}; correct r or rank_pattern, or "
            "copy the adapter again"
        )
    raise ModelError(f"{folder} does not fit {reader.path}: {shapes}; give the base that the adapter was trained on")


def _read(weights: CheckpointReader, name: str) -> Tensor:
    """Return a tensor of the adapter; its values must be finite floats."""
    info = weights.info(name)
    if info.kind not in _FLOATS:
        raise CheckpointError(f"{info.file}: {name} has dtype {info.kind}, not {', '.join(_FLOATS)}; save it as floats")
    value = weights.tensor(name)
    if not bool(torch.isfinite(value).all()):
        raise CheckpointError(f"{info.file}: {name} has NaN or infinite values; train or download the adapter again")
    return value


def _some(names: list[str]) -> str:
    """Return a text with the first names of a list and the number of further names."""
    others = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(shorten(name, 100) for name in names[:_SHOWN]) + others
