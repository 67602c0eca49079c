"""What a model is going to use of the GPU kernels, each family on small shapes: with them, and in plain torch.

A check is the engine's own code on random numbers, run twice: on the device, and on the host without kernels. Which
ones there are follows from config.json and headers. Not here: when they are run, and what becomes of it (`first_run`).
"""

import itertools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.kernels import ops
from quantkit.kernels.batch import ForwardBatch
from quantkit.kernels.gpu.choices import TILE_LIMIT
from quantkit.kernels.layouts import KVLayout
from quantkit.kernels.ops import experts, head, sampling
from quantkit.kernels.ops.linear import build_linear
from quantkit.kernels.reference.block import ACTIVATIONS
from quantkit.kernels.reference.sampling import Draw
from quantkit.kernels.types import AttentionOptions, HeadNorms, Linear
from quantkit.models.config import NotNative
from quantkit.models.rope import RopeConfig
from quantkit.numerics.affine import WeightGrid, round_to_nearest
from quantkit.numerics.inputs import input_scale
from quantkit.numerics.scheme import LinearScheme, WeightScheme
from quantkit.numerics.tensor import QuantizedTensor
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine.batch_builder import BatchBuilder, ScheduledChunk
from quantkit.runtime.model import loader
from quantkit.runtime.model.cache_schemes import read_stored_cache
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.experts import Mixture
from quantkit.runtime.model.layers import MLP
from quantkit.runtime.model.model import config_layouts

_ROWS = (1, 20, TILE_LIMIT + 1)  # each way to multiply
_VOCABULARY = 2500
_WINDOW = 20

Outputs = Iterator[Tensor]


class Check(NamedTuple):
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
            # Without the host's own kernels either, which would otherwise be compared in plain torch's place.
            os.environ["QUANTKIT_TRITON"], os.environ["QUANTKIT_NATIVE"] = kernels, "0"
            torch.manual_seed(0)
            outputs.append([output.float().cpu() for output in self.run(where)])
        errors = [(one - other).abs().max() / other.abs().max() for one, other in zip(*outputs, strict=True)]
        return torch.stack(errors).max().item()  # NaN where there is one


def checks_of(path: Path, asked: EngineConfig, device: torch.device, *, draft: bool = False) -> Iterator[Check]:
    """What a model makes use of; several may have one key. Only headers are read.

    Args:
        path: of its checkpoint.
        asked: settings of the engine.
        device: where it is going to run.
        draft: whether it is the draft model, which takes fewer of the settings.
    """
    yield Check("sampling", "all kinds", _tokens)
    reader = CheckpointReader(path)
    try:
        config, _, scheme = loader.read_headers(reader)
    except NotNative:
        return
    if asked.backend == "transformers":
        return
    dtype, _ = loader.pick_dtype(asked.dtype, reader, device)
    head_dtype, kv_cache = (None, None) if draft else (asked.head_dtype, asked.kv_cache)

    def check(family: str, label: str, run: Callable[..., Outputs], *arguments: Any) -> Check:
        label = f"{label}, {str(dtype).removeprefix('torch.')}"
        return Check(family, label, partial(_run, run, config, dtype, arguments))

    kinds = {scheme.default, *(rule.linear for rule in scheme.rules)} - {None} if scheme else set()
    last = None if scheme is None or config.tied else scheme.find(config.family.head)
    if head_dtype is not None:
        last = LinearScheme(weight=loader.head_scheme(head_dtype, config.hidden_size))
    yield check("ops", config.activation, _Parts.operations)
    yield check("head", _name(last), _Parts.logits, last)
    # Kernels of the other families are for 16 bits only.
    if dtype == torch.float32:
        return
    for kind in {*kinds, last} - {None}:
        yield check("quantized_linear", _name(kind), _Parts.products, kind)
    layouts = config_layouts(config, read_stored_cache(reader, config), kv_cache, asked.page_size, dtype)
    for layout, window, rope in zip(layouts, config.windows, config.ropes, strict=True):
        if not isinstance(layout, KVLayout) or layout.rope_dim:
            continue  # recurrent layers and latent attention have no kernel but torch's
        label, options = _attention_kind(config, layout, window, rope)
        yield check("attention", label, _Parts.attention, layout, rope, options)
    if config.experts is not None and config.activation in ACTIVATIONS:  # of other gates there is no kernel
        plain: list[LinearScheme | None] = [kind for kind in kinds if kind and kind.activation is None]
        for kind in plain or [None]:
            yield check("experts", _name(kind), _Parts.mixture, kind)


