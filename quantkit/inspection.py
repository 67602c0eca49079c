"""Describe a checkpoint from the headers of its files. Weights are neither read nor checked, so even the largest model
takes about a second.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.checkpoints.adapter import ADAPTER_ENTRY
from quantkit.checkpoints.folder import CONFIG_NAME, read_config_file
from quantkit.checkpoints.header import TensorInfo
from quantkit.checkpoints.kv_cache_entries import CONFIG_KEY as CACHE_KEY
from quantkit.checkpoints.mtp_heads import find_heads
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.engine_rules import StoredLinear, StoredModel, judge_all
from quantkit.errors import CheckpointError, ModelError, ReportError
from quantkit.formats import is_gguf, recognise
from quantkit.formats.base import Format, by_module, stores_codes
from quantkit.formats.dense import FORMAT as DENSE
from quantkit.formats.ggml.gguf_file import GGUFTensor, read_gguf
from quantkit.formats.gguf import FORMAT as GGUF
from quantkit.models.families import find as find_family
from quantkit.numerics.scheme import LinearScheme, Scheme
from quantkit.output.staging import MANIFEST, MERGED
from quantkit.quantities import counted, dtype_name
from quantkit.results import (
    AdapterRecord,
    CheckpointDifference,
    CheckpointSummary,
    HeadsSummary,
    LayerRecord,
    ModuleSummary,
    TowerRecord,
)
from quantkit.safety.untrusted import parse_yaml, read_object

__all__ = ["compare", "inspect", "merged_digests", "merged_record", "read_manifest", "refuse_merged", "section"]

_COMPARED = ("architecture", "format", "num_parameters", "num_bytes", "bits_per_weight", "recipe")
_SHAPE = "weight_shape"
_OWN_ENTRIES = "quantkit."
_EXPERT = re.compile(r"\bexperts\b")

# Order of the table's rows by kind of module; all other kinds, the linears of a layer, have rank 1.
_RANKS = {"embedding": 0, "norms": 2, "head": 3}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Module:
    """Storage and number of parameters of one module of a checkpoint."""

    kind: str
    stored_as: str
    num_parameters: int
    num_bytes: int
    num_quantized: int = 0  # number of weights stored as codes
    quantized_bytes: int = 0  # bytes of codes, scales and zero points
    linear: StoredLinear | None = None  # facts for `engine_rules`


def inspect(path: str | Path) -> CheckpointSummary:
    """Summarize a checkpoint: number types and sizes by kind of module, recorded errors, and how engines read it.

    Args:
        path: directory of a quantized or unquantized checkpoint, or a GGUF file.
    Raises:
        ModelError: the path is not a model directory.
        CheckpointError: the checkpoint is damaged, or its format is not supported.
    """
    format_: Format = GGUF
    noted: dict[str, Any] = {}
    mtp: HeadsSummary | None = None
    made_by: dict[str, str] = {}
    held = StoredModel(format=GGUF.name)
    if is_gguf(Path(path)):
        file = read_gguf(Path(path))
        architecture = str(file.metadata.get("general.architecture", "unknown"))
        modules = [_gguf_module(name, info) for name, info in file.tensors.items()]
        held = replace(held, other_codes=any(module.num_quantized for module in modules))
        noted["recipe"], made_by = _made_by(file.metadata)
    else:
        reader = CheckpointReader(path)
        recognised = recognise(reader.config, str(reader.path / CONFIG_NAME))
        format_ = DENSE if recognised is None else recognised[0]
        names = reader.config.get("architectures")
        architecture = str(names[0]) if isinstance(names, list) and names else "unknown"
        named = {name: _module(reader, name, local, recognised) for name, local in by_module(reader.names).items()}
        modules, mtp = list(named.values()), _heads(reader, named)
        manifest = read_manifest(reader.path)
        noted, made_by = _noted(manifest), _distilled(manifest)
        held = _stored_model(reader.config, format_, modules)
    # `bits_per_weight` leaves out the embedding, which may be quantized in a GGUF file.
    linears = [module for module in modules if module.kind != "embedding"]
    weights, stored = sum(m.num_quantized for m in linears), sum(m.quantized_bytes for m in linears)
    return CheckpointSummary(
        path=str(path),
        architecture=architecture,
        format=format_.name,
        num_parameters=sum(m.num_parameters for m in modules),
        num_bytes=sum(m.num_bytes for m in modules),
        bits_per_weight=8 * stored / weights if weights else None,
        modules=tuple(_summaries(modules)),
        mtp=mtp,
        engines=tuple(judge_all(held)),
        made_by=made_by,
        **noted,
    )


def _made_by(metadata: Mapping[str, Any]) -> tuple[str | None, dict[str, str]]:
    """Return the recipe's name and the entries that quantkit wrote into a GGUF file; None and an empty dict for a file
    that another tool wrote.
    """
    entries = {
        key: f"{value:.6g}" if isinstance(value, float) else str(value)
        for key, value in metadata.items()
        if key.startswith(_OWN_ENTRIES) and isinstance(value, str | int | float)
    }
    recipe: Any = None
    with contextlib.suppress(CheckpointError):  # other tools may write anything into this entry
        recipe = parse_yaml(entries.get(f"{_OWN_ENTRIES}recipe", ""), "the recipe of a GGUF file", CheckpointError)
    name = recipe.get("name") if isinstance(recipe, dict) else None
    return name if isinstance(name, str) else None, entries


def _stored_model(config: Mapping[str, Any], format_: Format, modules: Iterable[_Module]) -> StoredModel:
    """Collect the facts about a checkpoint that `engine_rules` needs."""
    said = section(config, "quantization_config")
    calibrated, own = said.get("kv_cache_scheme"), config.get(CACHE_KEY)
    hidden = config.get("hidden_size")
    return StoredModel(
        format=format_.name,
        linears=tuple(dict.fromkeys(module.linear for module in modules if module.linear is not None)),
        cache="own" if own else "fp8" if calibrated else "",
        hidden_size=hidden if isinstance(hidden, int) else None,
        group_order=said.get("desc_act") is True,
        compressed_experts=_compressed_experts(config),
    )


def _compressed_experts(config: Mapping[str, Any]) -> bool:
    with contextlib.suppress(ModelError):
        return find_family(config).compressed_experts
    return True


def _module(
    reader: CheckpointReader, name: str, tensors: list[str], recognised: tuple[Format, Scheme] | None
) -> _Module:
    infos = {local: reader.info(f"{name}.{local}" if name else local) for local in tensors}
    num_bytes = sum(info.num_bytes for info in infos.values())
    linear = recognised[1].find(name) if recognised is not None and stores_codes(tensors) else None
    if recognised is None or linear is None:
        dtypes = sorted({dtype_name(info.dtype) for info in infos.values()})
        count = sum(math.prod(info.shape) for info in infos.values())
        return _Module(kind=_kind(name), stored_as=", ".join(dtypes), num_parameters=count, num_bytes=num_bytes)
    format_ = recognised[0]
    shape = _shape(reader, name, infos, linear, format_)
    codes = math.prod(shape) if shape else _num_codes(reader, name, infos, linear)
    # The bias, and tensors with the weight's shape and the order of its groups, do not count as bits of the weight.
    uncounted = sum(infos[local].num_bytes for local in {"bias", _SHAPE, format_.order_name} & infos.keys())
    return _Module(
        kind=_kind(name),
        stored_as=linear.describe(),
        num_parameters=codes + (math.prod(infos["bias"].shape) if "bias" in infos else 0),
        num_bytes=num_bytes,
        num_quantized=codes,
        quantized_bytes=num_bytes - uncounted,
        linear=StoredLinear(scheme=linear, shape=shape, expert=_EXPERT.search(name) is not None),
    )


def _heads(reader: CheckpointReader, modules: Mapping[str, _Module]) -> HeadsSummary | None:
    """Summarize how MTP heads are stored; None if the files have none."""
    stored = find_heads(reader.config, reader.names)
    members = [module for name, module in modules.items() if f"{name}.".startswith(stored.prefixes)]
    if not members:
        return None
    return HeadsSummary(
        num_heads=len(stored.heads),
        stored_as=tuple(sorted({module.stored_as for module in members})),
        num_parameters=sum(module.num_parameters for module in members),
        num_bytes=sum(module.num_bytes for module in members),
    )


def _shape(
    reader: CheckpointReader, name: str, infos: Mapping[str, TensorInfo], linear: LinearScheme, format_: Format
) -> tuple[int, int] | None:
    """Return the shape of a linear, (outputs, inputs); None if its tensors do not determine the shape."""
    if _SHAPE in infos:
        rows, columns = reader.tensor(f"{name}.{_SHAPE}").tolist()
        return rows, columns
    return format_.shape({local: info.shape for local, info in infos.items()}, linear)


def _num_codes(reader: CheckpointReader, name: str, infos: Mapping[str, TensorInfo], linear: LinearScheme) -> int:
    packed = next((info for local, info in infos.items() if local.endswith(("packed", "weight"))), None)
    if packed is None:
        raise CheckpointError(
            f"{reader.path}: {name} has scales but no codes; its tensors are {', '.join(infos)}; download or copy the "
            "checkpoint again"
        )
    return int(packed.num_bytes * 8 // linear.weight.dtype.bits)


def _gguf_module(name: str, info: GGUFTensor) -> _Module:
    count = math.prod(info.shape)
    return _Module(
        kind=_kind(name.rpartition(".")[0]),
        stored_as=info.block.name,
        num_parameters=count,
        num_bytes=info.num_bytes,
        num_quantized=count if info.is_quantized else 0,
        quantized_bytes=info.num_bytes if info.is_quantized else 0,
    )


def _summaries(modules: Iterable[_Module]) -> Iterable[ModuleSummary]:
    """Yield one row for all modules of the same kind and number type, ordered as embedding, linears, norms, head."""
    groups: dict[tuple[str, str], list[_Module]] = {}
    for module in modules:
        groups.setdefault((module.kind, module.stored_as), []).append(module)
    for (kind, stored_as), members in sorted(groups.items(), key=lambda item: _RANKS.get(item[0][0], 1)):
        yield ModuleSummary(
            kind=kind,
            stored_as=stored_as,
            count=len(members),
            num_parameters=sum(member.num_parameters for member in members),
            num_bytes=sum(member.num_bytes for member in members),
        )


def _kind(name: str) -> str:
    """Return the kind of a module: `embedding`, `norms`, `head`, or its name within a layer: `self_attn.q_proj`."""
    last = name.rpartition(".")[2]
    if last.endswith("norm") or last.startswith("ln_"):
        return "norms"
    if last in ("lm_head", "embed_out", "output"):
        return "head"
    if last.startswith("embed") or last in ("wte", "wpe", "token_embd", "position_embd"):
        return "embedding"
    return re.sub(r"^.*?\.\d+\.", "", name)


def read_manifest(folder: Path, name: str = MANIFEST) -> dict[str, Any]:
    """Return the contents of a JSON file that quantkit wrote into a checkpoint; an empty dict if there is no such file.

    Raises:
        CheckpointError: the file exists but is not valid.
    """
    path = folder / name
    if not path.exists():
        return {}
    return read_object(path, CheckpointError, "copy it again, or delete it to continue without its information")


def merged_digests(path: Path) -> tuple[str, ...]:
    """Return the digests of all adapters that were merged into a checkpoint, or into a model that it was made from.

    Args:
        path: directory of the checkpoint, or a GGUF file.
    Raises:
        CheckpointError: quantkit.json or the header is damaged.
    """
    if is_gguf(path):
        entry = read_gguf(path).metadata.get(ADAPTER_ENTRY)
        digests: Any = entry.split(",") if isinstance(entry, str) else []
    else:
        manifest = read_manifest(path)
        digests = manifest.get(MERGED, [section(manifest, "identity").get("adapter")])
    return tuple(digest for digest in digests if isinstance(digest, str)) if isinstance(digests, list) else ()


def merged_record(path: Path) -> AdapterRecord | None:
    """Return the record of the merged adapter in the quantkit.json of a checkpoint; None if it has none."""
    return None if is_gguf(path) else _noted(read_manifest(path)).get("adapter")


def refuse_merged(path: Path, digest: str, name: str) -> None:
    """Refuse an adapter that was merged into a checkpoint already, because it would be applied twice.

    Args:
        path: directory of the checkpoint, or a GGUF file.
        digest: digest of the adapter.
        name: name of the adapter, for the message.
    Raises:
        ModelError: the adapter was merged already.
    """
    if digest in merged_digests(path):
        raise ModelError(f"adapter {name!r} was merged into the weights of {path} already; leave --adapter out")


def _noted(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `CheckpointSummary` that a checkpoint's quantkit.json determines."""
    recipe, result = section(manifest, "recipe"), section(manifest, "result")
    layers, records = result.get("layers"), []
    for layer in layers if isinstance(layers, list) else []:
        with contextlib.suppress(ReportError):  # another version's manifest may lack fields
            records.append(LayerRecord.from_dict(layer))
    name = recipe.get("name") or result.get("recipe")
    noted: dict[str, Any] = {"recipe": name if isinstance(name, str) else None, "layers": tuple(records)}
    for key, kind in (("tower", TowerRecord), ("adapter", AdapterRecord)):
        with contextlib.suppress(ReportError):
            noted[key] = kind.from_dict(entry) if (entry := section(result, key)) else None
    return noted


