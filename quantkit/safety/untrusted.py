"""Bounded reading, parsing and quoting of bytes, text, JSON and YAML from untrusted files.

This module defines no schemas; the callers check what the data means.
"""

import contextlib
import itertools
import json
import os
import re
import stat
from collections.abc import Hashable, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import yaml

from quantkit.errors import CheckpointError, InputError, first_line

CHUNK_BYTES = 1 << 22
_SEARCHED = 1 << 20  # characters

MAX_YAML_BYTES = 1 << 20
MAX_TEXT_BYTES = 1 << 30
_MAX_JSON_BYTES = 1 << 26
_AGAIN = "download or copy it again"
_MAX_NODES = 50_000
_MAX_DEPTH = 50
_MAX_DIGITS = 100
# Matches only from the first digit of a number; from every digit, the search could take a hundred times as long.
_LONG_NUMBER = re.compile(rf"(?<!\d)\d{{{_MAX_DIGITS + 1}}}", re.ASCII)
_MAX_REASON = 200
_BRACKETS: dict[type[Any], str] = {dict: "{}", list: "[]", tuple: "()"}


def shorten(value: Any, limit: int = 60) -> str:
    """Return the start of a value's `repr` for a one-line message. Values of any size are safe: the rest is not built.

    Args:
        value: anything.
        limit: maximum number of characters.
    """
    text = ""
    for part in _written(value, limit):
        text += part
        if len(text) > limit:
            return text[: limit - 3] + "..."
    return text


def check_path(path: Path, kind: type[InputError]) -> None:
    """Refuse a path that is not UTF-8 or contains a zero byte, because a report could not name it.

    Raises:
        InputError: raised as `kind`.
    """
    text = str(path)
    if "\0" in text:
        raise kind(f"{text!r} is not a path, because it contains a zero byte; give a different path")
    if not text.isascii() and text.encode(errors="ignore").decode() != text:
        raise kind(f"the path {text!r} is not UTF-8, so reports cannot name it; rename the file or folder")


@contextlib.contextmanager
def opened(path: Path, kind: type[InputError] = CheckpointError) -> Iterator[BufferedReader]:
    """Open a file for reading while the block runs; an OSError becomes an error with a one-line message.

    Args:
        path: path of the file.
        kind: error class to raise.
    """
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise kind(f"cannot read {path}: {error.strerror}; check that it exists and is readable") from error


