"""Compile what a call launches, for one chip, without a GPU: Triton's cache as an archive that travels in .gpu/.

    python evals/gpu/compile_ahead.py [--chip 90] [--jobs 2]      with the Triton of the machine that it is for

The parts' own code runs on tensors without memory, and Triton's launcher compiles each launch as it would there, so
that types, constants, alignment and options are those of the real launch. Triton names a cached kernel by a hash of its
own files and of the kernel's key. The key stands beside each kernel as `key.json`: where another build of the same
version of Triton runs, `results.py unpack` names the kernel anew. A kernel whose source has changed since, be it by a
line number, is compiled there. Not in the archive: the stubs that start kernels, which Triton has gcc compile there.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from attention import CASE, KV_TYPES, PAGE, decode_batch
from end_to_end import PLAN
from linears import ROWS, SHAPES, W4, random_linear
from quantization import two_layers
from random_model import SHAPES as MODELS
from random_model import WEIGHTS, make_model
from recorder import Launch, arguments_of, launch_of, pretended
from resources import default_jobs
from results import pack_kernels
from step_count import META
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import quantkit
from quantkit.kernels.layouts import KVLayout, kv_scheme
from quantkit.kernels.types import AttentionOptions, ForwardBatch
from quantkit.numerics.kv_cache import LayerCache
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.engine import kernel_check
from quantkit.runtime.engine.batch_builder import BatchBuilder, ScheduledChunk
from quantkit.runtime.model.model import NativeModel

DEMO = Path(quantkit.__file__).parent / "demo" / "model"
ARCHIVE = Path(__file__).resolve().parents[2] / ".gpu/kernels-ahead.tar.gz"
# Tokens of a prompt, and of all prompts that are computed at once.
CHUNKS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 24, 32, 33, 48, 64, 65, 100, 128, 200, 256, 257, 512)
_run = JITFunction.run
_launches: list[tuple[JITFunction[Any], dict[str, Any]]] = []


class Chip:
    """Stands where Triton asks its driver for the device.

    Args:
        capability: compute capability times ten.
    """

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        """Return the only device."""
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        """Return the default stream."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Return what is compiled for."""
        return self._target


def checks() -> None:
    """Run the self-test of a first load."""
    for cases in kernel_check.CASES.values():
        for case in cases.values():
            for _ in case(META, torch.bfloat16):
                pass


def decode_steps() -> None:
    """Run the steps of an 8B-shaped model."""
    for weights, cases in PLAN:
        model = make_model("8B", weights, META)
        for kv, batch, context in cases:
            step, num_pages = decode_batch(batch, context, "meta")
            model.forward(step, KVCache(model.layouts(kv, PAGE), num_pages, batch, META))


def products() -> None:
    """Run the products that are measured."""
    shape = SHAPES["8192 squared"]
    linear = random_linear(W4, shape, META)
    for count in ROWS:
        linear(torch.empty(count, shape[1], dtype=torch.bfloat16, device=META))


def attention() -> None:
    """Run attention of a decode step over each KV type."""
    step, num_pages = decode_batch(CASE.batch, CASE.context, "meta", CASE.page)
    for kind in KV_TYPES.values():
        sizes = {"num_heads": CASE.kv_heads, "head_dim": CASE.dim, "page_size": CASE.page, "dtype": torch.bfloat16}
        cache = KVCache([KVLayout(**sizes, cache=LayerCache(scheme=kv_scheme(kind)))], num_pages, CASE.batch, META)
        states = [
            torch.empty(CASE.batch, heads, CASE.dim, dtype=torch.bfloat16, device=META)
            for heads in (CASE.heads, CASE.kv_heads, CASE.kv_heads)
        ]
        cache.attention[0](tuple(states), step, AttentionOptions(scale=CASE.dim**-0.5))


def small_models() -> None:
    """Run prompts and decode steps of the main job's models as it compresses them, in the types that it loads."""
    MODELS["demo"] = json.loads((DEMO / "config.json").read_text())
    MODELS["8B, 2 layers"] = two_layers(tiny=False)
    WEIGHTS["w4a16 asym"] = ("quantkit w4a16 g128 asym", None)
    for shape in ("demo", "8B, 2 layers"):
        for dtype in (torch.float16, torch.bfloat16):
            for weights in ("w4a16", "w4a16 asym", "bf16"):
                computed_in: dict[str, Any] = {"dtype_on": lambda device, dtype=dtype: dtype}
                with mock.patch.multiple("random_model", **computed_in), mock.patch.multiple("linears", **computed_in):
                    model = make_model(shape, weights, META)
                for page in (16, PAGE):
                    _run_small(model, page)


