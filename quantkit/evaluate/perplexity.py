"""Measure the perplexity of a text in windows, by prefill or token by token through the cache.

The text is tokenized once, without BOS. A window begins every `stride` tokens and has at most `window` tokens,
including its BOS if the tokenizer adds one:

    window 6, stride 4, BOS        tokens   0 1 2 3 4 5 6 7 8 9 10 11
                                   window 0 B 0 1 2 3 4                    scores 0 to 4
                                   window 1         B 4 5 6 7 8            scores 5 to 8
                                   window 2                 B 8 9 10 11    scores 9 to 11

Each token is scored at most once, in the first window that contains it. The first token of the text is scored only if
BOS precedes it. With the default stride, windows do not overlap, as in the quantization literature, which scores
WikiText-2 in windows of 2048 tokens. The first token of such a window is not scored unless BOS precedes it.
"""

import math
from collections.abc import Sequence
from typing import Any

from quantkit.errors import DataError
from quantkit.evaluate.loading import Evaluated
from quantkit.evaluate.work_sharing import Say, score_in_turns
from quantkit.results import PerplexityResult, Through
from quantkit.runtime.types import ScoredText

DEFAULT_WINDOW = 2048
_CHUNKS: dict[str, int | None] = {"prefill": None, "decode": 1}


def perplexity(
    llm: Evaluated,
    text: str | Sequence[int],
    *,
    data: str = "text",
    window: int | None = None,
    stride: int | None = None,
    through: Through = "prefill",
    max_windows: int | None = None,
    add_bos: bool | None = None,
    say: Say | None = None,
) -> PerplexityResult:
    """Measure the perplexity of one text.

    Args:
        llm: model to measure.
        text: a text, or token ids.
        data: name of the text, for the record.
        window: tokens per window including BOS; None = 2048, or the model's context if that is shorter.
        stride: tokens from the start of one window to the next; None = no overlap.
        through: "prefill" computes a window in one pass; "decode" computes it token by token, with the earlier tokens
            in the cache.
        max_windows: maximum number of windows; None = all.
        add_bos: whether windows begin with BOS; None = as the tokenizer does (without a tokenizer: no).
        say: callback for progress.
    Raises:
        DataError: the text has fewer than two tokens, `window` or `stride` is out of range, `through` is unknown, or
            there is no tokenizer or BOS token.
        RequestError: a token id is not in the vocabulary.
    """
    if through not in _CHUNKS:
        raise DataError(f"the setting 'through' is {through!r}; give 'prefill' or 'decode'")
    capacity = llm.capacity
    window = min(DEFAULT_WINDOW, capacity) if window is None else window
    if not 2 <= window <= capacity:
        raise DataError(f"window is {window} tokens; it must be 2 to {capacity}, the context of {llm.path}")
    bos = leading_bos(llm, add_bos)
    num_text = window - len(bos)
    stride = num_text if stride is None else stride
    if not 1 <= stride <= num_text:
        raise DataError(
            f"stride is {stride}; it must be 1 to {num_text}, the number of text tokens in a window of {window}"
        )
    ids = token_ids(llm, text)
    windows = cut_windows(ids, num_text=num_text, stride=stride, bos=bos)[:max_windows]
    if not windows:
        raise DataError(f"the text {data!r} is too short to score: give at least two tokens")
    scores = score_in_turns(llm, windows, chunk_size=_CHUNKS[through], say=say, items="windows")
    return PerplexityResult(
        data=data,
        window=window,
        stride=stride,
        through=through,
        # fsum, because paired windows are subtracted later and the error of a float32 sum shows in their difference.
        window_nll=tuple(-math.fsum(score.logprobs.tolist()) for score in scores),
        window_tokens=tuple(item.num_scored for item in windows),
        read_tokens=min(len(ids), stride * (len(windows) - 1) + num_text),
        text_tokens=len(ids),
    )


def cut_windows(ids: Sequence[int], *, num_text: int, stride: int, bos: tuple[int, ...] = ()) -> list[ScoredText]:
    """Split a text into windows as described in the module's docstring.

    Args:
        ids: tokens of the text.
        num_text: tokens per window without BOS.
        stride: tokens from the start of one window to the next; at most `num_text`.
        bos: the BOS token of every window, or empty.
    """
    windows = []
    scored = 0  # tokens before this one have been scored, or never can be
    for start in range(0, len(ids), stride):
        end = min(start + num_text, len(ids))
        # Without BOS nothing precedes the first token of a window, so it cannot be scored there.
        first = max(scored, start if bos else start + 1)
        if end > first:
            windows.append(ScoredText(ids=(*bos, *ids[start:end]), num_scored=end - first))
        scored = max(scored, end)
        if end == len(ids):
            break
    return windows


def adds_bos(tokenizer: Any) -> bool:
    """Whether a tokenizer adds BOS before texts."""
    bos = getattr(tokenizer, "bos_token_id", None)
    # Try it, because more than the flags of its configuration decides what a tokenizer puts in front.
    return bos is not None and list(tokenizer("a")["input_ids"])[:1] == [bos]


def leading_bos(llm: Evaluated, add_bos: bool | None = None) -> tuple[int, ...]:
    """Return the BOS token that begins every window, or an empty tuple; see `perplexity` for `add_bos`."""
    if add_bos is False or (add_bos is None and (llm.tokenizer is None or not adds_bos(llm.tokenizer))):
        return ()
    if llm.tokenizer is None or llm.tokenizer.bos_token_id is None:
        raise DataError(
            f"the tokenizer of {llm.path} is missing or has no BOS token; "
            "leave out --bos (in Python, leave out add_bos=True)"
        )
    return (llm.tokenizer.bos_token_id,)


def token_ids(llm: Evaluated, text: str | Sequence[int]) -> list[int]:
    """Return the token ids of a text, without BOS; a text that is given as token ids is returned unchanged."""
    if not isinstance(text, str):
        return list(text)
    if llm.tokenizer is None:
        raise DataError(f"{llm.path} has no usable tokenizer to encode a text; give the text as token ids")
    return list(llm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
