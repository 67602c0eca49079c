"""What strangers may put into a file that a command reads: mutations by structure, all drawn from one generator.

hostile.mutate(path, random.Random(7), outside)    # says in one line what it did
"""

from __future__ import annotations

import copy
import json
import os
import random
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 31, 2**31, 2**63 - 1, 2**64, -(2**70), 10**99, 1e308, -1e-320, 0.5),
    *(float("nan"), float("inf"), "", "x", "../../etc/passwd", "/etc/passwd", "model.safetensors", "re:(", "-:["),
    *("re:(.|..)*(.|..)*(.|..)*$^", "\0", "\n", "\x1b[2J", "é" * 40, "\U0001f600", "<script>alert(1)</script>"),
    *(
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 7 ** (10 ** 9) }}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ ([[]] * 10 ** 8) | tojson }}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% include 'chat_template.jinja' %}",
        "a" * 100_000,
        "none/such",
        "2024-13-01",
    ),
    *(
        {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "h"}, "content": "hh"}] * 40},
        {"type": "Split", "pattern": {"Regex": "(h+h+)+!"}, "behavior": "Isolated", "invert": False},
        {"type": "Replace", "pattern": {"Regex": "( *)*!"}, "content": " " * 10**6},
    ),
    *([], [[]], {}, {"a": {}}, [0], [-1, 2], ["a"], [["a"]], {"bits": 4}, [2**40, 2**40], [0, 2**50], [None] * 5000),
)
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghi")
)
TEXTS: dict[str, Callable[[], str | bytes]] = {
    "nothing": lambda: "",
    "deep lists": lambda: "[" * 100_000,
    "deep but closed": lambda: '{"a": ' * 400 + "1" + "}" * 400,
    "digits": lambda: '{"vocab_size": ' + "9" * 5000 + "}",
    "half a character": lambda: r'{"architectures": ["\ud800"], "name": "\ud800"}',
    "aliases": lambda: BOMB,
    "base 60": lambda: "weights: 1" + ":59" * 5000,
    "no UTF-8": lambda: b"\xff\xfe\x00a" * 50,
    "zero bytes": lambda: b"\0" * 4096,
    "a list": lambda: "[1, 2]",
    "a text": lambda: '"text"',
    "many keys": lambda: json.dumps({str(i): i for i in range(200_000)}),
    "a long line": lambda: "x" * 3_000_000,
}


def mutate(path: Path, generator: random.Random, outside: Path) -> str:
    """Change a file, or what is at its name; returns what was done.

    Args:
        path: of the file; missing ones stay so.
        generator: draws.
        outside: a folder of the user's that links may lead to.
    """
    kinds: list[Callable[[Path, random.Random], str]] = [_text, _bytes, _truncated]
    if path.suffix in (".json", ".yaml"):
        kinds += [_structure] * 12
    elif path.suffix in (".safetensors", ".gguf"):
        kinds += [_header] * 12
    elif path.suffix in (".jinja", ".txt", ".jsonl"):
        kinds += [_lines] * 6
    if generator.random() < 0.12:
        return _name(path, generator, outside)
    try:
        return generator.choice(kinds)(path, generator)
    except (ValueError, KeyError, TypeError, struct.error, RecursionError, yaml.YAMLError):
        return _text(path, generator)  # it was changed beyond this kind already


def _text(path: Path, generator: random.Random) -> str:
    name = generator.choice(list(TEXTS))
    text = TEXTS[name]()
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return name


def _bytes(path: Path, generator: random.Random) -> str:
    data = bytearray(path.read_bytes())
    count = generator.choice([1, 1, 4, 64])
    for _ in range(count if data else 0):
        data[generator.randrange(min(len(data), generator.choice([16, 4096, 1 << 30])))] = generator.randrange(256)
    path.write_bytes(data)
    return f"{count} bytes changed"


