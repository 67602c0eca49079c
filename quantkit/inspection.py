"""What is in a checkpoint, from its headers: no weight is read, so the largest model takes a second.

Not a check of its numbers: whether codes decode to the right values is the business of `formats` and of tests.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.reader import CheckpointReader
from quantkit.errors import CheckpointError
from quantkit.formats import REGISTRY as FORMATS
from quantkit.numerics.scheme import LinearScheme, Scheme
from quantkit.results import CheckpointSummary, LayerRecord, ModuleSummary

__all__ = ["inspect"]

MANIFEST = "quantkit.json"
DENSE = "dense"

# What a format stores beside the codes of a weight; `weight_shape` only describes and is not counted as weight bits.
_SHAPE = "weight_shape"
_BESIDE = re.compile(r"(weight|input|output)_(scale|zero_point|g_idx|shape)")

# Order of the rows; the linears of a layer are 1.
_RANKS = {"embedding": 0, "norms": 2, "head": 3}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Module:
    """One module with tensors of its own: how it is stored, how many parameters it has."""

    name: str
    stored_as: str
    num_parameters: int
    num_bytes: int
    num_quantized: int  # weights that are codes
    quantized_bytes: int  # of codes, scales and zero points


def inspect(path: str | Path) -> CheckpointSummary:
    """Number types and sizes of a checkpoint by kind of module, with the errors that quantkit noted when it wrote it.

    Args:
        path: directory of a checkpoint in any known format, or of an ordinary one.
    Raises:
        ModelError: not a model directory.
        CheckpointError: damaged, or quantized in a format that is not known.
    """
    reader = CheckpointReader(path)
    name, scheme = _recognise(reader)
    modules = [_module(reader, module, tensors, scheme) for module, tensors in _by_module(reader.names).items()]
    weights, stored = sum(m.num_quantized for m in modules), sum(m.quantized_bytes for m in modules)
    recipe, layers = _read_manifest(reader.path)
    return CheckpointSummary(
        path=str(path),
        architecture=next(iter(reader.config.get("architectures") or []), "unknown"),
        format=name,
        num_parameters=sum(m.num_parameters for m in modules),
        num_bytes=sum(m.num_bytes for m in modules),
        bits_per_weight=8 * stored / weights if weights else None,
        modules=tuple(_summaries(modules)),
        recipe=recipe,
        layers=layers,
    )


def _recognise(reader: CheckpointReader) -> tuple[str, Scheme | None]:
    """The format's name and the scheme that config.json describes."""
    for name, known in FORMATS.all().items():
        scheme: Scheme | None = known.recognise(reader.config)
        if name != DENSE and scheme is not None:
            return name, scheme
    described = reader.config.get("quantization_config")
    if described:
        method = described.get("quant_method") if isinstance(described, dict) else described
        raise CheckpointError(
            f"{reader.path}/config.json: quantization_config is of method {method!r}, which no known format reads; "
            f"known: {', '.join(FORMATS.names())}"
        )
    return DENSE, None


def _by_module(names: Iterable[str]) -> dict[str, list[str]]:
    """Local tensor names by full module name, in the order of the layers."""
    modules: dict[str, list[str]] = {}
    for name in sorted(names, key=_natural):
        module, _, local = name.rpartition(".")
        modules.setdefault(module, []).append(local)
    return modules


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts layer 10 behind layer 2."""
    return [(0, int(piece), "") if piece.isdigit() else (1, 0, piece) for piece in name.split(".")]


def _module(reader: CheckpointReader, name: str, tensors: list[str], scheme: Scheme | None) -> _Module:
    infos = {local: reader.info(f"{name}.{local}" if name else local) for local in tensors}
    num_bytes = sum(info.num_bytes for info in infos.values())
    linear = _linear_scheme(name, infos, scheme)
    if linear is None:
        dtypes = sorted({str(info.dtype).removeprefix("torch.") for info in infos.values()})
        count = sum(math.prod(info.shape) for info in infos.values())
        return _Module(
            name=name,
            stored_as=", ".join(dtypes),
            num_parameters=count,
            num_bytes=num_bytes,
            num_quantized=0,
            quantized_bytes=0,
        )
    codes = _num_codes(reader, name, infos, linear)
    extra = {local: info for local, info in infos.items() if local == "bias"}
    uncounted = sum(info.num_bytes for local, info in infos.items() if local in extra or local == _SHAPE)
    return _Module(
        name=name,
        stored_as=linear.describe(),
        num_parameters=codes + sum(math.prod(info.shape) for info in extra.values()),
        num_bytes=num_bytes,
        num_quantized=codes,
        quantized_bytes=num_bytes - uncounted,
    )


def _linear_scheme(name: str, tensors: Iterable[str], scheme: Scheme | None) -> LinearScheme | None:
    """The scheme of a module that has more beside its weight than a bias; None for the others."""
    if scheme is None or not any(_BESIDE.fullmatch(local) for local in tensors):
        return None
    return scheme.find(name)


def _num_codes(reader: CheckpointReader, name: str, infos: Mapping[str, Any], linear: LinearScheme) -> int:
    if _SHAPE in infos:
        return int(reader.tensor(f"{name}.{_SHAPE}").prod())
    if "weight" in infos:
        return math.prod(infos["weight"].shape)
    packed = next((info for local, info in infos.items() if local.endswith("packed")), None)
    if packed is None:
        raise CheckpointError(f"{reader.path}: {name} has scales but no codes; its tensors: {', '.join(infos)}")
    return int(packed.num_bytes * 8 // linear.weight.dtype.bits)


def _summaries(modules: Iterable[_Module]) -> list[ModuleSummary]:
    """Modules of one kind that are stored alike as one row: embedding, linears, norms, head."""
    groups: dict[tuple[str, str], list[_Module]] = {}
    for module in modules:
        groups.setdefault((_kind(module.name), module.stored_as), []).append(module)
    return [
        ModuleSummary(
            kind=kind,
            stored_as=stored_as,
            count=len(members),
            num_parameters=sum(member.num_parameters for member in members),
            num_bytes=sum(member.num_bytes for member in members),
        )
        for (kind, stored_as), members in sorted(groups.items(), key=lambda item: _RANKS.get(item[0][0], 1))
    ]


def _kind(name: str) -> str:
    """What a module is called whatever its layer: `self_attn.q_proj`, `embedding`, `norms`, `head`."""
    last = name.rpartition(".")[2]
    if last.endswith("norm") or last.startswith("ln_"):
        return "norms"
    if last in ("lm_head", "embed_out"):
        return "head"
    if last.startswith("embed") or last in ("wte", "wpe"):
        return "embedding"
    return re.sub(r"^.*?\.\d+\.", "", name)


def _read_manifest(folder: Path) -> tuple[str | None, tuple[LayerRecord, ...]]:
    """Recipe name and layer records from quantkit.json; what it lacks is left out.

    Raises:
        CheckpointError: the file is not JSON.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None, ()
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}); delete it to inspect without it") from None
    recipe, result = (_object(_object(manifest).get(key)) for key in ("recipe", "result"))
    return recipe.get("name") or result.get("recipe"), tuple(_records(result.get("layers")))


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _records(layers: Any) -> Iterable[LayerRecord]:
    """Records of the layers; the manifest leaves out what differs from run to run, and other versions may lack more."""
    for layer in layers if isinstance(layers, list) else []:
        try:
            yield LayerRecord.from_dict({"notes": [], "output_snr_db": None, "seconds": {}, "peak_bytes": 0, **layer})
        except (TypeError, KeyError, IndexError):
            continue
