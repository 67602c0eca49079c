"""Launches of quantkit's kernels, recorded instead of made, and the key under which their compiled form is known.

A key says what is compiled: the source of a kernel and of all device functions it calls, the types of its arguments,
its constants, what Triton may assume of numbers, warps and stages. Comments, docstrings, line numbers, paths and
versions are not in it, so it only changes where the machine code may.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import io
import pkgutil
import textwrap
import tokenize
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

import quantkit.kernels.gpu as kernels

PROCESSORS = 132  # multiprocessors of the device that is pretended
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
}
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)
_KEYS: dict[Any, str] = {}


@dataclass
class Launch:
    """One recorded launch."""

    kernel: JITFunction[Any]
    label: str
    signature: dict[str, Any] = field(default_factory=dict)
    constants: dict[tuple[int, ...], Any] = field(default_factory=dict)
    attributes: dict[tuple[int, ...], Any] = field(default_factory=dict)
    options: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the kernel."""
        return str(self.kernel.__name__)

    @property
    def dtype(self) -> str:
        """Of the model, as it ends the label."""
        return self.label.rpartition(", ")[2]

    @cached_property
    def key(self) -> str:
        """The same for launches that compile to the same code."""
        said = (
            source_key(self.kernel),
            list(self.signature.items()),
            sorted((path, repr(value)) for path, value in self.constants.items()),
            sorted(self.attributes.items()),
            sorted(self.options.items()),
        )
        return hashlib.sha256(repr(said).encode()).hexdigest()[:16]

    @property
    def traits(self) -> set[tuple[Any, ...]]:
        """Each type, constant and option of the kernel for itself."""
        said: list[tuple[Any, Any]] = [*self.signature.items(), *self.options.items()]
        said += [(path, repr(value)) for path, value in self.constants.items()]
        return {(self.name, what, repr(value)) for what, value in said}


@dataclass
class Recorder:
    """A stand-in for the launcher of every kernel."""

    label: str = ""
    suffix: str = ""
    launches: dict[str, Launch] = field(default_factory=dict)

    def record(self, kernel: JITFunction[Any], *values: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
        """Keep a launch instead of making it."""
        launch = launch_of(kernel, arguments_of(kernel, values, named), self.label + self.suffix)
        self.launches.setdefault(launch.key, launch)


@contextmanager
def pretended(record: Callable[..., None], chip: int, *, used: bool = False) -> Iterator[None]:
    """Hand every launch to `record` in place of making it, while open, as on a GPU.

    Args:
        record: takes what `JITFunction.run` takes.
        chip: compute capability.
        used: tensors on any device are for the kernels.
    """
    given: dict[str, Any] = {"num_processors": lambda device: PROCESSORS, "capability": lambda device: chip}
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(JITFunction, "run", lambda kernel, *v, **named: record(kernel, *v, **named))
        )
        if used:
            stack.enter_context(mock.patch.object(kernels, "is_used", lambda device: True))
        for module in modules():
            for name, value in given.items():
                if name in vars(module):
                    stack.enter_context(mock.patch.object(module, name, value))
        yield


def modules() -> list[ModuleType]:
    """Return the modules of the GPU kernels."""
    return [
        importlib.import_module(f"{kernels.__name__}.{info.name}") for info in pkgutil.iter_modules(kernels.__path__)
    ]


def arguments_of(kernel: JITFunction[Any], values: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a launch by name, options and defaults included."""
    defaults = {
        name: kernel.params[index].default
        for index, name in enumerate(kernel.arg_names)
        if kernel.params[index].has_default
    }
    return defaults | dict(zip(kernel.arg_names, values, strict=False)) | named


def launch_of(kernel: JITFunction[Any], arguments: dict[str, Any], label: str) -> Launch:
    """What is compiled for a launch with these arguments."""
    launch = Launch(kernel, label, options={key: arguments[key] for key in _OPTIONS if key in arguments})
    for index, name in enumerate(kernel.arg_names):
        launch.signature[name] = _sign(arguments[name], (index,), kernel.params[index].is_constexpr, launch)
    return launch


def _sign(value: Any, path: tuple[int, ...], constant: bool, launch: Launch) -> Any:
    """The type of an argument as the compiler wants it; what Triton would specialize on is noted in the launch."""
    if isinstance(value, tuple) and not constant:
        return tuple(_sign(item, (*path, index), constant, launch) for index, item in enumerate(value))
    if constant or value is None or (isinstance(value, int) and not isinstance(value, bool) and value == 1):
        launch.constants[path] = value
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    aligned = True if isinstance(value, torch.Tensor) else value % 16 == 0
    if aligned:
        launch.attributes[path] = [["tt.divisibility", 16]]
    return f"*{_TYPES[value.dtype]}" if isinstance(value, torch.Tensor) else "i32"


def source_key(kernel: JITFunction[Any]) -> str:
    """Hash of a kernel's source with that of the device functions and constants it names."""
    if kernel not in _KEYS:
        sources: dict[str, str] = {}
        _collect(kernel, sources)
        _KEYS[kernel] = hashlib.sha256(
            "\n".join(f"{name}\n{sources[name]}" for name in sorted(sources)).encode()
        ).hexdigest()
    return _KEYS[kernel]


def _collect(kernel: JITFunction[Any], sources: dict[str, str]) -> None:
    function = kernel.fn
    own = f"{function.__module__}.{function.__qualname__}"
    if own in sources:
        return
    source = textwrap.dedent(inspect.getsource(function))
    sources[own] = _tokens(source)
    for name, value in _named(ast.parse(source), function.__globals__):
        if isinstance(value, JITFunction):
            _collect(value, sources)
        elif isinstance(value, (int, float, str)) or type(value).__name__ == "constexpr":
            sources[f"{own}.{name}"] = repr(value)


def _named(tree: ast.AST, known: dict[str, Any]) -> list[tuple[str, Any]]:
    """What the names in a function stand for, also those behind a module's name."""
    values = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in known:
            values.append((node.id, known[node.id]))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = known.get(node.value.id)
            if isinstance(module, ModuleType) and not module.__name__.startswith("triton"):
                values.append((f"{node.value.id}.{node.attr}", getattr(module, node.attr, None)))
    return values


def _tokens(source: str) -> str:
    """Source from `def` on without comments, docstring and blank lines."""
    kept, words = [], tokenize.generate_tokens(io.StringIO(source[source.index("def ") :]).readline)
    previous = tokenize.INDENT
    for word in words:
        if word.type in _LAYOUT:
            continue
        if word.type == tokenize.STRING and previous == tokenize.INDENT:
            previous = tokenize.STRING
            continue
        previous = word.type
        kept.append({tokenize.INDENT: ">", tokenize.DEDENT: "<", tokenize.NEWLINE: ";"}.get(word.type, word.string))
    return " ".join(kept)