def _distilled(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return how far `quantkit distill` lowered the KL, keyed by "distilled"; empty if that command did not run."""
    entry = section(manifest, "distilled")
    before, after, steps = (entry.get(name) for name in ("kl_before", "kl_after", "steps"))
    if not isinstance(before, float) or not isinstance(after, float) or not isinstance(steps, int):
        return {}
    return {"distilled": f"held-out KL {before:.4g} → {after:.4g}, {counted(steps, 'step')}"}


def section(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an entry of a JSON object if the entry is an object itself, otherwise an empty dict."""
    entry = data.get(name)
    return entry if isinstance(entry, dict) else {}


def compare(left: str | Path, right: str | Path) -> CheckpointDifference:
    """Compare two checkpoints by their headers: format, sizes, and how each kind of module is stored.

    Args:
        left, right: paths of the checkpoints, see `inspect`.
    Raises:
        ModelError, CheckpointError: see `inspect`.
    """
    summaries = inspect(left), inspect(right)
    facts = [(name, *(getattr(summary, name) for summary in summaries)) for name in _COMPARED]
    kinds: dict[str, tuple[list[str], list[str]]] = {}
    for side, summary in enumerate(summaries):
        for row in summary.modules:
            text = f"{row.count} x {row.stored_as} ({row.num_bytes} bytes)"
            kinds.setdefault(row.kind, ([], []))[side].append(text)
    modules = [(kind, ", ".join(a) or "none", ", ".join(b) or "none") for kind, (a, b) in kinds.items()]
    return CheckpointDifference(
        left=str(left),
        right=str(right),
        facts=tuple((name, str(a), str(b)) for name, a, b in facts if a != b),
        modules=tuple(row for row in modules if row[1] != row[2]),
        entries=tuple(_config_differences(Path(left), Path(right))),
    )


def _config_differences(left: Path, right: Path) -> Iterable[tuple[str, str, str]]:
    """Yield (key, left value, right value) for each entry of config.json, or of GGUF metadata, that differs.

    Nothing is yielded for a directory and a GGUF file, because their entries have different names.
    """
    if is_gguf(left) != is_gguf(right):
        return
    sides = [read_gguf(path).metadata if is_gguf(path) else read_config_file(path) for path in (left, right)]
    flat = [dict(_leaves(side)) for side in sides]
    for key in sorted(flat[0].keys() | flat[1].keys()):
        values = [_short(side[key]) if key in side else "absent" for side in flat]
        if flat[0].get(key) != flat[1].get(key) or values[0] != values[1]:
            yield key, values[0], values[1]


def _leaves(value: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
