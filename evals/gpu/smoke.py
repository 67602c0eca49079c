"""Every kernel once, in a minute: against plain torch, and as a graph against itself.

Families of kernels run beside each other, each in a process of its own. A case that ends its process, or takes too
long, is a row; a new process goes on with the next.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from timing import dtype_on, is_lost, open_results, parse

# isort: split
import torch
from attention import make_batch
from linears import SCHEMES, random_weight
from peer_attention import Case
from results import LOST, Results, first_line
from torch import Tensor

import quantkit.kernels.gpu as kernels
from quantkit.kernels import ops
from quantkit.kernels.gpu import ops as gpu_ops
from quantkit.kernels.gpu import quantize_activations
from quantkit.kernels.gpu import sampling as gpu_sampling
from quantkit.kernels.layouts import kv_scheme, layer_layout
from quantkit.kernels.ops.experts import stack
from quantkit.kernels.ops.head import logits
from quantkit.kernels.ops.linear import build_linear
from quantkit.kernels.ops.sampling import choose
from quantkit.kernels.reference import block as reference
from quantkit.kernels.reference import experts as reference_experts
from quantkit.kernels.reference.sampling import Draw
from quantkit.kernels.transfer import send
from quantkit.kernels.types import ActivationQuantization, AttentionOptions, HeadNorms
from quantkit.numerics.affine import WeightGrid, round_to_nearest
from quantkit.numerics.dtype import DTYPES
from quantkit.numerics.inputs import fake_quantize_inputs
from quantkit.numerics.scheme import WeightScheme
from quantkit.runtime.cache.kv_cache import KVCache

Outputs = tuple[Tensor, ...]
# What runs a kernel, and what should come out.
Check = tuple[Callable[[], Outputs], Outputs]
Cases = dict[str, Callable[[torch.device], Check]]

OUTPUTS, INPUTS = 192, 512
ROWS = (1, 4, 16, 64, 300)
FLOATS = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
BF16 = "bf16"
KV_TYPES = ("auto", "int8", "fp8", "int4")
CLOSE = 0.04  # of the largest output; half a step of FP8 there is 0.036
CASE_SECONDS = 30.0


@contextmanager
def plain_torch() -> Iterator[None]:
    """While open, none of quantkit's kernels is used."""
    saved, kernels.is_used = kernels.is_used, lambda device: False
    try:
        yield
    finally:
        kernels.is_used = saved


def random(device: torch.device, *shape: int) -> Tensor:
    """Normal numbers in the dtype of models."""
    return torch.randn(*shape, device=device).to(dtype_on(device.type))


def product(scheme: str, rows: int, device: torch.device) -> Check:
    """A linear as the benches have it."""
    weight_scheme, activation = SCHEMES[scheme]
    weight = random_weight(OUTPUTS, INPUTS, weight_scheme, device)
    linear = build_linear(weight, activation=activation, dtype=dtype_on(device.type), device=device)
    x = random(device, rows, INPUTS)
    inputs = x.float() if activation is None else fake_quantize_inputs(x.float(), activation)
    return lambda: (linear(x),), (inputs @ weight.dequantize().float().T,)


def float_product(name: str, rows: int, device: torch.device) -> Check:
    """A linear of four-bit or eight-bit floats with scales in a type of their own."""
    scheme = WeightScheme(dtype=DTYPES[name], group_size=FLOATS[name])
    weight = round_to_nearest(torch.randn(OUTPUTS, INPUTS) * 0.1, WeightGrid(scheme, dtype_on(device.type)))
    linear = build_linear(weight, dtype=dtype_on(device.type), device=device)
    x = random(device, rows, INPUTS)
    return lambda: (linear(x),), (x.float() @ weight.dequantize().float().T.to(device),)


def head(scheme: str, rows: int, device: torch.device) -> Check:
    """Logits and the likeliest tokens."""
    weight = random_weight(OUTPUTS, INPUTS, SCHEMES[scheme][0], device)
    linear = build_linear(weight, dtype=dtype_on(device.type), device=device)
    x = random(device, rows, INPUTS)

    def call() -> Outputs:
        values, best = logits(linear, x)
        assert best is not None
        assert torch.equal(best, values.argmax(-1)), "the likeliest token is another"
        return (values,)

    return call, (x.float() @ weight.dequantize().float().T,)


