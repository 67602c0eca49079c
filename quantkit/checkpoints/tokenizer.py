"""Load a model's tokenizer and chat template, and test them in a child process before use."""

import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from quantkit.checkpoints.folder import text_folder
from quantkit.errors import ModelError, first_line
from quantkit.machine.system import ends_well

_TIMEOUT_S, _MAX_BYTES = 20.0, 1 << 30
_CHAT_S, _CHAT_BYTES = 10.0, 1 << 30
_CHAT_CHARACTERS, _CHAT_GROWTH = 1 << 20, 8
# tokenizers takes 0.2 ms per added token; published models add at most 65,536, listed in both files.
_MAX_ADDED_TOKENS, _MAX_FILE_BYTES = 1 << 18, 1 << 28
# Growth in characters. Unicode normalization turns one character into at most 18.
_MAX_GROWTH = 1000
# Digits, accents, an emoji, another script, spaces and repeats: tokenizers treat these specially.
_SAMPLE = "The quick brown fox, 12.5 km/h: à l'été — \U0001f98a 狐狸\n\tdef f(x):  return x_1**2  # aaaaaaaa\n"

_TURNS = tuple({"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant", "user"))


def load_tokenizer(folder: Path) -> Any:
    """Load a transformers tokenizer without running code from its folder, and without asking whether to run it.

    Args:
        folder: folder of the model, or a GGUF file.
    Raises:
        ModelError: the tokenizer is missing or broken, or needs too much time or memory for a line of text.
    """
    from transformers import AutoTokenizer

    folder = text_folder(folder)
    _check_size(folder)
    try:
        with quiet_stdout():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # many classes for broken files; Rust's panics are not Exceptions
        raise ModelError(f"{folder}: cannot load the tokenizer: {first_line(error)}") from error

    _check_growth(folder, getattr(tokenizer, "backend_tokenizer", None))
    # For instance, thirty steps that each insert text can turn a line into gigabytes.
    if not ends_well(partial(_try_out, tokenizer), seconds=_TIMEOUT_S, num_bytes=_MAX_BYTES):
        raise ModelError(
            f"{folder}: the tokenizer fails on a line of text, or needs over {_TIMEOUT_S:.0f} s or 1 GiB for it; "
            "download or copy the tokenizer's files again"
        )
    return tokenizer


