"""What users give as prompts, before it is token ids: texts, tokenizers, and one prompt or several."""

from __future__ import annotations

from collections.abc import Sequence as Many

from quantkit.errors import RequestError

Prompt = str | Many[int]


def several(prompts: Prompt | Many[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt or several."""
    if isinstance(prompts, str):
        return [prompts]
    if all(isinstance(item, int) for item in prompts) and len(prompts):
        return [prompts]  # type: ignore[list-item]  # token ids of one prompt
    return list(prompts)  # type: ignore[arg-type]


def checked_text(text: str) -> str:
    """A text that has bytes; from a terminal or a pipe may come some that are no text, which Python keeps as halves."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError("the prompt is not UTF-8; convert it, for instance with iconv -t utf-8") from None
    return text