def expert_mix(scheme: str, tokens: int, device: torch.device) -> Check:
    """Experts of a layer, and a shared one."""
    dtype, shapes = dtype_on(device.type), ((2 * 128, 256), (256, 128)) * 4
    weights = [random_weight(*shape, SCHEMES[scheme][0], device) if scheme != BF16 else None for shape in shapes]
    dense = [
        random(device, *shape) * shape[1] ** -0.5 if weight is None else weight.dequantize().to(dtype)
        for shape, weight in zip(shapes, weights, strict=True)
    ]
    linears = [
        build_linear(values if weight is None else weight, dtype=dtype, device=device)
        for values, weight in zip(dense, weights, strict=True)
    ]
    pairs = zip(linears[::2], linears[1::2], strict=True)
    stacked = stack(pairs, count=4, activation="silu", num_chosen=2, normalize=True)
    assert not isinstance(stacked, str), stacked
    x, scores, shared = random(device, tokens, 256), random(device, tokens, 4), random(device, tokens, 256)
    with plain_torch():
        shares, chosen = reference_experts.route(scores, 2, True)
        every = [
            lambda rows, up=up, down=down: ops.gated(rows @ up.float().T, "silu") @ down.float().T
            for up, down in zip(dense[::2], dense[1::2], strict=True)
        ]
        expected = reference_experts.run_each(x.float(), chosen, shares, every, shared.float())
    return lambda: (stacked(x, scores, shared, None),), (expected,)


def attention(kind: str, new: int, device: torch.device) -> Check:
    """Norms, rotation, store and attention of new tokens, behind a prompt that the kernels, or torch, have stored."""
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "dim": 64, "page": 16}
    table = torch.randperm(2 * 5).view(2, 5)
    before, _ = make_batch(Case(context=70 - new, new=70 - new, **sizes), str(device), table)
    step, _ = make_batch(Case(context=70, new=new, **sizes), str(device), table)
    dtype = dtype_on(device.type)
    layout = layer_layout(num_heads=2, head_dim=64, page_size=16, dtype=dtype, scheme=kv_scheme(kind))
    norms = HeadNorms(query=random(device, 64), key=random(device, 64), eps=1e-6, offset=0.0)
    options = AttentionOptions(scale=0.125, norms=norms)
    states = [[random(device, len(part.token_ids), heads, 64) for heads in (4, 2, 2)] for part in (before, step)]
    turns = [torch.randn(len(part.token_ids), 32, device=device) for part in (before, step)]

    def prepared() -> Callable[[], Outputs]:
        cache = KVCache([layout], 10, 2, device)

        def attend(number: int) -> Outputs:
            query, key, value = (one.clone() for one in states[number])  # torch rotates in place
            angles = turns[number].cos(), turns[number].sin()
            return (cache.attention[0]((query, key, value), (before, step)[number], options, angles),)

        attend(0)
        return partial(attend, 1)

    with plain_torch():
        expected = prepared()()
    return prepared(), expected


def norm(rounding: ActivationQuantization | None, device: torch.device) -> Check:
    """A norm of a sum, quantized or not."""
    x, residual, weight = random(device, 5, 1000), random(device, 5, 1000), random(device, 1000)

    def call() -> Outputs:
        rows, total = gpu_ops.rms_norm(x, weight, 1e-5, 0.0, residual, rounding)
        return rows if rounding is None else quantize_activations.dequantize_rows(rows, x.dtype)[:5], total

    return call, reference.rms_norm(x, weight, 1e-5, 0.0, residual)


def gate(device: torch.device) -> Check:
    """A gate."""
    x = random(device, 5, 2 * 1000)
    return lambda: (gpu_ops.gated(x, "silu"),), (reference.gated(x, "silu"),)


def rotation(device: torch.device) -> Check:
    """Queries and keys, rotated."""
    query, key, turns = random(device, 5, 4, 64), random(device, 5, 2, 64), torch.randn(5, 32, device=device)

    def call() -> Outputs:
        rotated = query.clone(), key.clone()
        assert gpu_ops.rotary_(*rotated, turns.cos(), turns.sin(), False)
        return rotated

    return call, reference.rotary_(query.clone(), key.clone(), turns.cos(), turns.sin(), interleaved=False)


def draws(device: torch.device) -> Check:
    """Tokens of rows of all kinds."""
    values = 3 * torch.randn(4, 3000, device=device)
    kinds = [None, Draw(1, 0.8, None, 1.0, 0.0), Draw(2, 1.0, 20, 0.9, 0.0), Draw(3, 1.3, None, 0.95, 0.05)]
    keys = torch.tensor([0, 1, 2, 3])
    limits = torch.tensor([3000, 3000, 20, 3000], dtype=torch.int32)
    settings = torch.tensor([[0, 1, -torch.inf], [0.8, 1, -torch.inf], [1, 0.9, -torch.inf], [1.3, 0.95, -2.995732]])
    sent = send(device, keys.numpy(), limits.numpy(), settings.numpy())
    with plain_torch():
        return lambda: (gpu_sampling.choose(values, *sent),), (choose(values, kinds),)