def render_chat(renderer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Render a conversation with an untrusted chat template.

    Args:
        renderer: a tokenizer or processor of transformers that has a template.
        messages: [{"role": "user", "content": "..."}, ...]; not modified. The arguments of a tool call may be an object
            or JSON text; the template receives the form that it expects.
        options: further variables for the template.
    Raises:
        TimeoutError: the template takes too much time or memory.
        ValueError: the rendered text is far longer than the conversation.
        Exception: any error that the template raises.
    """
    render = partial(renderer.apply_chat_template, **options, tokenize=False)
    template = str(renderer.chat_template)
    # Only a process can be stopped inside an operation such as 10**10**10. A child process for every conversation would
    # slow down a server, so a child renders only the first conversation, and a sample with several turns.
    if _TRIED_TEMPLATES.get(renderer) != template:
        work = partial(_try_template, render, (list(messages), _TURNS))
        if not ends_well(work, seconds=_CHAT_S, num_bytes=_CHAT_BYTES):
            raise TimeoutError(f"rendering takes more than {_CHAT_S:.0f} s or {_CHAT_BYTES >> 20} MiB")
        _TRIED_TEMPLATES[renderer] = template
    if any(message.get("tool_calls") for message in messages):
        messages = _with_arguments(messages, as_text=_takes_text(renderer))
    text = str(render(list(messages)))
    given = len(repr((messages, options)))
    if len(text) > _CHAT_CHARACTERS + _CHAT_GROWTH * given:  # would take a tokenizer minutes
        raise ValueError(f"rendering turns {given} characters into {len(text)}")
    return text


_TRIED_TEMPLATES: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def _with_arguments(messages: Sequence[Mapping[str, Any]], *, as_text: bool) -> list[Mapping[str, Any]]:
    """Return the messages with the arguments of all tool calls as JSON text if `as_text`, otherwise as objects."""
    return [
        {**message, "tool_calls": [_with_argument(call, as_text) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_argument(call: Any, as_text: bool) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    given = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or (isinstance(given, str) == as_text and given):
        return call
    if as_text:
        arguments: Any = json.dumps(given or {}, ensure_ascii=False)
    else:
        try:
            arguments = json.loads(given or "{}") if isinstance(given, str) or given is None else given
        except (ValueError, RecursionError):  # not JSON: the template inserts the text unchanged
            return call
    return {**call, "function": {**function, "arguments": arguments}}


def _takes_text(renderer: Any) -> bool:
    """Whether a chat template expects the arguments of tool calls as JSON text.

    Most templates convert an object to JSON themselves. Others insert the arguments into a text without converting
    them: such a template fails on an object, or prints it as a Python dict.
    """
    as_object = _with_call(renderer, {"probed": 1})
    is_shown = as_object is not None and "{'probed': 1}" not in as_object
    return not is_shown and _with_call(renderer, '{"probed": 1}') is not None


def _with_call(renderer: Any, arguments: Any) -> str | None:
    """Render a conversation with a tool call; None if the chat template fails on it."""
    call = {"id": "123456789", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    try:
        return str(renderer.apply_chat_template([_TURNS[0], answer], tokenize=False))
    except Exception:  # templates raise whatever their author chose
        return None


def _try_template(render: Any, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    for messages in conversations:
        try:
            render(messages)
        except MemoryError:
            raise
        except Exception:  # the parent raises it again and reports it
            continue


def _check_size(folder: Path) -> None:
    """Refuse files that would take minutes or gigabytes to load."""
    for name in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json"):
        file = folder / name
        with suppress(OSError):  # missing or unreadable: the loader reports it
            if file.stat().st_size > _MAX_FILE_BYTES:
                raise ModelError(
                    f"{file} has {file.stat().st_size} bytes, over the limit of {_MAX_FILE_BYTES}; download it again"
                )
            count = file.read_bytes().count(b'"content"') if file.is_file() else 0
            if count > _MAX_ADDED_TOKENS:
                raise ModelError(
                    f"{file} adds {count} tokens, over the limit of {_MAX_ADDED_TOKENS}; download it again"
                )


def _check_growth(folder: Path, steps: Any) -> None:
    """Refuse a normalizer or decoder that can make some texts extremely long."""
    for kind in ("normalizer", "decoder"):
        step = getattr(steps, kind, None)
        growth = 1 if step is None else _growth(json.loads(step.__getstate__()))
        if growth > _MAX_GROWTH:
            raise ModelError(
                f"{folder}/tokenizer.json has a {kind} that may make a text {min(growth, 10**9):.0f} times as long, "
                f"over the limit of {_MAX_GROWTH}; download it again"
            )


def _growth(step: dict[str, Any]) -> float:
    """Return the largest factor by which a normalizer or decoder, including the steps in it, can lengthen a text."""
    inner = step.get("normalizers") or step.get("decoders")
    if inner:
        # Bounded, since a product of very many factors overflows.
        return min(prod(_growth(one) for one in inner[:_MAX_GROWTH]), 1e300)
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        # A regular expression may match the empty text before every character.
        return max(1, len(step["content"]) / len(pattern)) if pattern else 1 + len(step["content"])
    if step["type"] == "Precompiled":
        # As in sentencepiece: the size of an index, the index, and a table of the replacement texts.
        table = base64.b64decode(step["precompiled_charsmap"])
        texts = table[4 + int.from_bytes(table[:4], "little") :]
        return max([1, *(len(text) for text in texts.split(b"\0"))])
    return 1


def _try_out(tokenizer: Any) -> None:
    tokenizer.decode(tokenizer(_SAMPLE, verbose=False)["input_ids"])


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """Redirect stdout to stderr in the `with` block: Rust code prints warnings to stdout, which is for results only."""
    try:
        stdout = os.dup(1)
    except OSError:  # closed
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