def _truncated(path: Path, generator: random.Random) -> str:
    size = path.stat().st_size
    end = generator.choice([generator.randrange(size + 1), max(0, size - 1), min(size, 8), size + 100])
    os.truncate(path, end)
    return f"cut at {end} of {size}"


def _name(path: Path, generator: random.Random, outside: Path) -> str:
    """Something else than a file, or further files beside it."""
    kind = generator.choice(
        ["pipe", "link out", "link to a device", "link to itself", "folder", "large", "beside", "gone"]
    )
    if kind == "beside":
        raw = generator.choice(
            [b"tokenizer_\xff.json", b"model\n.safetensors", b"tokenizer_\x1b[2J.json", b"a.safetensors"]
        )
        (Path(os.fsdecode(os.fsencode(path.parent) + b"/" + raw))).write_bytes(b"{}")
        return f"beside it {raw!r}"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link out":
        path.symlink_to(outside / "secret.txt")
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "link to itself":
        path.symlink_to(path.name)
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        path.touch()
        os.truncate(path, 1 << 40)
    return kind


def _structure(path: Path, generator: random.Random) -> str:
    text = path.read_text()
    data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    done = [_change(data, generator) for _ in range(generator.choice([1, 1, 1, 2, 4]))]
    path.write_text(json.dumps(data))
    return "; ".join(done)


def _change(data: Any, generator: random.Random) -> str:
    """Replace, remove, add, rename or nest one value; shallow ones more often than their number."""
    trail, box = [], data
    while isinstance(box, dict | list) and box:
        key = generator.choice(list(box)) if isinstance(box, dict) else generator.randrange(len(box))
        trail.append(key)
        inner = box[key]
        if not isinstance(inner, dict | list) or not inner or generator.random() < 0.25:
            break
        box = inner
    if not trail:
        return "nothing to change"
    where, old = ".".join(map(str, trail))[:80], box[key]
    kind = generator.choice(["replace"] * 6 + ["remove", "add", "rename", "nest", "grow"])
    if kind == "remove":
        del box[key]
    elif kind in ("add", "rename") and isinstance(box, dict):
        box[generator.choice(["x", "", "__class__", "auto_map", "quantization_config", key + "s"])] = (
            box.pop(key) if kind == "rename" else _strange(generator)
        )
    elif kind == "nest":
        for _ in range(generator.choice([1, 60, 300])):
            box[key] = generator.choice([[box[key]], {"a": box[key]}])
    elif kind == "grow" and isinstance(old, list | str):
        box[key] = old * (1000 if len(json.dumps(old)) < 1 << 17 else 2)
    else:
        box[key] = _strange(generator)
    return f"{kind} {where}: {str(box[key])[:40] if kind == 'replace' else ''}"


def _strange(generator: random.Random) -> Any:
    """A copy: what is put into a document may be changed there, and again in the next run."""
    return copy.deepcopy(generator.choice(STRANGE))


def _header(path: Path, generator: random.Random) -> str:
    """The header of a safetensors file as JSON; of a GGUF file its counts and lengths."""
    data = path.read_bytes()
    if path.suffix == ".gguf":
        changed = bytearray(data)
        at = generator.choice([4, 8, 16, generator.randrange(24, max(25, min(len(data) - 8, 60_000)))])
        value = generator.choice([0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, 100, generator.randrange(1 << 20)])
        changed[at : at + 8] = struct.pack("<Q", value)
        path.write_bytes(changed)
        return f"{value} at byte {at}"
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    done = _change(header, generator)
    text = json.dumps(header).encode()
    length = generator.choice([len(text)] * 8 + [0, 2**63, len(text) + 1, 10**8])
    path.write_bytes(struct.pack("<Q", length) + text + rest)
    return done


def _lines(path: Path, generator: random.Random) -> str:
    value = generator.choice([item for item in STRANGE if isinstance(item, str)])
    position = generator.choice(["before", "behind", "alone"])
    text = path.read_text()
    path.write_text({"before": value + text, "behind": text + value, "alone": value}[position])
    return f"{value[:40]!r} {position}"