def _run_small(model: NativeModel, page: int) -> None:
    pages = 512 // page
    cache = KVCache(model.layouts("auto", page), 8 * pages, 8, META)
    build = BatchBuilder(max_sequences=8, max_pages=pages, page_size=page, device=META).build

    def run(tokens: Sequence[int], start: int) -> None:
        holders = [
            SimpleNamespace(id=i, row=i, pages=list(range(pages)), num_table_entries=0, num_evicted=0, adapter=None)
            for i in range(len(tokens))
        ]
        batch: ForwardBatch = build(
            [ScheduledChunk(one, [1] * count, start, 1) for one, count in zip(holders, tokens, strict=True)]  # type: ignore[arg-type]
        )
        model.forward(batch, cache)

    for count in CHUNKS:
        run([count], 0)
        run([count // 2, count - count // 2] if count > 1 else [1], 0)
    for sequences in (1, 2, 4, 5, 8):
        run([1] * sequences, 60)


def record(chip: int) -> list[Launch]:
    """Every launch of a call of `run.sh`, once."""
    seen: set[str] = set()
    found: list[Launch] = []

    def keep(kernel: JITFunction[Any], *values: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
        given = arguments_of(kernel, values, named)
        launch = launch_of(kernel, given, "")
        key = launch.key + str([(n, v.data_ptr() % 16) for n, v in given.items() if isinstance(v, torch.Tensor)])
        if key not in seen:
            seen.add(key)
            found.append(launch)
            _launches.append((kernel, given))

    with pretended(keep, chip, used=True), torch.inference_mode():
        for work in (checks, decode_steps, products, attention, small_models):
            before = len(found)
            work()
            print(f"{work.__name__}: {len(found) - before} launches that are new", flush=True)
    return found


def _compile(number: int) -> str:
    """Compile a launch into the cache, with its key beside it; what fails says why."""
    kernel, given = _launches[number]
    keys: list[str] = []

    def key_of(*values: Any, **named: Any) -> str:
        keys.append(original(*values, **named))
        return keys[-1]

    import triton.compiler.compiler as compiler

    original = compiler.get_cache_key
    with mock.patch.object(compiler, "get_cache_key", key_of):
        try:
            _run(kernel, grid=(1,), warmup=True, **given)
        except Exception as error:  # compilers raise whatever they like
            return f"{kernel.__name__}: {type(error).__name__}: {error}".splitlines()[0][:200]
    for key in keys:
        own = key.removeprefix(triton_key())
        folder = Path(os.environ["TRITON_CACHE_DIR"]) / named_by(key)
        (folder / "key.json").write_text(json.dumps({"triton": triton.__version__, "key": own}))
        for source in folder.glob("*.source"):
            source.unlink()  # which nothing reads
    return ""


def named_by(key: str) -> str:
    """Return the folder that Triton keeps a kernel of this key in."""
    return base64.b32encode(hashlib.sha256(key.encode()).digest()).decode().rstrip("=")


def main() -> None:
    """Write the archive."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--chip", type=int, default=90)
    parser.add_argument("--jobs", type=int, default=default_jobs())
    parser.add_argument("--output", type=Path, default=ARCHIVE)
    arguments = parser.parse_args()
    begun = time.monotonic()
    driver.set_active(Chip(arguments.chip))
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TRITON_CACHE_DIR": cache, "TRITON_STORE_BINARY_ONLY": "1"}
        count = len(record(arguments.chip))
        with multiprocessing.get_context("fork").Pool(arguments.jobs) as pool:
            said = [line for line in pool.imap_unordered(_compile, range(count)) if line]
        for line in said:
            print(line)
        arguments.output.parent.mkdir(exist_ok=True)
        left = pack_kernels(Path(cache), [arguments.output])
    size = arguments.output.stat().st_size / 2**20
    print(
        f"{count - len(said)} of {count} launches, {size:.1f} MiB, {time.monotonic() - begun:.0f} s: {arguments.output}"
    )
    sys.exit(bool(said or left))


if __name__ == "__main__":
    main()
