"""What there is to choose for a model: the distinct products and page reads of its layers, as cases of `tune`.

Of a checkpoint only config.json and headers are read. A case is found again by what `kernels.gpu.configs` asks with,
so each product is described by packing a few rows of a random weight of its kind. Linears that no packed kernel runs,
and sizes at which there is nothing to choose, make no case.
Shapes: N outputs, K inputs, M rows.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

from quantkit.benchmark.options import TuneOptions
from quantkit.benchmark.predict import quantized_linears
from quantkit.benchmark.tune import Case
from quantkit.checkpoints.source import resolve
from quantkit.errors import InputError, suggestion
from quantkit.kernels.gpu import choices, configs, packing, spaces
from quantkit.kernels.gpu.choices import Choice
from quantkit.kernels.gpu.packing import Packing
from quantkit.kernels.layouts import kv_scheme
from quantkit.models.cache import DEFAULT_PAGE_SIZE
from quantkit.numerics.dtype import FP8, INT4, INT8
from quantkit.numerics.scheme import KVScheme, LinearScheme, WeightScheme
from quantkit.runtime.engine.kernel_checks import random_weight

_PROBE_ROWS = 16
_CHUNK = 512
_UNPACKED_ROWS = 16  # above them codes as they are go to cuBLAS
_FP8_CHIP = 89  # from which on there is one of FP8
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductWork:
    """Rows times a weight.

    Args:
        scheme: how it is stored, and its inputs.
        outputs, inputs, rows: N, K and M.
    """

    scheme: LinearScheme
    outputs: int
    inputs: int
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """What a model is made of, as far as there is something to choose.

    Args:
        linears: N, K and scheme of each distinct linear.
        query_heads, kv_heads, head_dim: of its attention.
    """

    linears: tuple[tuple[int, int, LinearScheme], ...]
    query_heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PageWork:
    """Attention over pages.

    Args:
        shapes: whose attention.
        kv_cache: name of the KV type.
        batch: sequences.
        context: tokens of each, new ones included.
        new: of each.
    """

    shapes: Shapes
    kv_cache: str
    batch: int
    context: int
    new: int


# Hidden width, width of the MLP, heads of queries and of keys, channels of a head.
_PRESETS = {
    "1B": (2048, 8192, 32, 8, 64),
    "8B": (4096, 14336, 32, 8, 128),
    "70B": (8192, 28672, 64, 8, 128),
}


def shapes_of_preset(name: str, *, bits: int = 4, group: int | None = 128, symmetric: bool = True) -> Shapes:
    """Layers of a Llama of that size.

    Args:
        name: 1B, 8B or 70B.
        bits: of the weights, 4 or 8.
        group: inputs that share a scale; None = one scale per output.
        symmetric: without zero points.
    Raises:
        InputError: an unknown name or number of bits.
    """
    if name not in _PRESETS:
        raise InputError(f"unknown shapes {name!r}{suggestion(name, _PRESETS)}; there are: {', '.join(_PRESETS)}")
    kinds = {4: INT4, 8: INT8}
    if bits not in kinds:
        raise InputError(f"weights of {bits} bits are not tuned by --shapes; use 4 or 8, or give a checkpoint")
    hidden, width, heads, kv_heads, dim = _PRESETS[name]
    scheme = LinearScheme(weight=WeightScheme(dtype=kinds[bits], group_size=group, symmetric=symmetric))
    # As they are stored when a model is loaded: gate with up, and queries with keys and values, are one weight.
    sizes = (2 * width, hidden), (hidden, width), ((heads + 2 * kv_heads) * dim, hidden), (hidden, heads * dim)
    return Shapes(linears=tuple((*size, scheme) for size in sizes), query_heads=heads, kv_heads=kv_heads, head_dim=dim)


def shapes_of_model(path: Path) -> Shapes:
    """Layers of a checkpoint, experts left out.

    Raises:
        ModelError, CheckpointError: there is no such model, or only transformers runs it.
    """
    config, linears = quantized_linears(path)
    distinct = {(rows, width, scheme): None for name, rows, width, scheme in linears if not _EXPERT.search(name)}
    # The largest first: they take most of a step, and the time for the search may run out.
    ordered = sorted(distinct, key=lambda linear: -linear[0] * linear[1])
    heads = {"query_heads": config.num_heads, "kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    return Shapes(linears=tuple(ordered), **heads)


def read_shapes(options: TuneOptions) -> list[Shapes]:
    """Shapes of the model, from its headers, and of the names.

    Raises:
        InputError: an unknown name, or no such model.
    """
    names = options.shapes or (() if options.model else ("8B",))
    kind = partial(shapes_of_preset, bits=options.bits, group=options.group or None, symmetric=not options.asymmetric)
    presets = [kind(name) for name in names]
    return presets if options.model is None else [shapes_of_model(resolve(options.model)), *presets]


def cases_of(shapes: Iterable[Shapes], options: TuneOptions, chip: int) -> list[Case]:
    """Everything to choose, what a single user waits for first: a few rows, then decode steps.

    Args:
        shapes: of the models.
        options: rows of products, batches and contexts, and number types of the cache.
        chip: compute capability.
    """
    shapes = list(shapes)

    def products(every: Iterable[int]) -> Iterator[Case | None]:
        linears = ((rows, *linear) for rows in every for one in shapes for linear in one.linears)
        for rows, outputs, inputs, scheme in linears:
            work = ProductWork(scheme=_as_measured(scheme), outputs=outputs, inputs=inputs, rows=rows)
            yield _product_case(work, chip)

    def page_reads(batches: Iterable[int], new: int) -> Iterator[Case]:
        for batch, one, kind in product(batches, shapes, options.kv_types):
            yield _pages_case(PageWork(shapes=one, kv_cache=kind, batch=batch, context=options.context, new=new), chip)

    cases = (
        *products(options.rows[:1]),
        *page_reads(options.batches, 1),
        *products(options.rows[1:]),
        *page_reads((1,), min(_CHUNK, options.context)),
    )
    return list({case.key: case for case in cases if case is not None}.values())


def _product_case(work: ProductWork, chip: int) -> Case | None:
    packed = _packing(work.scheme, work.inputs, chip)
    if packed is None or (packed.unpacked and work.rows > _UNPACKED_ROWS):
        return None
    default = choices.default_product(work.rows, chip)
    candidates = spaces.products(work.rows, packed, chip)
    if not set(candidates) - {default}:
        return None
    bucket = configs.row_bucket(work.rows)
    if bucket is None:
        raise InputError(f"products of {work.rows} rows are not tuned; {choices.ROW_BUCKETS[-1]} are the most")
    return Case(
        kernel="product",
        kind=packed.name,
        sizes={"rows": bucket, "outputs": work.outputs, "inputs": work.inputs},
        label=f"{work.scheme.describe()}, {work.outputs} x {work.inputs}, {work.rows} rows",
        default=default,
        candidates=tuple(candidates),
        work=work,
    )


def _packing(scheme: LinearScheme, inputs: int, chip: int) -> Packing | None:
    """How kernels keep such a weight, see `gpu.quantized_linear`; None where other kernels run."""
    weight, activation = random_weight(_PROBE_ROWS, inputs, scheme.weight), scheme.activation
    alike = activation is not None and activation.group_size is None and activation.dtype is scheme.weight.dtype
    whole = weight.zero_point is None and weight.scale.shape[1] == 1 and inputs % 4 == 0
    if alike and whole and (scheme.weight.dtype is INT8 or (scheme.weight.dtype is FP8 and chip >= _FP8_CHIP)):
        return packing.unpacked(weight).packing
    return None if packing.find_span(weight) is None else packing.pack(weight, torch.device("cpu")).packing


def _as_measured(scheme: LinearScheme) -> LinearScheme:
    """The same with inputs rounded as they come: scales found by calibration are not in headers."""
    if scheme.activation is None or scheme.activation.dynamic:
        return scheme
    return replace(scheme, activation=replace(scheme.activation, granularity="token", dynamic=True))


def _pages_case(work: PageWork, chip: int) -> Case:
    shapes, scheme, size = work.shapes, kv_scheme(work.kv_cache) or KVScheme(), DEFAULT_PAGE_SIZE
    dim = shapes.head_dim
    label = f"{work.kv_cache} KV, {shapes.query_heads}/{shapes.kv_heads} heads of {dim}"
    halved = configs.is_halved(scheme)
    default: Choice
    candidates: Sequence[Choice]
    if work.new > 1:
        kernel, sizes, label = "prefill", {}, f"{label}, {work.new} new of {work.context} tokens"
        default = choices.default_prefill(dim, size, scheme.is_quantized, halved, chip)
        candidates = spaces.prefills(page_size=size, default=default)
    else:
        kernel, sizes = "decode", {"heads": work.batch * shapes.kv_heads}
        label = f"{label}, batch {work.batch} of {work.context} tokens"
        default = choices.default_decode(dim, size, chip)
        candidates = spaces.decodes(page_size=size, head_dim=dim, halved=halved)
    return Case(
        kernel=kernel,
        kind=configs.pages_name(scheme, dim, size, shapes.query_heads // shapes.kv_heads),
        sizes=sizes,
        label=label,
        default=default,
        candidates=tuple(candidates),
        work=work,
    )
