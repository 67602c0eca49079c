"""What a model is going to use of the GPU kernels, each family on small shapes: with them, and in plain torch.

A check is the engine's own code on random numbers, run twice: on the device, and on the host without kernels. Which
there are follows from config.json and headers; `first_run` has them run where they never have.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.kernels import ops
from quantkit.kernels.gpu.choices import TILE_LIMIT
from quantkit.kernels.gpu.configs import pages_name
from quantkit.kernels.layouts import KVLayout
from quantkit.kernels.ops import experts, head, linear, sampling
from quantkit.kernels.reference.sampling import Draw
from quantkit.kernels.types import AttentionOptions, HeadNorms, Linear
from quantkit.models.config import NotNative
from quantkit.numerics.affine import WeightGrid, round_to_nearest
from quantkit.numerics.inputs import input_scale
from quantkit.numerics.scheme import LinearScheme
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.engine.batch_builder import BatchBuilder, ScheduledChunk
from quantkit.runtime.model import loader, manifest
from quantkit.runtime.model.cache_schemes import read_stored_cache
from quantkit.runtime.model.config import LayerConfig, ModelConfig, read_config
from quantkit.runtime.model.experts import Mixture
from quantkit.runtime.model.layers import MLP, RMSNorm, norm_for
from quantkit.runtime.model.model import config_layouts

TOLERANCE = 0.03
"""Of the largest number: what 16 bits round to is less, a tile or a page that was left out is more."""

_ROWS = (1, 20, TILE_LIMIT + 1)  # each way to multiply
_VOCABULARY = 2500
_WINDOW = 20

Outputs = Iterator[Tensor]


@dataclass(frozen=True, slots=True)
class Check:
    """One of them.

    Args:
        family: a key of `gpu.FAMILIES`.
        label: which of its kernels.
        run: computes on a device, out of random numbers.
    """

    family: str
    label: str
    run: Callable[[torch.device], Outputs]

    @property
    def key(self) -> str:
        """By which verdicts are kept."""
        return f"{self.family}: {self.label}"

    def error(self, device: torch.device) -> float:
        """Largest difference to plain torch on the host, by the largest number there; sets environment variables."""
        outputs = []
        for where, kernels in ((device, "1"), (torch.device("cpu"), "0")):
            os.environ["QUANTKIT_TRITON"], os.environ["QUANTKIT_NATIVE"] = kernels, "0"
            torch.manual_seed(0)
            outputs.append([output.float().cpu() for output in self.run(where)])
        errors = [(one - other).abs().max() / other.abs().max() for one, other in zip(*outputs, strict=True)]
        return torch.stack(errors).max().item()  # NaN where there is one


def checks_of(
    path: str, kv_cache: str | None, head_dtype: str | None, dtype: str, page_size: int, device: torch.device
) -> Iterator[Check]:
    """The checks of a model; several may have one key.

    Args:
        path: of its checkpoint; only headers are read.
        kv_cache, head_dtype, dtype, page_size: see `EngineConfig`.
        device: where it is going to run.
    """
    yield Check("sampling", "all kinds", _tokens)
    reader = CheckpointReader(Path(path))
    try:
        config, (_, scheme) = read_config(reader.config, loader.find_native(reader)), loader.find_format(reader)
    except NotNative:
        return
    computed, _ = loader.pick_dtype(dtype, reader, config, device)
    schemes = {
        name: scheme.find(name)
        for name, local in manifest.local_names(reader).items()
        if scheme is not None and manifest.is_quantized(name, local, scheme)
    }
    last = manifest.head_name(config.family, reader)
    if head_dtype is not None:
        schemes[last] = LinearScheme(weight=loader.head_scheme(head_dtype, config.hidden_size))

    def check(family: str, label: str, run: Callable[..., Outputs], *arguments: Any) -> Check:
        kind = f"{label}, {str(computed).removeprefix('torch.')}"
        return Check(family, kind, partial(run, config, computed, *arguments))

    yield check("ops", config.activation, _operations)
    yield check("head", _name(schemes.get(last)), _logits, schemes.get(last))
    if computed == torch.float32:
        return
    for kind in schemes.values():
        yield check("quantized_linear", _name(kind), _products, kind)
    layouts = config_layouts(config, read_stored_cache(reader, config), kv_cache, page_size, computed)
    for layout, layer in zip(layouts, config.layers, strict=True):
        group = config.num_heads // config.num_kv_heads
        label = pages_name(layout.scheme, layout.head_dim, page_size, group)
        yield check("attention", label + (", window" if layer.window else ""), _pages, layout, layer)
    if config.experts is not None:
        for kind in {kind for name, kind in schemes.items() if ".experts." in name} or {None}:
            yield check("experts", _name(kind), _experts, kind)


def _name(scheme: LinearScheme | None) -> str:
    return "unquantized" if scheme is None else scheme.describe()


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(device, dtype)


def _width(scheme: LinearScheme | None, least: int) -> int:
    """Inputs that whole groups fill."""
    group = (scheme and scheme.weight.group_size) or 128
    return group * -(-least // group)


def _linear(scheme: LinearScheme | None, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Linear:
    values = torch.randn(rows, width) * width**-0.5
    if scheme is None:
        return linear.build_linear(values.to(device, dtype), dtype=dtype, device=device)
    weight, activation = round_to_nearest(values, WeightGrid(scheme.weight, torch.bfloat16)), scheme.activation
    if activation is not None and activation.is_calibrated:
        weight = replace(weight, input_scale=input_scale(torch.tensor([4.0]), activation, torch.float32))
    return linear.build_linear(weight, activation=activation, dtype=dtype, device=device)


def _mlp(scheme: LinearScheme | None, width: int, activation: str, dtype: torch.dtype, device: torch.device) -> MLP:
    up, down = (_linear(scheme, rows, width, dtype, device) for rows in (2 * width, width))
    return MLP(up, down, activation, True)


def _tokens(device: torch.device) -> Outputs:
    logits, key = 3 * _random(device, torch.float32, 4, _VOCABULARY), 0x5851F42D4C957F2D
    draws = [None, Draw(key, 1.0, None, 1.0, 0.0), Draw(-key, 0.7, None, 0.9, 0.05), Draw(~key, 1.5, 40, 0.9, 0.0)]
    yield one_hot(sampling.choose(logits, draws), _VOCABULARY)


def _operations(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Outputs:
    x, residual, weight, gate_up = (_random(device, dtype, *shape) for shape in ((5, 640), (5, 640), (640,), (5, 1280)))
    yield from ops.rms_norm(x, weight, config.norm_eps, config.norm_offset, residual)
    query, key, turns = *(_random(device, dtype, 5, heads, 64) for heads in (4, 2)), torch.randn(5, 32).to(device)
    yield from ops.rotary_(query, key, turns.cos(), turns.sin())
    yield ops.gated(gate_up, config.activation)


def _logits(config: ModelConfig, dtype: torch.dtype, scheme: LinearScheme | None, device: torch.device) -> Outputs:
    width = _width(scheme, 512)
    built = _linear(scheme, _VOCABULARY, width, dtype, device)
    for rows in _ROWS[:2]:
        values, best = head.logits(built, _random(device, dtype, rows, width), softcap=config.logits_softcap)
        yield values
        yield values.gather(1, (values.argmax(-1) if best is None else best)[:, None])


def _products(config: ModelConfig, dtype: torch.dtype, scheme: LinearScheme, device: torch.device) -> Outputs:
    """Behind a norm and a gate, which quantize for products that want it."""
    width = _width(scheme, 512)
    mlp = _mlp(scheme, width, "silu", dtype, device)
    norm = norm_for(RMSNorm(torch.ones(width, dtype=dtype, device=device), 1e-6, 0.0), [mlp])
    assert norm is not None
    for rows in _ROWS:
        yield mlp(norm(_random(device, dtype, rows, width))[0])


def _pages(
    config: ModelConfig, dtype: torch.dtype, layout: KVLayout, layer: LayerConfig, device: torch.device
) -> Outputs:
    """Two sequences: prompts over several pages, tokens that end and begin one, chunks behind."""
    size, rope, norm = layout.page_size, layer.rope, config.family.qk_norm
    cache = KVCache([layout], 12, 2, device)
    builder = BatchBuilder(max_sequences=2, max_pages=6, page_size=size, device=device)
    norms = None
    if config.qk_norm and norm is not None and norm.over != "projection":
        query, key = _random(device, dtype, 2, layout.head_dim)
        norms = HeadNorms(query=query, key=key, eps=config.norm_eps, offset=config.norm_offset)
    options = AttentionOptions(
        scale=config.attention_scale,
        window=layer.window and _WINDOW,
        softcap=config.attention_softcap,
        interleaved=rope is not None and rope.interleaved,
        norms=norms,
    )
    holders: Any = [SimpleNamespace(id=i, row=i, pages=[*range(i, 12, 2)], num_table_entries=0) for i in range(2)]
    for start, stop in itertools.pairwise((0, 5 * size - 1, 5 * size, 5 * size + 1, 5 * size + 6)):
        batch = builder.build([ScheduledChunk(holder, [0] * (stop - start), start, 1) for holder in holders])
        tokens, counts = 2 * (stop - start), (config.num_heads, layout.num_heads, layout.num_heads)
        states = [_random(device, dtype, tokens, count, layout.head_dim) for count in counts]
        turns = None if rope is None else _random(device, torch.float32, tokens, rope.width // 2)
        yield cache.attend(0, *states, batch, options, None if turns is None else (turns.cos(), turns.sin()))


def _experts(config: ModelConfig, dtype: torch.dtype, scheme: LinearScheme | None, device: torch.device) -> Outputs:
    assert config.experts is not None
    width, picks, normalize = _width(scheme, 256), config.experts.num_chosen, config.experts.normalize
    each = tuple(_mlp(scheme, width, config.activation, dtype, device) for _ in range(max(8, picks)))
    kinds: dict[str, Any] = {"num_chosen": picks, "normalize": normalize}
    stacked: Any = ""
    if experts.can_stack(device, dtype):
        pairs = ((one.up, one.down) for one in each)
        stacked = experts.stack(pairs, count=len(each), activation=config.activation, **kinds)
    scores: Any = _random(device, dtype, 20, len(each))
    chosen = each if isinstance(stacked, str) else stacked
    mixture = Mixture(router=lambda x: scores[: len(x)], experts=chosen, shared=None, shared_gate=None, **kinds)
    for rows in (3, 20):
        yield mixture(_random(device, dtype, rows, width))
