"""Convert calibration text to token ids, and check it for common problems.

Text is cut into windows of equal length, each beginning with BOS. A chat, or a list of token ids, is one sample.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from quantkit.checkpoints.tokenizer import render_chat
from quantkit.compress.calibration.images import ImageSamples, read_records
from quantkit.errors import DataError, first_line
from quantkit.quantities import counted
from quantkit.results import CalibrationRecord
from quantkit.safety.untrusted import MAX_TEXT_BYTES, read_text, shorten

# Documents are tokenized until this many times the needed tokens exist; windows are drawn from all of these tokens.
_SURPLUS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Calibration samples, ready to run.

    Args:
        token_ids: one tuple per sample; lengths may differ.
        warnings: problems found in the data, one sentence each.
        digest: SHA-256 of the token ids, which identifies the data.
        images: samples with images; in `token_ids`, they follow the samples without images.
        held_out: further samples from the same text, all of one length, for measuring quantization errors; empty if no
            text was left.
    """

    token_ids: tuple[tuple[int, ...], ...]
    warnings: tuple[str, ...]
    digest: str
    images: ImageSamples | None = None
    held_out: tuple[tuple[int, ...], ...] = ()

    @property
    def num_images(self) -> int:
        """Number of samples with images."""
        return 0 if self.images is None else len(self.images.chats)

    @property
    def texts(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of the samples without images."""
        return self.token_ids[: len(self.token_ids) - self.num_images]

    @property
    def record(self) -> CalibrationRecord:
        """Return the entry about calibration for reports."""
        tokens = sum(map(len, self.token_ids))
        return CalibrationRecord(
            num_samples=len(self.token_ids),
            num_tokens=tokens,
            num_with_images=self.num_images,
            num_held_out=sum(map(len, self.held_out)),
        )

    def with_images(self, images: ImageSamples) -> "Samples":
        """Return these samples, followed by samples with images."""
        return Samples(
            token_ids=(*self.token_ids, *images.token_ids),
            warnings=(*self.warnings, *images.warnings),
            digest=hashlib.sha256((self.digest + images.digest).encode()).hexdigest(),
            images=images,
            held_out=self.held_out,
        )


@dataclass(frozen=True, slots=True)
class _Chat:
    """A conversation, and the tools that the chat template shows; None = no tools."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None


NO_TEXT = Samples(token_ids=(), warnings=(), digest="")


def load_samples(
    data: str | Path, tokenizer: Any, *, samples: int, sequence_length: int, vocab_size: int, seed: int,
    field: str = "text", split: str = "train",
) -> Samples:  # fmt: skip
    """Read, tokenize and draw calibration samples; the same arguments give the same samples.

    Args:
        data: a .txt file (documents separated by blank lines), a .jsonl file (`text`, `messages` with or without
            `tools`, or `input_ids` per line), or the name of a hub data set with or without the prefix `hub:`.
        tokenizer: a transformers tokenizer.
        samples: maximum number of samples.
        sequence_length: maximum number of tokens per sample, including BOS.
        vocab_size: size of the model's vocabulary; larger token ids are refused.
        seed: seed of the random choice.
        field: key of the text or chat in a record.
        split: split of a hub data set.
    Raises:
        DataError: the data cannot be read or contain no usable text, the tokenizer has no chat template for chats, or
            token ids are outside the model's vocabulary.
    """
    generator = random.Random(seed)
    path = Path(data)
    if path.suffix == ".txt":
        records: Iterable[Any] = [part.strip() for part in _read_file(path).split("\n\n")]
    elif path.suffix == ".jsonl" or path.exists():
        records = _read_objects(path, field)
    else:
        records = _read_hub(str(data).removeprefix("hub:"), field, split, limit=samples * 8)
    extra = num_held_out(samples, sequence_length)
    drawn = list(_tokenize(records, tokenizer, samples, sequence_length, generator, str(data), extra))
    token_ids, held_out = drawn[:samples], _not_among(drawn[samples:], drawn[:samples])
    if not token_ids:
        raise DataError(f"calibration data {data} contains no usable text; give texts, chats or token ids")
    _check_vocabulary(drawn, vocab_size, str(data))
    warnings = lint(token_ids, samples, sequence_length, tokenizer)
    digest = hashlib.sha256(json.dumps(token_ids).encode()).hexdigest()
    return Samples(token_ids=tuple(map(tuple, token_ids)), warnings=warnings, digest=digest, held_out=held_out)


def num_held_out(samples: int, sequence_length: int) -> int:
    """Return the number of sequences to hold out: one for every 64 samples, with at most 1,024 tokens in all, but at
    least one sequence.
    """
    return max(1, min(samples // 64, 1024 // sequence_length))


def _not_among(extra: list[list[int]], samples: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the longest of the extra samples that do not occur in `samples`; all returned samples have one length."""
    new = [sample for sample in extra if sample not in samples]
    longest = max(map(len, new), default=0)
    return tuple(tuple(sample) for sample in new if len(sample) == longest)


def lint(samples: list[list[int]], asked: int, sequence_length: int, tokenizer: Any) -> tuple[str, ...]:
    """Return warnings about calibration samples.

    Args:
        samples: token ids per sample.
        asked: number of samples that were requested.
        sequence_length: number of tokens per sample that was requested.
        tokenizer: the tokenizer, for its BOS and unknown ids.
    Returns:
        One sentence per problem.
    """
    count, tokens, bos = len(samples), [token for sample in samples for token in sample], tokenizer.bos_token_id
    without = sum(1 for sample in samples if bos is not None and sample[0] != bos)
    short = sum(1 for sample in samples if len(sample) < sequence_length / 2)
    repeated = count - len({tuple(sample) for sample in samples})
    unknown = tokens.count(tokenizer.unk_token_id) / len(tokens)  # 0 if the tokenizer has no such token
    findings = (
        (without > 0, f"{without} of {count} samples do not begin with the BOS token, as the model's inputs should"),
        (count < asked, f"only {counted(count, 'sample')} instead of {asked}; statistics will be noisier"),
        (short > count / 4, f"{short} of {count} samples are shorter than half of {sequence_length} tokens"),
        (repeated > 0, f"{repeated} of {counted(count, 'sample')} are duplicates of others"),
        (unknown > 0.01, f"{unknown:.0%} of the tokens are unknown to the tokenizer"),
        (len(tokens) < 4096, f"only {counted(len(tokens), 'token')} in all; 16,000 or more are usual"),
    )
    return tuple(text for holds, text in findings if holds)


def _tokenize(
    records: Iterable[Any], tokenizer: Any, samples: int, length: int, generator: random.Random, where: str, extra: int
) -> Iterator[list[int]]:
    """Yield token ids: first those of chats and of records with ids, in random order, then windows of text; at most
    `samples` + `extra` in all.
    """
    texts: list[str] = []
    whole: list[list[int]] = []
    for record in records:
        if isinstance(record, str):
            texts.append(record)
        elif isinstance(record, _Chat):
            whole.append(_chat_ids(record, tokenizer, where)[:length])
        elif record:
            whole.append(list(record)[:length])
        if len(whole) >= samples * _SURPLUS:
            break
    whole = [sample for sample in whole if len(sample) > 1]
    generator.shuffle(whole)
    yield from whole[: samples + extra]
    windows = _windows(texts, tokenizer, samples, length, generator, extra)
    yield from islice(windows, max(0, samples + extra - len(whole)))


def _windows(
    texts: list[str], tokenizer: Any, samples: int, length: int, generator: random.Random, extra: int
) -> list[list[int]]:
    """Join documents in random order, with blank lines between them, and return windows of `length` tokens of the
    result, in random order. Each window begins with BOS; there are at most `samples` + `extra`.
    """
    prefix = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    step = length - len(prefix)
    texts = [text for text in texts if text.strip()]
    generator.shuffle(texts)
    stream: list[int] = []
    for text in texts:
        stream += tokenizer(text + "\n\n", add_special_tokens=False, verbose=False)["input_ids"]
        if len(stream) >= samples * step * _SURPLUS:
            break
    # Windows are drawn from all of these tokens, not only the first ones, because neighbouring texts may be similar.
    # A text that is shorter than one window is a sample too.
    starts = list(range(0, len(stream) - step + 1, step)) or [0]
    generator.shuffle(starts)
    windows = [prefix + stream[start : start + step] for start in starts[: samples + extra]]
    return [window for window in windows if len(window) > len(prefix) + 1]


def _chat_ids(chat: _Chat, tokenizer: Any, where: str) -> list[int]:
    if any(isinstance(part, dict) and part.get("type") == "image" for turn in chat.messages for part in _parts(turn)):
        # A tokenizer would put a placeholder in the place of the image, and the model would never see the image.
        raise DataError(f"calibration data {where}: a chat contains images; give this data as calibration.images")
    try:
        text = render_chat(tokenizer, chat.messages, **({} if chat.tools is None else {"tools": chat.tools}))
    except Exception as error:  # templates raise whatever their author chose
        raise DataError(f"calibration data {where}: the tokenizer cannot format this chat: {error}") from error
    # The template adds the special tokens; adding them here would double the BOS token.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _parts(message: Any) -> list[Any]:
    """Return the content of a message if it is a list of parts; otherwise an empty list."""
    content = message.get("content") if isinstance(message, dict) else None
    return content if isinstance(content, list) else []


def _check_vocabulary(samples: list[list[int]], vocab_size: int, where: str) -> None:
    if not all(isinstance(token, int) for sample in samples for token in sample):
        raise DataError(f"calibration data {where}: input_ids must be whole numbers")
    outside = [token for sample in samples for token in sample if not 0 <= token < vocab_size]
    if outside:
        raise DataError(
            f"token id {outside[0]} is outside the model's vocabulary of {vocab_size}: "
            f"the tokenizer or the ids in {where} belong to a different model"
        )


def _read_objects(path: Path, field: str) -> list[Any]:
    return [_content(record, field, where) for where, record in read_records(_read_file(path), path)]


def _read_hub(name: str, field: str, split: str, limit: int) -> list[Any]:
    from datasets import load_dataset

    repository, _, config = name.partition(":")
    try:
        rows = load_dataset(repository, config or None, split=split, streaming=True)
        return [_content(row, field, f"{name}[{split}]") for row in islice(rows, limit)]
    except DataError:
        raise
    except Exception as error:  # the hub client raises many kinds; the user needs one line
        what = f"calibration data {name!r} is neither a file nor a hub data set that can be read"
        raise DataError(f"{what}: {first_line(error)}") from error


def _content(record: dict[str, Any], field: str, where: str) -> Any:
    """Return the text, chat or token ids of one record."""
    for key in (field, "messages", "conversations", "input_ids", "text"):
        value = record.get(key)
        if isinstance(value, str) or (isinstance(value, list) and value):
            if isinstance(value, list) and isinstance(value[0], dict):
                return _Chat(value, _tools(record.get("tools"), where))
            return value
    raise DataError(
        f"{where}: the record has no {field!r}, 'messages' or 'input_ids' with content; its keys: {', '.join(record)}"
    )


def _tools(given: Any, where: str) -> list[Any] | None:
    """Return the tools of a chat record; some data sets store them as JSON text. None = no tools."""
    if isinstance(given, str):
        try:
            given = json.loads(given or "[]")
        except (ValueError, RecursionError):
            raise DataError(f"{where}: 'tools' is not valid JSON") from None
    if given is not None and not isinstance(given, list):
        raise DataError(f"{where}: 'tools' is {shorten(given)}; give a list of tools")
    return given or None


def _read_file(path: Path) -> str:
    if not path.exists():
        raise DataError(f"calibration file {path} does not exist")
    text = read_text(path, DataError, MAX_TEXT_BYTES)
    if not text.strip():
        raise DataError(f"calibration file {path} is empty; give a file that contains text")
    return text
