"""Loading of a model to run it: config, tensor shapes and memory are checked before the first weight is read.

Weights are converted layer by layer, so memory never holds two copies of the model.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import embedding

from quantkit.checkpoints.adapter import merged, read_adapter
from quantkit.checkpoints.dense_source import open_dense
from quantkit.checkpoints.kv_cache_entries import CONFIG_KEY
from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import CheckpointError, InputError, ModelError, SchemeError
from quantkit.formats import is_gguf, recognise
from quantkit.formats.base import Format
from quantkit.kernels.cpu.linear import NativeLinear
from quantkit.kernels.reference.ops import DenseLinear
from quantkit.kernels.types import Linear
from quantkit.machine.devices import entered, fast_cpu_dtype
from quantkit.machine.memory import release_freed_memory
from quantkit.models.config import ConfigReader, NotNative
from quantkit.models.families import find_language_model
from quantkit.models.family import Family
from quantkit.numerics.affine import WeightGrid, round_to_nearest
from quantkit.numerics.dtype import find_dtype
from quantkit.numerics.scheme import Scheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor
from quantkit.quantities import dtype_name
from quantkit.runtime.config import DTYPES_BY_SHORT_NAME, HEAD_TYPES
from quantkit.runtime.model.adapters import Adapters
from quantkit.runtime.model.cache_schemes import read_stored_cache
from quantkit.runtime.model.compressed_attention import build_head, build_streamed_block
from quantkit.runtime.model.config import DTYPES, ModelConfig, read_config
from quantkit.runtime.model.expected_tensors import check_memory, check_tensors
from quantkit.runtime.model.layers import Block
from quantkit.runtime.model.model import Model, NativeModel
from quantkit.runtime.model.mtp import build_draft_head, find_draft_head
from quantkit.runtime.model.residual_streams import StreamedBlock
from quantkit.runtime.model.weights import Weights, build_block
from quantkit.safety.untrusted import read_object

_LOG = logging.getLogger(__name__)

Backend = Literal["auto", "native", "transformers"]

_RECURRENT = "the recurrent layers run in plain torch, and the prefix cache is off for this model"
_UNQUANTIZED_CACHE = (
    "the checkpoint asks for a quantized KV cache, but transformers runs this model and keeps keys and values "
    "unquantized"
)
_TEXT_ALONE = "only the language model is loaded, for text prompts; image and other encoders are left out"


def load_model(
    path: Path | str,
    *,
    dtype: str | torch.dtype = "auto",
    device: torch.device | str = "cpu",
    head_dtype: str | None = None,
    backend: Backend = "auto",
    adapters: Mapping[str, Path] = MappingProxyType({}),
    merge: Path | str | None = None,
    mtp: bool = False,
) -> Model:
    """Load a model for running.

    Args:
        path: directory with config.json and safetensors, or a GGUF file.
        dtype: dtype of the computation: float32, bfloat16 or float16 (short: fp32, bf16, fp16). auto = the checkpoint's
            dtype, except on a CPU that computes slowly in this dtype.
        device: target device.
        head_dtype: int8 or int4 quantizes the output head at load; None leaves it unchanged.
        backend: native = quantkit's own layers; transformers = any causal language model of transformers; auto = native
            if quantkit's layers support the model, otherwise transformers.
        adapters: folders of adapters that requests can choose, keyed by name.
        merge: folder of an adapter to merge into the weights, which must not be quantized; None = none.
        mtp: whether to load the model's MTP head, which drafts tokens; only for quantkit's own layers.
    Raises:
        ModelError, CheckpointError: the directory holds no model, or an inconsistent one.
        ResourceError: the model does not fit in memory.
        InputError: the dtype, the backend or `head_dtype` is unknown, or the model cannot have this `head_dtype` or
            adapters.
    """
    reader = CheckpointReader(Path(path))
    device = torch.device(device)
    if backend not in ("auto", "native", "transformers"):
        raise InputError(f"unknown backend {backend!r}; use auto, native or transformers")
    if head_dtype is not None and head_dtype not in HEAD_TYPES:
        raise InputError(f"unknown head_dtype {head_dtype!r}; use int8 or int4, or leave it out")
    if backend != "transformers":
        try:
            config = read_model_config(reader)
            if merge is not None:
                reader = _merged(reader.path, merge, config.family)
            with entered(device):
                return load_native(
                    reader, config, dtype=dtype, device=device, head_dtype=head_dtype, adapters=adapters, mtp=mtp
                )
        except NotNative:
            if backend == "native":
                raise
    _check_transformers(reader, head_dtype, [*adapters, *([] if merge is None else [str(merge)])])
    # Imported late: native models do not need transformers.
    from quantkit.runtime.model.hf_model import load_with_transformers

    chosen, notes = pick_dtype(dtype, reader, device)
    if CONFIG_KEY in reader.config:
        notes = (*notes, _UNQUANTIZED_CACHE)
    return load_with_transformers(reader, dtype=chosen, device=device, eos_ids=read_eos(reader), notes=notes)


def _read_adapters(path: Path, folders: Mapping[str, Path], family: Family) -> Adapters:
    """Read adapters, and refuse one that was merged into the checkpoint: it would be applied twice."""
    from quantkit.inspection import refuse_merged  # imports the gguf package

    dense = ModelReader.of(open_dense(path), family)
    loaded = Adapters({n: read_adapter(f, dense) for n, f in folders.items()})
    for name, adapter in loaded.by_name.items():
        refuse_merged(path, adapter.digest, name)
        for text in adapter.warnings:
            _warn_once(text)
    return loaded


@cache  # `verify` loads several models
def _warn_once(text: str) -> None:
    _LOG.warning("warning: %s", text)


def _merged(path: Path, adapter: Path | str, family: Family) -> CheckpointReader:
    """Return a reader of an unquantized model with an adapter merged."""
    dense = open_dense(path)  # knows which weights are quantized; merging refuses these
    return merged(dense, read_adapter(adapter, ModelReader.of(dense, family)), family)


def _check_transformers(reader: CheckpointReader, head_dtype: str | None, adapters: Sequence[str]) -> None:
    """Refuse GGUF files, `head_dtype` and adapters, which quantkit does not support if transformers runs the model."""
    if is_gguf(reader.path):
        raise ModelError(
            f"{reader.path}: quantkit does not run GGUF files through transformers; run `quantkit convert --to dense` "
            "first"
        )
    if head_dtype is not None:
        raise InputError(
            f"head_dtype is {head_dtype!r}, but transformers runs this model and keeps its head unchanged; leave "
            "head_dtype out"
        )
    if adapters:
        raise InputError(
            f"transformers runs this model, but quantkit can apply adapters ({', '.join(adapters)}) only in its own "
            "layers; merge the adapter with `quantkit quantize --adapter`, or leave --adapter out"
        )


def load_native(
    reader: CheckpointReader,
    config: ModelConfig,
    *,
    dtype: str | torch.dtype,
    device: torch.device,
    head_dtype: str | None = None,
    adapters: Mapping[str, Path] = MappingProxyType({}),
    mtp: bool = False,
) -> NativeModel:
    """Build a model from its config and checkpoint.

    Args:
        reader: reader of the checkpoint.
        config: config of the model.
        dtype, device, head_dtype, adapters, mtp: see `load_model`.
    Raises:
        NotNative: the runtime cannot decode the format of the quantized linears.
        ModelError, CheckpointError, ResourceError: see `load_model`.
        RequestError: `mtp` is true, but the checkpoint has no MTP head.
    """
    loaded = _read_adapters(reader.path, adapters, config.family) if adapters else Adapters()
    reader = ModelReader.of(reader, config.family)
    format_, scheme = find_format(reader)
    drafting = find_draft_head(config, reader) if mtp else None
    check_tensors(config, reader, scheme, drafting)
    stored_cache = read_stored_cache(reader, config)
    chosen, notes = pick_dtype(dtype, reader, device)
    check_memory(reader, chosen, device)
    weights = Weights(
        reader=reader, config=config, format=format_, scheme=scheme, dtype=chosen, device=device, adapters=loaded
    )
    weights.rounds_inputs = dtype == "auto" and chosen != _stored_dtype(reader)
    table, parts = build_parts(weights)
    loaded.check_applied()
    parts["embedding"], parts["head"] = _build_ends(weights, table, head_dtype)
    del table
    if drafting is not None:
        parts["mtp"] = build_draft_head(weights, drafting, parts["ropes"])
    release_freed_memory()
    facts = [stored_cache.note] if stored_cache.note else []
    facts += [_RECURRENT] * config.is_recurrent + [_TEXT_ALONE] * ConfigReader(reader.config).is_wrapped
    return NativeModel(
        config=config,
        vocab_size=config.vocab_size,
        max_length=config.max_length,
        **parts,
        num_bytes=weights.num_bytes + loaded.num_bytes,
        stored_bytes=weights.stored_bytes,
        eos_ids=read_eos(reader),
        dtype=chosen,
        device=device,
        notes=(*notes, *reader.notes, *weights.notes, *facts, *loaded.notes),
        adapters=loaded,
        stored_cache=stored_cache,
    )


def build_parts(weights: Weights) -> tuple[Tensor, dict[str, Any]]:
    """Return the embedding table (V, H), and the parts of a `NativeModel` from there to the head, keyed by field."""
    config = weights.config
    # Each distinct rotary embedding once, in order: layers with equal embeddings share a table of angles.
    ropes = list(dict.fromkeys(filter(None, config.ropes)))
    name = f"{config.family.embedding}.weight"
    # In its stored dtype: converting the few rows of a step is cheaper than keeping a second table.
    table = weights.tensor(name, weights.reader.info(name).dtype)
    blocks: list[Block | StreamedBlock] = []
    build = build_block if config.family.block is None else build_streamed_block
    for index in range(config.num_layers):
        blocks.append(build(weights, index, ropes))
        # After each layer, because the C library would otherwise keep the memory that reading a layer frees.
        release_freed_memory()
    streams = None if config.family.block is None else build_head(weights)
    norm = weights.norm(config.family.final_norm)
    return table, {"blocks": blocks, "streams": streams, "ropes": ropes, "final_norm": norm}


def read_headers(reader: CheckpointReader) -> tuple[ModelConfig, Format | None, Scheme | None]:
    """Return config, format and scheme of a checkpoint that quantkit's own layers can run.

    Raises:
        NotNative: quantkit's own layers do not support the model or its format.
        ModelError: the checkpoint is not a model.
    """
    return (read_model_config(reader), *find_format(reader))


def read_model_config(reader: CheckpointReader) -> ModelConfig:
    """Read the config of the checkpoint's model, or of its language model.

    Raises:
        NotNative: quantkit's own layers do not support the model.
        ModelError: the checkpoint is not a model.
    """
    family, config = find_language_model(reader.config)
    if config is not reader.config and f"{family.embedding}.weight" not in reader:
        raise NotNative(
            f"a checkpoint of {reader.config['architectures'][0]} whose tensors are not named {family.backbone}.*"
        )
    return read_config(config, family)


def find_format(reader: CheckpointReader) -> tuple[Format | None, Scheme | None]:
    """Return format and scheme of a checkpoint's quantized linears; (None, None) if no linear is quantized.

    Raises:
        NotNative: the runtime cannot decode the format.
    """
    try:
        format_, scheme = recognise(reader.config, "config.json") or (None, None)
    except (SchemeError, CheckpointError) as error:
        raise NotNative(f"quantization of this kind ({error})") from error
    if format_ is not None and format_.is_stacked:
        raise NotNative(f"quantization of this kind ({format_.name}, with stacked experts)")
    # DeepSeek-V4 was published in this form, with two codes per byte in experts. `Weights` cannot read such names.
    scales = (name.removesuffix("scale") for name in reader.names if name.endswith(".scale"))
    if format_ is not None and any(f"{module}weight" in reader for module in scales):
        raise NotNative(f"quantization of this kind ({format_.name}, with scales under unusual names)")
    return format_, scheme


def pick_dtype(
    asked: str | torch.dtype, reader: CheckpointReader, device: torch.device
) -> tuple[torch.dtype, tuple[str, ...]]:
    """Return the dtype of the computation, and notes for users if it differs from the checkpoint's.

    Raises:
        InputError: the dtype is unknown.
    """
    if isinstance(asked, torch.dtype) or asked != "auto":
        name = dtype_name(asked)
        if (name := DTYPES_BY_SHORT_NAME.get(name, name)) not in DTYPES:
            raise InputError(f"unknown dtype {str(asked)!r}; use auto, {', '.join(DTYPES)}")
        return DTYPES[name], ()
    stored, fast = _stored_dtype(reader), fast_cpu_dtype()
    if device.type != "cpu" or stored in (torch.float32, fast):
        return stored, ()
    old, new = (dtype_name(item) for item in (stored, fast))
    return fast, (f"computed in {new}, because this CPU is slow in the checkpoint's {old}; set dtype to change this",)


def read_eos(reader: CheckpointReader) -> tuple[int, ...]:
    """Return the tokens that end a sequence, from generation_config.json or else config.json.

    Raises:
        ModelError: the values are not token ids.
    """
    path = reader.path / "generation_config.json"
    stated = read_object(path, ModelError, "delete it or copy it again") if path.is_file() else {}
    value = stated.get("eos_token_id")
    value = ConfigReader(reader.config).get("eos_token_id") if value is None else value
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        raise ModelError(f"{reader.path}: eos_token_id is {value!r}, not a token id or a list of token ids; correct it")
    return tuple(ids)


def _stored_dtype(reader: CheckpointReader) -> torch.dtype:
    """Return the dtype in config.json, or else the most common float dtype by bytes."""
    named = dtype_name(ConfigReader(reader.config).get("dtype"))
    if named in DTYPES:
        return DTYPES[named]
    totals = dict.fromkeys(DTYPES.values(), 0)
    for name in reader.names:
        info = reader.info(name)
        if info.dtype in totals:
            totals[info.dtype] += info.num_bytes
    return max(totals, key=lambda dtype: totals[dtype])


def _build_ends(weights: Weights, table: Tensor, head_dtype: str | None) -> tuple[Callable[[Tensor], Tensor], Linear]:
    """Return a function that looks up rows of the embedding table (V, H), and the output head."""
    head = _build_head(weights, table, head_dtype)
    if weights.config.tied and head_dtype is None and isinstance(head, NativeLinear) and head.is_dense:
        # Rows are looked up in the head's panels, so that memory does not hold the table twice.
        weights.num_bytes -= table.nbytes
        return head.rows, head
    return partial(embedding, weight=table), head


def _build_head(weights: Weights, table: Tensor, head_dtype: str | None) -> Linear:
    """Build the output head, quantized if requested; a tied, unquantized head shares the embedding."""
    config, name = weights.config, weights.config.family.head
    if head_dtype is None and not config.tied:
        return weights.linear([name])
    stored = f"{config.family.embedding if config.tied else name}.weight"
    reader = weights.reader
    if head_dtype is None and isinstance(reader, ModelReader) and reader.stored_scheme(stored) is not None:
        # The embedding of a GGUF file: the head multiplies by its codes; rows are looked up in the dequantized table.
        head = weights.build(reader.codes(stored), None)
        weights.count(head.stored_bytes)
        return head
    if not config.tied and stored not in reader:
        raise InputError(f"head_dtype {head_dtype!r}: the file already stores the head quantized; leave head_dtype out")
    weight = table if config.tied else reader.tensor(stored).to(weights.device)
    biases = weights.biases([name], [weight])
    rounded: Tensor | QuantizedTensor = weight
    if head_dtype is not None:
        rounded = round_to_nearest(weight, WeightGrid(head_scheme(head_dtype, weight.shape[1]), weight.dtype))
    head = weights.build(rounded, None if biases is None else biases[0])
    # In any other layout or dtype, the head is a converted copy and needs additional memory.
    is_shared = head_dtype is None and isinstance(head, DenseLinear) and table.dtype == weights.dtype
    weights.num_bytes += 0 if is_shared else head.stored_bytes
    weights.stored_bytes += head.stored_bytes
    return head


def head_scheme(dtype: str, width: int) -> WeightScheme:
    """Return the quantization scheme for an output head with `width` input features; `dtype` is int8 or int4."""
    # The widest group that divides the width has the fewest scales; if none does, each output has a single scale.
    group = None if dtype == "int8" else next((size for size in (128, 64, 32) if width % size == 0), None)
    return WeightScheme(dtype=find_dtype(dtype), group_size=group)
