"""Comparison of GPU kernels with plain torch, before the first load on a device and for `quantkit inspect --device`.

Each kernel family runs on small random inputs in its own child process, so a crash or hang affects only that process.
Torch replaces a family that fails. Verdicts are stored per device, driver and versions.
"""

import atexit
import contextlib
import hashlib
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from quantkit.distribution import installed_version
from quantkit.errors import InputError
from quantkit.kernels import gpu, ops
from quantkit.kernels.layouts import KVLayout, kv_scheme
from quantkit.kernels.ops.linear import build_linear, can_stack, stack
from quantkit.kernels.reference import experts
from quantkit.kernels.reference.ops import gated
from quantkit.kernels.types import AttentionOptions, ForwardBatch, HeadNorms, Linear
from quantkit.machine.devices import entered
from quantkit.machine.system import python, user_id
from quantkit.numerics.affine import WeightGrid, round_to_nearest
from quantkit.numerics.dtype import DTYPES
from quantkit.numerics.kv_cache import LayerCache
from quantkit.numerics.scheme import ActivationScheme, LinearScheme, WeightScheme
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.engine.batch_builder import BatchBuilder, ScheduledChunk
from quantkit.runtime.sequence import PageHolder
from quantkit.safety.untrusted import read_object

TOLERANCE = 0.03
"""Largest accepted error, as a share of the largest output. Rounding to 16 bits causes smaller errors; a missing tile
or page causes larger ones.
"""

WIDTH = 512
"""Number of input features of the tested linears."""

_ROWS = (1, 20, 260)  # numbers of tokens, one for each way to multiply
_SECONDS = 60.0
_CHILD = "from quantkit.runtime.engine.kernel_check import main; main()"
_LOG = logging.getLogger(__name__)

Outputs = Iterator[Tensor]
Case = Callable[[torch.device, torch.dtype], Outputs]


class Verdict(NamedTuple):
    """The result of checking one family of kernels.

    Args:
        passed: whether the kernels agree with torch.
        text: the largest error relative to torch, or why it is unknown.
        is_final: whether a repeated check would give the same result; a family that timed out may pass on a less busy
            host.
    """

    passed: bool
    text: str
    is_final: bool = True


def check_kernels(device: torch.device) -> None:
    """Check the GPU kernels of a device, and let torch replace each kernel family that fails.

    The environment variable `QUANTKIT_TRITON=force` skips the check.
    """
    if not gpu.is_used(device) or _is_forced():
        return
    verdicts = read_verdicts(device)
    if not verdicts or not all(verdict.is_final for verdict in verdicts.values()):
        verdicts = self_test(device)
    for family, verdict in verdicts.items():
        if not verdict.passed and gpu.why_replaced(family, device) is None:
            gpu.replace(family, device, verdict.text)


def self_test(device: torch.device) -> dict[str, Verdict]:
    """Compare every family of GPU kernels with torch; store and return the verdicts, keyed by family.

    Raises:
        InputError: no GPU kernels run on this device.
    """
    path = verdict_file(device)
    _LOG.warning("comparing the GPU kernels with torch on %s; this takes at most %.0f s", device, _SECONDS)
    with ThreadPoolExecutor(len(CASES)) as pool:
        verdicts = dict(zip(CASES, pool.map(partial(_try, device), CASES), strict=True))
    partial_file = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # a folder that cannot be written costs another test at the next load
        partial_file.write_text(json.dumps(verdicts, indent=1))
        partial_file.replace(path)
    return verdicts


def identity(device: torch.device) -> dict[str, str]:
    """Return the device, driver and versions that verdicts are valid for.

    Raises:
        InputError: no GPU kernels run on this device.
    """
    if not gpu.is_used(device):
        raise InputError(
            f"no GPU kernels run on {device}; they need a CUDA device and Triton, and QUANTKIT_TRITON must not be 0"
        )
    driver = Path("/proc/driver/nvidia/version")
    sources = sorted(Path(gpu.__file__).parent.glob("*.py"))
    return {
        "device": torch.cuda.get_device_name(device),
        "driver": driver.read_text().partition("\n")[0] if driver.is_file() else "unknown",
        "torch": str(torch.__version__),
        "triton": installed_version("triton", "unknown"),
        "kernels": hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:16],
    }


def verdict_file(device: torch.device) -> Path:
    """Return the path of the file for a device's verdicts, whether or not the file exists."""
    about = json.dumps(identity(device)).encode()
    return cache_folder() / f"kernel-checks-{hashlib.sha256(about).hexdigest()[:16]}.json"


