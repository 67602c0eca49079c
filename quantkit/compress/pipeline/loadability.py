"""Check whether transformers can load the result: before the run, from the plan, and after it, from the checkpoint.

For models without a family file, linears that transformers could not load in quantized form stay unquantized, and a
note gives the loader's reason. (`finish.audit_checkpoint` compares a finished checkpoint with the plan.)
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoints.kv_cache_entries import is_cache_scale
from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.mtp_heads import find_heads
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.recipe.assignment import Assigned
from quantkit.compress.recipe.linears import LayerLinears, Schemes
from quantkit.errors import GateFailure, ModelError
from quantkit.formats.base import Format
from quantkit.huggingface.load_rules import CannotLoad, HfLoader, Problems, Stored
from quantkit.models.linear_sets import find_expert
from quantkit.numerics.affine import WeightGrid, round_to_nearest
from quantkit.numerics.scheme import LinearScheme

_NOT_CHECKED = "could not check whether transformers loads the result"
_SAMPLE = 128  # minimum number of rows and columns of a sample


def keep_loadable(
    reader: ModelReader,
    format_: Format,
    layers: Sequence[LayerLinears],
    ignored: Callable[[Sequence[Schemes]], Sequence[str]],
    assigned: Sequence[Schemes],
) -> Assigned:
    """Keep the schemes of the linears that transformers could load in quantized form, and return notes about the
    others.

    Args:
        reader: reader of the source. Its `write_converted` is called for tensors that must be written in the form in
            which the model uses them, not in the form of the source's files.
        format_: format of the checkpoint.
        layers: layers of the model.
        ignored: function from the schemes of all layers to the full names of the linears without a scheme.
        assigned: schemes of each layer.
    Raises:
        ModelError: no quantized linear is left, or transformers could not load the unquantized tensors beside the
            codes.
    """
    parts = list(zip(layers, assigned, strict=True))
    asked = [(part, of) for part, of in parts if not part.is_head]  # transformers leaves MTP heads out
    linears = {f"{part.name}.{name}": scheme for part, of in asked for name, scheme in of.items() if scheme}
    left, others = dict(linears), ignored(assigned)
    refused: dict[str, str] = {}  # reasons, keyed by linear
    notes, dequantize = [], False
    # Leaving linears unquantized changes how the others are loaded, so ask again until transformers can load the rest.
    while left:
        try:
            problems, dequantize = _ask(reader, format_, left, [*others, *refused], dequantize)
        except CannotLoad as error:
            refused |= dict.fromkeys(left, str(error))
            break
        except ModelError as error:
            notes.append(f"{_NOT_CHECKED}: {error}")
            break
        written, bad = reader.write_converted(problems.sources), _with_siblings(problems.modules, left)
        refused |= bad
        left = {name: scheme for name, scheme in left.items() if name not in bad}
        if not bad and not written:
            for name, why in problems.unconverted.items():
                raise ModelError(
                    f"{reader.path}: transformers could not load a checkpoint that leaves {name} unquantized beside "
                    f"quantized linears ({why}); use recipe fp8-dynamic, or set format=dense"
                )
            break
    if refused:
        name, why = next(iter(refused.items()))
        if len(refused) == len(linears):
            raise ModelError(
                f"{reader.path}: transformers could not load any linear of the model as {format_.name}, e.g. {name} "
                f"({why}); set format=dense"
            )
        notes.append(
            f"{len(refused)} linears such as {name} stay unquantized, because transformers could not load them as "
            f"{format_.name} ({why})"
        )
    kept = [{name: s if f"{part.name}.{name}" not in refused else None for name, s in of.items()} for part, of in parts]
    return Assigned(kept, tuple(notes), dequantize)


def _ask(
    reader: ModelReader, format_: Format, linears: Mapping[str, LinearScheme], ignored: Sequence[str], dequantize: bool
) -> tuple[Problems, bool]:
    """Find the problems that transformers would have with the planned checkpoint. Also return whether transformers must
    dequantize all weights when it loads them.
    """

    def open_loader() -> HfLoader:
        config = format_.config(linears, ignored, decode_at_load=dequantize)
        return HfLoader(reader, config.get("quantization_config") or {})

    loader = open_loader()
    if loader.touches_weights and format_.decode_key and not dequantize:
        dequantize = True
        loader = open_loader()
    codes = {name: _encoded(format_, scheme)[0] for name, scheme in linears.items()}
    if apart := [name for name, leaves in codes.items() if not _together(reader, name, leaves)]:
        why = "the source stores the weight under an unusual name"
        return Problems(modules=dict.fromkeys(apart, why)), dequantize
    owners = {reader.stored_name(f"{name}.{leaf}"): name for name, leaves in codes.items() for leaf in leaves}
    tensors = {stored: Stored(module=name, kind=str(linears[name])) for stored, name in owners.items()}
    others = reader.written_shapes({f"{name}.weight" for name in linears})
    tensors |= {name: Stored(shape=shape) for name, shape in others.items()}

    def sample(name: str) -> Tensor:
        if name in owners:
            return codes[owners[name]][name.rpartition(".")[2]]
        return torch.ones(others[name])

    def decoded(module: str) -> tuple[str, Tensor]:
        return reader.stored_name(f"{module}.weight"), _encoded(format_, linears[module])[1]

    return loader.check(tensors, sample, decoded), dequantize


def _together(reader: ModelReader, module: str, leaves: Iterable[str]) -> bool:
    """Whether the files store all codes of a linear under one module and under their usual names, as loaders expect."""
    names = {tuple(reader.stored_name(f"{module}.{leaf}").rsplit(".", 1)) for leaf in leaves}
    return len({owner for owner, *_ in names}) == 1 and {name[-1] for name in names} == set(leaves)


def _with_siblings(bad: Mapping[str, str], linears: Mapping[str, LinearScheme]) -> dict[str, str]:
    """Return `bad` (the reason for each bad linear), extended by all experts of the affected mixtures, because
    transformers has one module for all experts of a mixture.
    """
    mixtures = {mixture: why for name, why in bad.items() if (mixture := _mixture(name)) is not None}
    return {name: why for name in linears if (why := bad.get(name) or mixtures.get(_mixture(name) or ""))}


def _mixture(name: str) -> str | None:
    location = find_expert(name)
    return None if location is None else location.container


@cache
def _encoded(format_: Format, scheme: LinearScheme) -> tuple[dict[str, Tensor], Tensor]:
    """Return a small random linear in stored form, and its dequantized values."""
    weight = scheme.weight
    size = max(_SAMPLE, weight.group_size or 0, weight.block_rows or 0)
    values = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    quantized = round_to_nearest(values, WeightGrid(weight, format_.scale_dtypes[0]))
    if scheme.activation is not None and scheme.activation.is_calibrated:
        quantized = replace(quantized, input_scale=torch.ones(1))
    return format_.encode(quantized, scheme), quantized.dequantize()


def check_loads(
    folder: Path, source: ModelReader, format_: Format, linears: Mapping[str, LinearScheme], *, experts: bool = True
) -> str:
    """Check that transformers loads a finished checkpoint with the right names, shapes and, for some tensors, values.

    Args:
        folder: the checkpoint.
        source: reader of the source, which knows the names in the files.
        format_: format of the checkpoint.
        linears: scheme of each quantized linear.
        experts: whether to check quantized experts; False if they are known not to load.
    Returns:
        Why the check was impossible, why transformers does not load the result, or which tensors transformers ignores;
        "" if there is nothing to say.
    Raises:
        GateFailure: transformers would load values other than those that were written.
    """
    try:
        # A format that stores values writes plain weights, as in the source.
        codes = linears if format_.keeps_codes else {}
        problems = _problems(CheckpointReader(folder), source, format_, codes)
    except CannotLoad as error:
        return f"transformers does not load the result: {error}"
    except ModelError as error:
        return f"{_NOT_CHECKED}: {error}"
    # KV cache scales are not weights: transformers ignores them and leaves keys and values unrounded, and engines find
    # them by name.
    scales = [name for name in problems.unexpected if is_cache_scale(name)]
    # transformers leaves MTP heads out, but knows only the layer numbers of heads in published models.
    heads = find_heads(source.config, source.names).prefixes
    problems.unexpected = [name for name in problems.unexpected if name not in scales and not name.startswith(heads)]
    if not experts:
        names = linears or [name.removesuffix(".weight") for name in source.names]  # empty: only the cache is quantized
        owners = {re.split(r"(?<=\.)\d+\.", mixture)[0] for name in names if (mixture := _mixture(name)) is not None}
        layers = (*owners, *map(source.stored_name, owners))
        # Compare only parts of the name: files may have other modules between a layer and its experts than the model.
        problems = problems.but(lambda name: name.startswith(layers) and "experts" in name.split("."))
    if problems.summary:
        raise GateFailure(
            f"{folder.name}: transformers would load a different model than was written: {problems.summary}; add these "
            "linears to ignore, or set format=dense"
        )
    return f"transformers ignores the scales of this model's KV cache, e.g. {scales[0]}" if scales else ""


def _problems(
    reader: CheckpointReader, source: ModelReader, format_: Format, linears: Mapping[str, LinearScheme]
) -> Problems:
    """Find the problems that transformers has with a finished checkpoint."""
    loader = HfLoader(reader, reader.config.get("quantization_config") or {})
    leaves = {scheme: tuple(_encoded(format_, scheme)[0]) for scheme in set(linears.values())} if linears else {}
    stored = {name: {leaf: source.stored_name(f"{name}.{leaf}") for leaf in leaves[s]} for name, s in linears.items()}
    owners = {tensor: name for name, tensors in stored.items() for tensor in tensors.values()}
    tensors = {
        name: Stored(module=owners[name], kind=str(linears[owners[name]])) if name in owners else Stored()
        for name in reader.names
    }
    tensors = {name: replace(item, shape=reader.info(name).shape) for name, item in tensors.items()}

    def decoded(module: str) -> tuple[str, Tensor]:
        read = {leaf: reader.tensor(name) for leaf, name in stored[module].items()}
        return source.stored_name(f"{module}.weight"), format_.decode(read, linears[module]).dequantize()

    return loader.check(tensors, reader.tensor, decoded)