def _run(run: Callable[..., Outputs], config: ModelConfig, dtype: torch.dtype, given: Any, where: Any) -> Outputs:
    return run(_Parts(config, dtype, where), *given)


def _name(scheme: LinearScheme | None) -> str:
    return "unquantized" if scheme is None else scheme.describe()


def _attention_kind(
    config: ModelConfig, layout: KVLayout, window: int | None, rope: RopeConfig | None
) -> tuple[str, dict[str, Any]]:
    """What its kernels differ by: in words, and as options, of which the norms still need weights."""
    norm = config.family.qk_norm
    options = {
        "window": window and _WINDOW,
        "softcap": config.attention_softcap,
        "interleaved": rope is not None and rope.interleaved,
        "norms": config.qk_norm and norm is not None and norm.over != "projection",
    }
    names = [name for name, is_on in {**options, "rotated": rope}.items() if is_on]
    sizes = f"{layout.head_dim} channels, pages of {layout.page_size}, {config.num_heads // layout.num_heads} queries"
    return ", ".join([layout.scheme.describe(), sizes, *names]), options


def random_weight(rows: int, width: int, scheme: WeightScheme, device: torch.device | None = None) -> QuantizedTensor:
    """A weight (N, K) of this scheme whose values have the spread of a trained one."""
    values = torch.randn(rows, width, device=device) * width**-0.5
    # Off centre, so that zero points differ from the middle and a wrong one shows.
    if not scheme.symmetric:
        values += 0.25 * width**-0.5
    return round_to_nearest(values, WeightGrid(scheme, torch.bfloat16))


def steps(count: int, num_pages: int, page_size: int, device: torch.device) -> Callable[[int, int], ForwardBatch]:
    """Makes the step in which every sequence gets its tokens start..stop, valid until the next; pages in disorder.

    Args:
        count: of the sequences.
        num_pages: of each.
        page_size, device: of the cache.
    """
    # On consecutive pages a kernel that ignores the page table would be right.
    order = torch.randperm(count * num_pages, generator=torch.Generator().manual_seed(0)).view(count, -1).tolist()
    holders: list[Any] = [
        SimpleNamespace(id=i, row=i, pages=own, num_table_entries=0, num_evicted=0) for i, own in enumerate(order)
    ]
    build = BatchBuilder(max_sequences=count, max_pages=num_pages, page_size=page_size, device=device).build
    return lambda start, stop: build([ScheduledChunk(each, [0] * (stop - start), start, 1) for each in holders])