def cache_folder() -> Path:
    """Return a folder that only this user can write to: below $XDG_CACHE_HOME or ~/.cache, or a temporary folder."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: this user has no home
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "quantkit" / "kernel-checks"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.stat()
        if info.st_uid == user_id() and not info.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    fresh = Path(tempfile.mkdtemp(prefix="quantkit-"))
    atexit.register(shutil.rmtree, fresh, ignore_errors=True)
    return fresh


def read_verdicts(device: torch.device) -> dict[str, Verdict]:
    """Return the stored verdicts, keyed by family; empty if there are none, or a family has none."""
    with contextlib.suppress(InputError, TypeError):
        verdicts = {key: Verdict(*entry) for key, entry in read_object(verdict_file(device), InputError).items()}
        return verdicts if verdicts.keys() == CASES.keys() else {}
    return {}


def describe_kernels(device: torch.device) -> str:
    """Describe for users which kernel families torch replaces on a device."""
    reasons = {what: gpu.why_replaced(family, device) for family, what in gpu.FAMILIES.items()}
    replaced = "; ".join(f"torch replaces {what}: {reason}" for what, reason in reasons.items() if reason)
    return replaced or ("not checked: QUANTKIT_TRITON=force" if _is_forced() else "agree with torch in all checks")


def main() -> None:
    """Print the error of each case of a family; runs in a child process with device and family as arguments."""
    device, family = torch.device(sys.argv[1]), sys.argv[2]
    # Libraries also print to stdout, even from C; the original stdout must hold only results.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # A kernel that Triton refuses is an error here: torch in its place would only agree with itself.
    with entered(device), gpu.measuring(), torch.inference_mode():
        for label, case in CASES[family].items():
            results.write(json.dumps([label, error_of(case, device)]) + "\n")
            # Line by line: results before a crash or a hang still tell which case it was.
            results.flush()


def error_of(case: Case, device: torch.device) -> float:
    """Run a case on the device, and in plain torch on the host; return the relative error.

    The error is the largest difference, divided by the largest value of plain torch. This function sets environment
    variables, so call it in a separate process.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    outputs = []
    for where, kernels in ((device, "1"), (torch.device("cpu"), "0")):
        # The host's own kernels are off too: they are not plain torch.
        os.environ["QUANTKIT_TRITON"], os.environ["QUANTKIT_NATIVE"] = kernels, "0"
        torch.manual_seed(0)
        outputs.append([output.float().cpu() for output in case(where, dtype)])
    errors = [(one - other).abs().max() / other.abs().max() for one, other in zip(*outputs, strict=True)]
    return torch.stack(errors).max().item()  # NaN if an error is NaN


def _is_forced() -> bool:
    return os.environ.get("QUANTKIT_TRITON") == "force"


def _try(device: torch.device, family: str) -> Verdict:
    """Check a family in a child process and return the verdict."""
    # One thread each: the children run at the same time, and pools of all processors would wait for each other.
    is_final = True
    command, environment = [*python(_CHILD), str(device), family], {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, env=environment)
        lines, code = done.stderr.decode(errors="replace").splitlines(), done.returncode
        said, end = done.stdout, signal.Signals(-code).name if code < 0 else " ".join(lines[-1:])
    except subprocess.TimeoutExpired as error:
        said, end, is_final = error.stdout or b"", f"no result within {_SECONDS:.0f} s", False
    shares: dict[str, float] = {}
    for line in said.splitlines():
        # Skip half a line, and text that an imported library printed.
        with contextlib.suppress(ValueError, TypeError):
            label, share = json.loads(line)
            shares[label] = float(share)
    for label in CASES[family]:
        if label not in shares:
            return Verdict(False, f"{label}: {end}", is_final)
        if not shares[label] <= TOLERANCE:  # also true for NaN
            return Verdict(False, f"{label}: {shares[label]:.2%} error relative to torch's largest value")
    return Verdict(True, f"at most {max(shares.values()):.2%} error relative to torch's largest value")


# ---- cases: the engine's own code on random numbers, drawn on the host so that both devices get the same ones


