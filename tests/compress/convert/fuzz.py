"""Mutated headers, configs and GGUF files against everything that reads them; a program that test_fuzz.py runs.

    python -m tests.compress.convert.fuzz FOLDER SEED COUNT

Prints one JSON object: outcomes, and every breach. A breach is any exception that is not quantkit's own, more memory
than the files bear out, or a file opened outside of the folder. Its address space is limited, so that an allocation
that a header asks for and the file does not hold fails at once.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import shutil
import sys
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from quantkit.compress.convert.source import open_source
from quantkit.compress.convert.target import target_for
from quantkit.errors import QuantkitError
from quantkit.formats import REGISTRY
from quantkit.formats.ggml.blocks import dequantize_blocks
from quantkit.formats.ggml.gguf_file import read_gguf
from quantkit.inspection import inspect
from tests.formats.schemes import linear, random_tensor

HEADROOM = 256 << 20  # for everything that libraries do beside
SLACK = 4 << 20  # what reading takes whatever the file: messages, parsed headers of Python objects
STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 31, 2**31, 2**63 - 1, 2**64, -(2**70), 1e308, 0.5),
    *("", "x", "../../etc/passwd", "/etc/passwd", "model.safetensors", "re:(", "-:[", "\u0000", "é" * 40),
    *([], [[]], {}, {"a": {}}, [0], [-1, 2], ["a"], {"bits": 4}, [2**40, 2**40], [0, 2**50]),
)

SCHEMES = {
    "gptq": linear("int4", 32),
    "gptq-v2": linear("int3", 32, symmetric=False),
    "awq": linear("int4", 32, symmetric=False),
    "compressed-tensors": linear("int4", 32, symmetric=False),
}


def make_checkpoint(folder: Path, name: str) -> None:
    """Two quantized linears and an embedding, without a tokenizer."""
    folder.mkdir(parents=True)
    format_, scheme = REGISTRY.load(name), SCHEMES[name]
    tensors = {"model.embed_tokens.weight": torch.zeros(4, 32)}
    for number in range(2):
        weight = random_tensor(number, (32, 64), scheme.weight, torch.float16)
        module = f"model.layers.{number}.mlp.up_proj"
        tensors |= {f"{module}.{local}": tensor for local, tensor in format_.encode(weight, scheme).items()}
    linears = {f"model.layers.{number}.mlp.up_proj": scheme for number in range(2)}
    config = {"architectures": ["SomeForCausalLM"], "model_type": "some", **format_.config(linears, ["lm_head"])}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _nf4(codes: torch.Tensor) -> dict[str, torch.Tensor]:
    text = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(codes.shape)}).encode()
    return {
        "weight": codes.view(-1, 2)[:, :1].contiguous(),
        "weight.absmax": torch.ones(codes.numel() // 64),
        "weight.quant_map": torch.linspace(-1, 1, 16),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(text), dtype=torch.uint8),
    }


# Formats that are read only: what config.json says, and the tensors of one linear.
_BYTES = torch.arange(32 * 64).view(32, 64)
_E4M3 = torch.float8_e4m3fn
READ_ONLY: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, _nf4((_BYTES % 256).to(torch.uint8))),
    "torchao": (
        {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {"granularity": {"_type": "PerRow"}}}},
        },
        {"_weight_qdata": (_BYTES % 100).to(torch.int8), "_weight_scale": torch.ones(32, 1)},
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "group_size": 16}},
        {
            "weight": (_BYTES[:, :32] % 256).to(torch.uint8),
            "weight_scale": torch.ones(32, 4).to(_E4M3),
            "weight_scale_2": torch.ones(()),
        },
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [16, 32]},
        {"weight": (_BYTES % 7).float().to(_E4M3), "weight_scale_inv": torch.ones(2, 2)},
    ),
}


def make_foreign(folder: Path, name: str) -> None:
    """A checkpoint of a format that is read only."""
    folder.mkdir(parents=True)
    section, local = READ_ONLY[name]
    tensors = {f"model.layers.0.mlp.up_proj.{key}": tensor for key, tensor in local.items()}
    (folder / "config.json").write_text(json.dumps({"architectures": ["Some"], "quantization_config": section}))
    (folder / "model.safetensors").write_bytes(save(tensors, {"format": "pt"}))


def read_weights(folder: Path) -> None:
    """Headers, config and every weight."""
    inspect(folder)
    source = open_source(folder)
    for module in source.linears:
        source.weight(module)


def read_checkpoint(folder: Path) -> None:
    """What a user's command would do with it."""
    read_weights(folder)
    target_for(open_source(folder), REGISTRY.load("compressed-tensors"))


def read_file(path: Path) -> None:
    """Every entry and every tensor of a GGUF file."""
    inspect(path)
    file = read_gguf(path)
    for name, info in file.tensors.items():
        dequantize_blocks(info.block, torch.tensor(list(b"".join(file.chunks(name))), dtype=torch.uint8), info.shape)