def _cases(schemes: Iterable[str], rows: Iterable[int], check: Callable[..., Check]) -> Cases:
    return {f"{name}, {count} rows": partial(check, name, count) for name in schemes for count in rows}


def families(tiny: bool) -> dict[str, Cases]:
    """Cases by family and name; one of each family of products, of attention two, for the interpreter."""
    names, few = tuple(SCHEMES), (1, 16)
    products = {
        "w4": _cases(names[:2], ROWS, product),
        "w8": _cases(names[2:4], ROWS, product),
        "float": _cases(FLOATS, few, float_product),
        "a8": _cases(names[4:], (1, 16, 300), product),
        "head": _cases((names[0], names[2]), few, head),
        "experts": _cases((names[0], BF16), (1, 33, 300), expert_mix),
        **{f"attention {kind}": _cases((kind,), (1, 5, 40), attention) for kind in KV_TYPES},
    }
    if tiny:  # in one process
        firsts = {name: next(iter(cases.items())) for name, cases in products.items()}
        del firsts["attention fp8"], firsts["attention int8"]
        products = {"products": {f"{family}, {name}": check for family, (name, check) in firsts.items()}}
    others = {f"norm to {name}": partial(norm, ActivationQuantization(name=name)) for name in ("int8", "fp8")}
    return {
        **products,
        "others": {"norm": partial(norm, None), **others, "gate": gate, "rotation": rotation, "draws": draws},
    }


def run_case(check: Callable[[torch.device], Check], device: torch.device) -> dict[str, Any]:
    """Run a kernel eagerly and as a graph.

    Raises:
        AssertionError: something else came out than should have.
    """
    torch.manual_seed(0)
    call, expected = check(device)
    begun = time.monotonic()
    actual = call()
    figures: dict[str, Any] = {"first_seconds": time.monotonic() - begun, "off_by": _distance(actual, expected)}
    assert figures["off_by"] <= CLOSE, f"off by {figures['off_by']:.2g} of the largest output"
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = call()
        for tensor in replayed:
            tensor.zero_()
        graph.replay()
        same = all(torch.equal(one, other) for one, other in zip(replayed, actual, strict=True))
        assert same, f"a replay is off by {_distance(replayed, actual):.2g} of the largest output"
        figures["graph"] = "the same"
    return figures


def _distance(actual: Outputs, expected: Outputs) -> float:
    """The largest, as a share of the largest output; NaN counts as far off."""
    shares = []
    for one, other in zip(actual, expected, strict=True):
        distance = (one.double() - other.double()).abs().max() / other.double().abs().max()
        shares.append(distance.nan_to_num(nan=torch.inf).item())
    return max(shares)


def run_family(cases: Cases, names: Iterable[str], device: str) -> None:
    """In a process of its own: a line of JSON for each case, at once."""
    for name in names:
        faulthandler.dump_traceback_later(CASE_SECONDS * (1 if device == "cuda" else 10), exit=True)
        try:
            with torch.inference_mode():
                row = run_case(cases[name], torch.device(device))
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {first_line(error)}"}
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(row), flush=True)
        if "error" in row and is_lost():
            sys.exit(LOST)


def watch(family: str, results: Results, arguments: argparse.Namespace) -> None:
    """Have a family run, in as many processes as it takes."""
    names = [name for name in families(arguments.tiny)[family] if results.known(family=family, case=name) is None]
    while names and not results.is_over():
        command = [sys.executable, __file__, "--device", arguments.device, *["--tiny"] * arguments.tiny]
        command += ["--family", family, "--cases", *names]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for line in child.stdout:
            if not line.startswith("{"):  # a library's word
                print(line, end="", flush=True)
                continue
            results.add(family=family, case=names.pop(0), **json.loads(line))
        if child.wait() != LOST and names:
            results.add(family=family, case=names.pop(0), error=f"its process ended with {child.returncode}")


def main() -> None:
    """Write smoke.json."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--family")
    parser.add_argument("--cases", nargs="*")
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    arguments = parse(60)
    if own.family is not None:
        run_family(families(arguments.tiny)[own.family], own.cases, arguments.device)
        return
    results = open_results("smoke", arguments)
    with ThreadPoolExecutor() as pool:
        list(pool.map(partial(watch, results=results, arguments=arguments), families(arguments.tiny)))
    results.finish()


if __name__ == "__main__":
    main()