def file_stamp(path: Path) -> tuple[int, int]:
    """Return the size and the modification time of a file, by which a caller notices that the file was written to.

    Raises:
        CheckpointError: the file cannot be opened.
    """
    with opened(path) as file:
        status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def read_chunks(path: Path, start: int, num_bytes: int, size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yield the bytes [start, start + num_bytes) of a file in chunks of at most `size` bytes.

    Raises:
        CheckpointError: the file ends before the last of these bytes, or cannot be read.
    """
    with opened(path) as file:
        file.seek(start)
        for left in range(num_bytes, 0, -size):
            chunk = file.read(min(size, left))
            if len(chunk) < min(size, left):
                raise CheckpointError(
                    f"{path} ended {left - len(chunk)} bytes early, so it was changed meanwhile; run the command again"
                )
            yield chunk


def read_text(path: Path, kind: type[InputError], limit: int = MAX_YAML_BYTES) -> str:
    """Return the text of a regular file.

    Args:
        path: path of the file; links are followed.
        kind: error class to raise.
        limit: maximum number of bytes.
    Raises:
        InputError: raised as `kind`: the file is missing, not a regular file, too large, or not UTF-8.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its other end
            raise kind(f"{path} cannot be read as text: it is not a regular file; give the path of a file")
        with path.open("rb") as file:
            # Read at most one byte more than the file has, because it may grow while it is read.
            data = b"" if status.st_size > limit else file.read(status.st_size + 1)
        if status.st_size > limit or len(data) > limit:
            raise kind(f"{path} cannot be read: it has more than {limit} bytes; give a smaller file")
        return data.decode("utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a NUL
        raise kind(f"{path} cannot be read as text: {error}") from None


def read_object(path: Path, kind: type[InputError], todo: str = _AGAIN) -> dict[str, Any]:
    """Return the JSON object in a regular file, see `parse_object`.

    Args:
        path: path of the file; links are followed.
        kind: error class to raise.
        todo: what the user should do if the JSON is not valid, for the message.
    Raises:
        InputError: raised as `kind`: the file cannot be read, or holds no JSON object.
    """
    return parse_object(read_text(path, kind, _MAX_JSON_BYTES), str(path), kind, todo)


def parse_object(text: str | bytes, where: str, kind: type[InputError], todo: str = _AGAIN) -> dict[str, Any]:
    """Parse a JSON object with limits on nesting depth and on the length of numbers.

    Args:
        text: JSON text.
        where: name of the file, for messages.
        kind: error class to raise.
        todo: what the user should do if the JSON is not valid, for the message.
    Raises:
        InputError: raised as `kind`: the text is not JSON, or not an object.
    """
    try:
        plain = text if isinstance(text, str) else text.decode("utf-8-sig")
        # Calling a function for each number would take eight times as long.
        data = json.loads(plain, parse_int=_whole_number if _has_long_number(plain) else None)
        _check_values(data, has_escapes="\\u" in plain)
    except (ValueError, RecursionError) as error:
        raise kind(f"{where} is not valid JSON ({_one_line(first_line(error))}); {todo}") from None
    if not isinstance(data, dict):
        raise kind(f"{where} holds a JSON {type(data).__name__}, not an object; {todo}")
    return data


def _has_long_number(text: str) -> bool:
    # Search in slices, because other threads of Python wait while a search runs.
    starts = range(0, len(text), _SEARCHED)
    return any(_LONG_NUMBER.search(text, start, start + _SEARCHED + _MAX_DIGITS) for start in starts)


def _whole_number(text: str) -> int:
    # For long numbers, `int` takes quadratic time, and for very long ones it raises an error of its own.
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits, over the limit of {_MAX_DIGITS}")
    return int(text)


def _check_values(data: Any, *, has_escapes: bool) -> None:
    # Go through the values level by level, because recursion over deeply nested values would fail.
    level = [data] if isinstance(data, dict | list) else []
    for _ in range(_MAX_DEPTH + 1):
        if has_escapes:  # an escape may be half of a surrogate pair, which cannot be printed
            keys = (key for item in level if isinstance(item, dict) for key in item)
            texts = (item for items in _inside(level) for item in items if isinstance(item, str))
            for text in itertools.chain(keys, texts):
                text.encode()
        level = [item for items in _inside(level) for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise ValueError(f"values are nested more than {_MAX_DEPTH} deep")


def _inside(level: list[Any]) -> Iterator[Iterable[Any]]:
    return (item.values() if isinstance(item, dict) else item for item in level)


def parse_yaml(text: str, where: str, kind: type[InputError]) -> Any:
    """Parse YAML as plain data. Duplicate keys and aliases are errors, and 1e-3 is a number.

    Args:
        text: content of the file.
        where: name of the file, for messages.
        kind: error class to raise.
    Raises:
        InputError: raised as `kind`: the text is not YAML, too large, or nested too deeply; names the line if known.
    """
    if len(text) > MAX_YAML_BYTES:
        raise kind(f"{where} has {len(text)} characters of YAML, over the limit of {MAX_YAML_BYTES}; shorten it")
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}:" if mark else ""
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise kind(f"{where}: not valid YAML:{line} {_one_line(problem)}") from None
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        # Raised for an impossible date such as 2024-13-01, and for `!!bool maybe` or `!!timestamp soon`.
        raise kind(f"{where}: not valid YAML: {_one_line(str(error))}") from None


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_REASON else f"{line[: _MAX_REASON - 3]}..."


def _written(value: Any, limit: int) -> Iterator[str]:
    """Yield the `repr` of a value part by part; each part is at most a few times `limit` long."""
    brackets = _BRACKETS.get(type(value))
    if brackets is not None:
        yield brackets[0]
        for index, item in enumerate(value):
            yield ", " if index else ""
            yield from _written(item, limit)
            if type(value) is dict:
                yield ": "
                yield from _written(value[item], limit)
        yield "," if type(value) is tuple and len(value) == 1 else ""
        yield brackets[1]
    elif isinstance(value, str | bytes):
        # Cut before `repr` is called, because the `repr` of a long text is at least as long.
        yield repr(value[: limit + 1])
    elif type(value) is int and value.bit_length() > 4 * limit:
        yield f"a whole number of {value.bit_length()} bits"  # Python refuses to print very large numbers
    else:
        yield repr(value)


class _Loader(yaml.SafeLoader):
    """Safe YAML loader that refuses aliases, duplicate keys, and documents with too many or too deep values."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node, or refuse it; in PyYAML itself, a kilobyte of aliases can expand to a terabyte."""
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(
                None, None, "aliases (*name) are not supported: write the value out", mark
            )
        self._depth, self._num_nodes = self._depth + 1, self._num_nodes + 1
        if self._depth > _MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"values are nested more than {_MAX_DEPTH} deep", mark)
        if self._num_nodes > _MAX_NODES:
            raise yaml.composer.ComposerError(None, None, f"there are more than {_MAX_NODES} values", mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode) and node.value.encode(errors="ignore").decode() != node.value:
            raise yaml.composer.ComposerError(
                None, None, "a text has half of a surrogate pair, which cannot be printed", mark
            )
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build a mapping, or refuse one with two equal keys, of which PyYAML would silently use the last."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                continue  # a list as a key is refused by PyYAML itself
            if key in seen:
                problem = f"key {shorten(key)} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Build a number, or refuse one with too many digits: such a number can take minutes to parse (in base 60), and
        Python cannot print it.
        """
        if len(str(node.value)) > _MAX_DIGITS:
            problem = f"a number has {len(node.value)} characters, over the limit of {_MAX_DIGITS}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        whole = node.tag.endswith(":int")
        return super().construct_yaml_int(node) if whole else super().construct_yaml_float(node)


# YAML 1.1 reads 1e-3 as text because it has no dot; people and YAML 1.2 read it as a number.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)
for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)