def random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Draw normally distributed numbers on the host."""
    return torch.randn(shape).to(device, dtype)


def steps(count: int, num_pages: int, page_size: int, device: torch.device) -> Callable[[int, int], ForwardBatch]:
    """Return a function that builds a batch with the tokens `start` to `stop` of every sequence.

    The page numbers of the sequences are shuffled.

    Args:
        count: number of sequences.
        num_pages: pages per sequence.
        page_size, device: page size and device of the cache.
    """
    # With consecutive pages, a kernel that ignores the page table would give correct results.
    order = torch.randperm(count * num_pages, generator=torch.Generator().manual_seed(0)).view(count, -1).tolist()
    holders = [PageHolder(id=number, row=number, pages=own) for number, own in enumerate(order)]
    build = BatchBuilder(max_sequences=count, max_pages=num_pages, page_size=page_size, device=device).build
    return lambda start, stop: build([ScheduledChunk(each, [0] * (stop - start), start, 1) for each in holders])


def _linear(scheme: LinearScheme, outputs: int, device: torch.device, dtype: torch.dtype) -> Linear:
    values = torch.randn(outputs, WIDTH) * WIDTH**-0.5
    if not scheme.weight.symmetric:
        values += 0.25 * WIDTH**-0.5  # off centre, so that a wrong zero point shows
    weight = round_to_nearest(values, WeightGrid(scheme.weight, torch.bfloat16))
    return build_linear(weight, activation=scheme.activation, dtype=dtype, device=device)


def _operations(device: torch.device, dtype: torch.dtype) -> Outputs:
    x, residual, weight = (random(device, dtype, *shape) for shape in ((5, 640), (5, 640), (640,)))
    yield from ops.rms_norm(x, weight, 1e-5, 0.0, residual)
    yield ops.gated(random(device, dtype, 5, 1280), "silu")


def _products(scheme: LinearScheme, device: torch.device, dtype: torch.dtype) -> Outputs:
    up, down = (_linear(scheme, outputs, device, dtype) for outputs in (2 * WIDTH, WIDTH))
    for rows in _ROWS:
        x = random(device, dtype, rows, WIDTH)
        yield down(x)
        if scheme.activation is None:
            yield ops.gated_linear(up, x, "silu")
        else:  # a norm quantizes for the product
            yield down(ops.rms_norm(x, torch.ones_like(x[0]), 1e-6, quantization=down.activation_quantization)[0])


def _attention(kind: str, device: torch.device, dtype: torch.dtype) -> Outputs:
    """Test attention with two sequences: prompts over several pages, decode steps at page boundaries, later chunks."""
    cache_of = LayerCache(scheme=kv_scheme(kind))
    layout = KVLayout(num_heads=2, head_dim=64, page_size=16, dtype=dtype, cache=cache_of)
    cache, step_of = KVCache([layout], 12, 2, device), steps(2, 6, 16, device)
    query_norm, key_norm = random(device, dtype, 2, 64)
    norms = HeadNorms(query=query_norm, key=key_norm, eps=1e-6, offset=0.0)
    options = AttentionOptions(scale=0.125, window=20 if kind == "fp8" else None, norms=norms)
    for start, stop in itertools.pairwise((0, 79, 80, 81, 86)):
        tokens = 2 * (stop - start)
        query, key, value = (random(device, dtype, tokens, heads, 64) for heads in (4, 2, 2))
        turns = torch.randn(tokens, 32).to(device)
        yield cache.attention[0]((query, key, value), step_of(start, stop), options, (turns.cos(), turns.sin()))


def _mixture(scheme: LinearScheme, device: torch.device, dtype: torch.dtype) -> Outputs:
    linears = [(_linear(scheme, 2 * WIDTH, device, dtype), _linear(scheme, WIDTH, device, dtype)) for _ in range(4)]
    each = [lambda rows, up=up, down=down: down(gated(up(rows), "silu")) for up, down in linears]
    choose, stacked = partial(experts.route, num_chosen=2, normalize=True), cast(Any, None)
    if can_stack(device, dtype):
        stacked = stack(linears, count=4, activation="silu")
        assert not isinstance(stacked, str), stacked
    for tokens in (3, 40):
        # The scores are far apart, so rounding does not change the chosen experts.
        x, scores = random(device, dtype, tokens, WIDTH), random(device, dtype, tokens, 4)
        if stacked is not None:
            yield stacked(x, scores, None, None, choose)
        else:
            weights, chosen = choose(scores)
            yield experts.run_each(x, chosen, weights, each, torch.zeros_like(x))


def _scheme(name: str, group: int | None, inputs: str | None = None, *, symmetric: bool = True) -> LinearScheme:
    weight = WeightScheme(dtype=DTYPES[name], group_size=group, symmetric=symmetric)
    return LinearScheme(weight=weight, activation=ActivationScheme(dtype=DTYPES[inputs]) if inputs else None)


_CACHES = ("auto", "fp8", "int8", "int4", "k4v3", "k3v2")  # k4v2 has the keys of int4 and the values of k3v2
INT4 = _scheme("int4", 128)
SCHEMES = (
    INT4,
    _scheme("int4", 128, symmetric=False),
    _scheme("int8", None),
    _scheme("int8", None, "int8"),
    _scheme("fp8", None, "fp8"),
    _scheme("nvfp4", 16),
)
"""Number types of the linears whose products are compared."""

CASES: dict[str, dict[str, Case]] = {
    "ops": {"norms and gates": _operations},
    "quantized_linear": {scheme.describe(): partial(_products, scheme) for scheme in SCHEMES},
    "attention": {f"{kind} cache": partial(_attention, kind) for kind in _CACHES},
    "experts": {INT4.describe(): partial(_mixture, INT4)},
}
"""Functions of the test cases, keyed by kernel family and name of the case."""