def mutate_json(data: Any, rng: random.Random) -> Any:
    """A copy with one place changed, removed or repeated."""
    data = copy.deepcopy(data)
    entries = list(_entries(data))
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        parent, key = rng.choice(entries)
        action = rng.random()
        if isinstance(parent, dict) and action < 0.15:
            parent.pop(key, None)
        elif isinstance(parent, dict) and action < 0.25:
            parent[str(rng.choice(STRANGE))] = parent.get(key)
        elif isinstance(parent, dict) or key < len(parent):
            parent[key] = copy.deepcopy(rng.choice(STRANGE))
    return data


def _entries(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from _entries(item)


def mutate_bytes(data: bytes, rng: random.Random, head: int) -> bytes:
    """A copy with bytes of its beginning changed, or cut off, or grown."""
    action, changed = rng.random(), bytearray(data)
    if action < 0.1:
        return data[: rng.randrange(len(data))]
    if action < 0.15:
        return data + bytes(rng.randrange(100))
    for _ in range(rng.choice((1, 1, 2, 8))):
        offset = rng.randrange(min(head, len(data) - 8))
        if action < 0.4:
            changed[offset : offset + 8] = rng.choice((0, 1, 2**31, 2**62, 2**64 - 1)).to_bytes(8, "little")
        else:
            changed[offset] = rng.randrange(256)
    return bytes(changed)


def mutate_header(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose header says something else."""
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(mutate_json(json.loads(data[8 : 8 + length]), rng)).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def mutate_checkpoint(folder: Path, rng: random.Random) -> None:
    """Change one file of a checkpoint."""
    kind, index = rng.random(), folder / "model.safetensors.index.json"
    if kind < 0.4 or (kind < 0.5 and not index.is_file()):
        path = folder / "config.json"
        path.write_text(json.dumps(mutate_json(json.loads(path.read_text()), rng)))
    elif kind < 0.5:
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps(mutate_json(json.loads(path.read_text()), rng)))
    else:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        path.write_bytes(mutate_header(data, rng) if kind < 0.8 else mutate_bytes(data, rng, 600))


class Watch:
    """Notes files that are opened outside of a folder, but for those of the interpreter and its libraries."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.breaches, self.armed = str(folder.resolve()), list[str](), False
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit hook."""
        if self.armed and event == "open" and isinstance(arguments[0], str | bytes):
            name = arguments[0] if isinstance(arguments[0], str) else arguments[0].decode()
            path = str(Path(name).absolute())
            libraries = (
                sys.prefix,
                sys.base_prefix,
                "/usr",
                "/proc",
                "/sys",
                str(Path(__file__).parents[3] / "quantkit"),
            )
            if not path.startswith((self.folder, *libraries)) or "passwd" in path:
                self.breaches.append(f"opened {name!r}")


def attempt(read: Callable[[Path], None], path: Path, size: int) -> tuple[str, str | None]:
    """Outcome of one mutant, and what was wrong with it, if anything."""
    tracemalloc.clear_traces()
    tracemalloc.reset_peak()
    outcome, breach = "read", None
    try:
        read(path)
    except QuantkitError as error:
        outcome = type(error).__name__
        if error.exit_code != 4 or "\n" in str(error):
            breach = f"{outcome}: {error}"
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        outcome, breach = "crash", f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
    peak = tracemalloc.get_traced_memory()[1]
    if peak > 2 * size + SLACK:
        breach = f"{peak} bytes for a file of {size}"
    return outcome, breach


def main() -> None:
    """Command line."""
    folder, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    names = list(SCHEMES)
    for name in names:
        make_checkpoint(folder / "good" / name, name)
        read_weights(folder / "good" / name)
        target_for(open_source(folder / "good" / name), REGISTRY.load("compressed-tensors"))
    for name in READ_ONLY:
        make_foreign(folder / "good" / name, name)
        read_weights(folder / "good" / name)
    names += READ_ONLY
    golden = json.loads((Path(__file__).parents[2] / "golden" / "gguf.json").read_text())
    file = bytes.fromhex(golden["file"])
    (folder / "good.gguf").write_bytes(file)
    read_file(folder / "good.gguf")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + HEADROOM, used + HEADROOM))
    watch, outcomes, breaches = Watch(folder), Counter[str](), list[str]()
    tracemalloc.start()
    started = time.monotonic()
    for number in range(count):
        path, read = folder / "bad", read_checkpoint
        if number % 3 == 2:
            path, read = folder / "bad.gguf", read_file
            path.write_bytes(mutate_bytes(file, rng, len(file)))
            size = path.stat().st_size
        else:
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(folder / "good" / names[number // 3 % len(names)], path)
            mutate_checkpoint(path, rng)
            size = sum(part.stat().st_size for part in path.iterdir())
        watch.armed = True
        outcome, breach = attempt(read, path, size)
        watch.armed = False
        outcomes[outcome] += 1
        breaches += [f"{number}: {breach}"] if breach else []
    breaches += watch.breaches
    print(json.dumps({"outcomes": outcomes, "breaches": breaches, "seconds": time.monotonic() - started}))


if __name__ == "__main__":
    main()
