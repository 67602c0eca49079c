"""Convert a tokenizer.json to GGUF metadata: tokens, merges or scores, special tokens and chat template.

Two kinds of tokenizer are supported. For byte-level BPE ("gpt2"), llama.cpp must know the pre-tokenizer by name. For
BPE with byte fallback, converted from SentencePiece ("llama"), merges become scores; earlier merges get higher scores.
Source: llama.cpp `convert_hf_to_gguf.py` (get_vocab_base_pre), `src/llama-vocab.cpp`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantkit.checkpoints.gguf_tokenizer import BYTE, CONTROL, NORMAL, PRE_TOKENIZERS, UNKNOWN, UNUSED, USER
from quantkit.errors import ModelError, first_line, located
from quantkit.safety.untrusted import read_object, read_text


def read_vocab(folder: Path, config: Mapping[str, Any], num_rows: int) -> dict[str, Any]:
    """Return the metadata of a GGUF file that describes the tokenizer; all keys begin with `tokenizer.`.

    Args:
        folder: folder of the model, with tokenizer.json.
        config: contents of config.json.
        num_rows: number of rows of the embedding; a smaller vocabulary is padded to this size.
    Raises:
        ModelError: tokenizer.json is missing or damaged, or llama.cpp does not support the tokenizer.
    """
    try:
        return _read_vocab(folder, config, num_rows)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"{folder}/tokenizer.json is not a valid tokenizer ({type(error).__name__}: {first_line(error)}); "
            "download or copy it again"
        ) from error


def _read_vocab(folder: Path, config: Mapping[str, Any], num_rows: int) -> dict[str, Any]:
    with located("a GGUF file needs the model's tokenizer"):
        data = read_object(folder / "tokenizer.json", ModelError)
        file = folder / "tokenizer_config.json"
        settings = read_object(file, ModelError) if file.is_file() else {}
    model = data.get("model") or {}
    if model.get("type") != "BPE":
        raise ModelError(
            f"{folder}/tokenizer.json: tokenizer type {model.get('type')!r} is not supported in GGUF; supported: BPE"
        )
    added = {entry["id"]: entry for entry in data.get("added_tokens") or []}
    tokens, types = _tokens(folder, model["vocab"], added, num_rows, byte_tokens=bool(model.get("byte_fallback")))
    merges = [" ".join(merge if isinstance(merge, list) else [merge]) for merge in model.get("merges") or []]
    splits = list(_flat(data.get("pre_tokenizer")))
    if model.get("byte_fallback"):
        prefix = any(step.get("type") == "Prepend" for step in _flat(data.get("normalizer")))
        entries: dict[str, Any] = {
            "ggml.model": "llama",
            "ggml.pre": "default",
            "ggml.tokens": tokens,
            "ggml.scores": _scores(tokens, merges),
            "ggml.token_type": types,
            "ggml.add_space_prefix": prefix or any(step.get("prepend_scheme") == "first" for step in splits),
        }
    else:
        entries = {"ggml.model": "gpt2", "ggml.pre": _split_name(folder, splits), "ggml.tokens": tokens}
        entries |= {"ggml.token_type": types, "ggml.merges": merges or ["  "]}
    entries |= _special(data, settings, config, {token: number for number, token in enumerate(tokens)})
    template = settings.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = read_text(folder / "chat_template.jinja", ModelError)
    if isinstance(template, str):
        entries["chat_template"] = template
    return {f"tokenizer.{key}": value for key, value in entries.items()}


def _tokens(
    folder: Path, vocab: Mapping[str, int], added: Mapping[int, Any], num_rows: int, *, byte_tokens: bool
) -> tuple[list[str], list[int]]:
    """Return the token text and token type for every row of the embedding."""
    tokens, types = [f"[PAD{number}]" for number in range(num_rows)], [UNUSED] * num_rows
    byte = re.compile("<0x..>" if byte_tokens else "(?!)", re.DOTALL)
    rows = [(number, token, BYTE if byte.fullmatch(token) else NORMAL) for token, number in vocab.items()]
    # Added tokens come last and override the vocabulary.
    rows += [(number, entry["content"], _added_type(entry, byte_tokens)) for number, entry in added.items()]
    for number, token, kind in rows:
        if not isinstance(token, str):
            raise TypeError(f"the token with id {number} is not a string")
        if not 0 <= number < num_rows:
            raise ModelError(
                f"{folder}/tokenizer.json: token {token!r} has id {number}, but the embedding has {num_rows} rows"
            )
        tokens[number], types[number] = token, kind
    return tokens, types


def _added_type(entry: Mapping[str, Any], byte_tokens: bool) -> int:
    if byte_tokens and entry["content"] == "<unk>":
        return UNKNOWN
    return CONTROL if entry.get("special") else USER


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Return the score of each token: minus the rank of the first merge that forms it. Unmerged tokens come last."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    return [-float(ranks.get(token, len(merges) + number)) for number, token in enumerate(tokens)]


def _split_name(folder: Path, splits: list[Mapping[str, Any]]) -> str:
    steps = tuple(map(_described, splits))
    name = next((name for name, known in PRE_TOKENIZERS.items() if known == steps), None)
    if name is not None:
        return name
    raise ModelError(
        f"{folder}/tokenizer.json splits text by {list(steps)}, which is not supported in GGUF; "
        f"supported: {', '.join(PRE_TOKENIZERS)}"
    )


def _described(step: Mapping[str, Any]) -> tuple[str, Any]:
    kind = str(step.get("type"))
    if kind == "Split":
        return kind, (step.get("pattern") or {}).get("Regex")
    return kind, step.get({"ByteLevel": "use_regex", "Digits": "individual_digits"}.get(kind, ""), True)


def _flat(step: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer, with nested sequences flattened."""
    if not isinstance(step, Mapping):
        return
    inner = step.get("normalizers") or step.get("pretokenizers")
    yield from [step] if inner is None else (item for part in inner for item in _flat(part))


def _special(
    data: Mapping[str, Any], settings: Mapping[str, Any], config: Mapping[str, Any], ids: Mapping[str, int]
) -> dict[str, Any]:
    """Return the ids of special tokens, and whether the tokenizer adds the bos and eos tokens to a text."""
    entries: dict[str, Any] = {}
    for kind, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = _special_token(settings, kind)
        number = ids.get(token) if isinstance(token, str) else None
        if number is None:
            number = config.get(f"{kind}_token_id")
            number = number[0] if isinstance(number, list) and number else number
        if type(number) is int and number >= 0:  # early Llamas have -1 for "none"
            entries[f"ggml.{key}_token_id"] = number
    single = json.dumps((data.get("post_processor") or {}).get("single") or data.get("post_processor") or "")
    for kind in ("bos", "eos"):
        # The tokenizer's own post-processor decides, not tokenizer_config.json.
        token = _special_token(settings, kind)
        is_added = isinstance(token, str) and f'"SpecialToken": {{"id": {json.dumps(token)}' in single
        entries[f"ggml.add_{kind}_token"] = is_added
    return entries


def _special_token(settings: Mapping[str, Any], kind: str) -> Any:
    token = settings.get(f"{kind}_token")
    return token.get("content") if isinstance(token, Mapping) else token