def _tokens(device: torch.device) -> Outputs:
    logits, key = 3 * torch.randn(4, _VOCABULARY).to(device), 0x5851F42D4C957F2D
    draws = [None, Draw(key, 1.0, None, 1.0, 0.0), Draw(-key, 0.7, None, 0.9, 0.05), Draw(~key, 1.5, 40, 0.9, 0.0)]
    yield one_hot(sampling.choose(logits, draws), _VOCABULARY)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Parts of a model, of random numbers.

    Args:
        config: of the model.
        dtype: of the computation.
        device: where.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    def random(self, *shape: int) -> Tensor:
        # Drawn on the host: a device's generator gives other numbers for the same seed.
        return torch.randn(shape).to(self.device, self.dtype)

    def linear(self, scheme: LinearScheme | None, times: int = 1) -> Linear:
        """Of inputs that whole groups fill, and so many times as many outputs."""
        width = math.lcm(512, (scheme and scheme.weight.group_size) or 1)
        if scheme is None:
            values = torch.randn(times * width, width) * width**-0.5
            return build_linear(values, dtype=self.dtype, device=self.device)
        weight, activation = random_weight(times * width, width, scheme.weight), scheme.activation
        if activation is not None and activation.is_calibrated:
            weight = replace(weight, input_scale=input_scale(torch.tensor([4.0]), activation, torch.float32))
        return build_linear(weight, activation=activation, dtype=self.dtype, device=self.device)

    def operations(self) -> Outputs:
        config, (x, residual, gate_up) = self.config, (self.random(5, width) for width in (640, 640, 1280))
        yield from ops.rms_norm(x, self.random(640), config.norm_eps, config.norm_offset, residual)
        query, key, turns = self.random(5, 4, 64), self.random(5, 2, 64), torch.randn(5, 32).to(self.device)
        yield from ops.rotary_(query, key, turns.cos(), turns.sin())
        if config.activation in ACTIVATIONS:
            yield ops.gated(gate_up, config.activation)

    def logits(self, scheme: LinearScheme | None) -> Outputs:
        linear = self.linear(scheme, times=5)
        for rows in _ROWS[:2]:
            x = self.random(rows, linear.in_features)
            values, best = head.logits(linear, x, softcap=self.config.logits_softcap)
            yield values
            yield values.gather(1, (values.argmax(-1) if best is None else best)[:, None])

    def products(self, scheme: LinearScheme) -> Outputs:
        """Alone, and with a gate behind; or of inputs that are quantized alone, by a norm and by a gate."""
        up, down = self.linear(scheme, times=2), self.linear(scheme)
        width, quantization, activation = down.in_features, down.activation_quantization, self.config.activation
        for rows in _ROWS:
            x = self.random(rows, width)
            yield down(x)
            if activation not in ACTIVATIONS:  # it has no gate
                continue
            if scheme.activation is None:
                yield ops.gated_linear(up, x, activation)
            else:  # not one behind the other: a last bit that differs is a code that differs
                yield down(ops.rms_norm(x, torch.ones_like(x[0]), 1e-6, quantization=quantization)[0])
                yield down(ops.gated(self.random(rows, 2 * width), activation, quantization))

    def attention(self, layout: KVLayout, rope: RopeConfig | None, options: dict[str, Any]) -> Outputs:
        """Two sequences: prompts over several pages, tokens that end and begin one, chunks behind."""
        config, size, (query, key) = self.config, layout.page_size, self.random(2, layout.head_dim)
        cache, step_of = KVCache([layout], 12, 2, self.device), steps(2, 6, size, self.device)
        norms = HeadNorms(query=query, key=key, eps=config.norm_eps, offset=config.norm_offset)
        options = {**options, "norms": norms if options["norms"] else None}
        asked = AttentionOptions(scale=config.attention_scale, **options)
        for start, stop in itertools.pairwise((0, 5 * size - 1, 5 * size, 5 * size + 1, 5 * size + 6)):
            counts, tokens = (config.num_heads, layout.num_heads, layout.num_heads), 2 * (stop - start)
            query, key, value = (self.random(tokens, count, layout.head_dim) for count in counts)
            turns = torch.randn(tokens, rope.width // 2 if rope else 0).to(self.device)
            angles = (turns.cos(), turns.sin()) if rope else None
            yield cache.attention[0]((query, key, value), step_of(start, stop), asked, angles)

    def mixture(self, scheme: LinearScheme | None) -> Outputs:
        config, activation = self.config.experts, self.config.activation
        assert config is not None
        count = 2 * config.num_chosen
        kinds: dict[str, Any] = {"num_chosen": config.num_chosen, "normalize": config.normalize}
        linears = [(self.linear(scheme, times=2), self.linear(scheme)) for _ in range(count)]
        chosen: Any = tuple(MLP(up, down, activation, True) for up, down in linears)
        if experts.can_stack(self.device, self.dtype):
            stacked = experts.stack(linears, count=count, activation=activation, **kinds)
            chosen = chosen if isinstance(stacked, str) else stacked
        scores = self.random(20, count)  # given, as a router's rounding may choose others
        router = cast(Linear, lambda x: scores[: len(x)])
        layer = Mixture(router=router, experts=chosen, shared=None, shared_gate=None, **kinds)
        for rows in (3, 20):
            yield layer(self.random(rows, linears[0][0].in_features))
