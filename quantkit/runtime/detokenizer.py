"""Conversion of token ids to text while the tokens arrive, and search for stop texts.

A delta is text that no later token can change. Incomplete characters, and text that may be the beginning of a stop
text, are held back until later tokens decide about them. The concatenated deltas equal the text from decoding all
tokens at once, with two exceptions. First, the deltas keep all spaces, because clean-up would rewrite text already
shown. Second, if a byte is invalid UTF-8, decoding all tokens at once with a byte-fallback tokenizer replaces the whole
run of bytes around it, whereas the deltas keep those characters of the run that were already shown.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from quantkit.runtime.dialects.answer_parser import overlap

TextOf = Callable[[list[int]], str]

_BROKEN = "\ufffd"
# Once the window has more than `_WINDOW` tokens, decoding restarts with the last `_CONTEXT` tokens. That is enough: how
# a tokenizer decodes a token depends at most on the token's neighbours and on whether it is the first of all.
_WINDOW, _CONTEXT = 16, 4


def decoder(tokenizer: Any, shown: Collection[int] = ()) -> TextOf:
    """Return a function that decodes token ids with a transformers tokenizer.

    The function skips special tokens and keeps spaces as they are.

    Args:
        tokenizer: the tokenizer.
        shown: special tokens that are not skipped.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)  # does the same thing without 30 us of dispatch
    text_of = partial(tokenizer.decode, clean_up_tokenization_spaces=False) if backend is None else backend.decode
    if not shown:
        return lambda ids: text_of(ids, skip_special_tokens=True)
    hidden = set(special_tokens(tokenizer).values()) - set(shown)
    return lambda ids: text_of([token for token in ids if token not in hidden], skip_special_tokens=False)


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the ids of the special tokens, which decoding skips, keyed by token text."""
    return {str(each): token for token, each in tokenizer.added_tokens_decoder.items() if each.special}


class Detokenizer:
    """Converts the tokens of one sequence to text, one token after another.

    Args:
        text_of: converts ids to text, see `decoder`.
        context: tokens before the first pushed token; their text is not returned. If the context is the prompt, the
            deltas continue the prompt's text (a leading space stays). If the context is empty, the deltas are the text
            of the new tokens alone.
    """

    def __init__(self, text_of: TextOf, context: list[int] | tuple[int, ...] = ()) -> None:
        self._text_of = text_of
        self._window, self._shown = _beginning(text_of, list(context[-_WINDOW:]))  # tokens, returned characters

    def push(self, token: int) -> str:
        """Return the text that this token completes; often empty, sometimes several characters."""
        window = self._window
        window.append(token)
        text = self._text_of(window)
        stable = text.rstrip(_BROKEN)  # the part cut off may be the first bytes of a character
        delta = stable[self._shown :]
        # Never decreases: byte fallback replaces whole runs of bytes, so the text may get shorter than returned text.
        self._shown = max(self._shown, len(stable))
        # Without a bound, each token would decode all earlier ones again, and a long output would take quadratic time.
        if len(window) > _WINDOW and stable == text:
            self._restart(text)
        return delta

    def flush(self) -> str:
        """Return the text that is still held back, including incomplete characters; call this last."""
        return self._text_of(self._window)[self._shown :] if self._window else ""

    def _restart(self, text: str) -> None:
        """Drop the beginning of the window if the remaining tokens still decode to the end of the same text."""
        recent = self._window[-_CONTEXT:]
        kept = self._text_of(recent)
        # If `kept` is empty, the next token would be treated as the first of all and might lose its leading space.
        if kept and text.endswith(kept):
            self._window, self._shown = recent, len(kept)


def _beginning(text_of: TextOf, context: list[int]) -> tuple[list[int], int]:
    """Return the last context tokens that decode to complete characters, and the length of their text."""
    for size in range(min(_CONTEXT, len(context)), len(context)):
        text = text_of(context[-size:])
        if text and _BROKEN not in text:
            return context[-size:], len(text)
    # If the context ends with an incomplete character, that character belongs to the text of the next tokens.
    return context, len(text_of(context).rstrip(_BROKEN)) if context else 0


class StopFinder:
    """Finds the first of several stop texts in a stream.

    Args:
        stops: the stop texts; may be empty.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, delta: str) -> tuple[str, bool]:
        """Return the text that certainly precedes any stop text, and whether a stop text was found.

        The stop text and the text after it are dropped.
        """
        text = self._held + delta
        starts = [start for start in (text.find(stop) for stop in self._stops) if start >= 0]
        if starts:
            self._held = ""
            # The stop text that occurs first ends the text, whatever the order of `stops`.
            return text[: min(starts)], True
        size = overlap(text, self._stops)
        self._held = text[len(text) - size :]
        return text[: len(text) - size], False

    def flush(self) -> str:
        """Return the text that is still held back, because it might be the beginning of a stop text; call this last."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """Converts the tokens of one request to text, which ends before the first stop text.

    Args:
        text_of: converts ids to text.
        prompt: prompt token ids, the context of the output.
        stops: stop texts; may be empty.
    """

    def __init__(self, text_of: TextOf, prompt: list[int], stops: tuple[str, ...]) -> None:
        self._detokenizer = Detokenizer(text_of, prompt)
        self._finder = StopFinder(stops)

    def push(self, token: int) -> tuple[str, bool]:
        """Return the additional text that no later token can change, and whether a stop text follows this text."""
        return self._finder.push(self._detokenizer.push(token))

    def flush(self) -> tuple[str, bool]:
        """Return the remaining text when the request ends, and whether it contained a stop text."""
        text, stopped = self._finder.push(self._detokenizer.flush())
        return (text, True) if stopped else (text + self._finder.flush(), False)
