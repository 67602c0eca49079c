"""Convert the tokenizer in a GGUF file's metadata to the tokenizer.json and tokenizer_config.json of transformers.

transformers' own converters choose the pre-tokenizer by the model's architecture, which splits numbers wrongly in some
models. This module chooses the pre-tokenizer by `tokenizer.ggml.pre`, as llama.cpp does.
Source: llama.cpp `src/llama-vocab.cpp`.
"""

from collections.abc import Mapping
from typing import Any

from quantkit.errors import CheckpointError, ModelError
from quantkit.safety.untrusted import shorten

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_WORDS}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Letters with cases, as DeepSeek's tokenizer lists them: from an older Unicode version, without mathematical letters.
_CASES = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-"
    "\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-"
    "\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    "\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc"
    "\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f"
    "\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

Steps = tuple[tuple[str, Any], ...]
_GPT2, _BYTES = ("ByteLevel", True), ("ByteLevel", False)
_DIGITS: Steps = (("Digits", True), _GPT2)
_QWEN2: Steps = (("Split", _LLAMA3.replace("{1,3}", "")), _BYTES)
_CHINESE = ("[\r\n]", rf"\s?[{_CASES}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-퟿]+", r"\p{N}+")  # noqa: RUF001
PRE_TOKENIZERS: dict[str, Steps] = {
    "gpt-2": (_GPT2,),
    "smollm": _DIGITS,
    "llama-bpe": (("Split", _LLAMA3), _BYTES),
    "qwen2": _QWEN2,
    **dict.fromkeys(("refact", "starcoder", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("phi-2", "mpt", "olmo", "granite-docling"), (_GPT2,)),
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"), (("Split", _LLAMA3), _BYTES)),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez"), _QWEN2),
    "gpt-4o": (("Split", _CASED % (_ENDING, _ENDING, "{1,3}")), _BYTES),
    "tekken": (("Split", _CASED % ("", "", "")), _BYTES),
    "deepseek-llm": (*(("Split", pattern) for pattern in _CHINESE), _BYTES),
    "deepseek-v3": (
        *(("Split", pattern) for pattern in (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),  # noqa: RUF001
        _BYTES,
    ),
}
"""Steps of each pre-tokenizer, (kind, pattern or flag), keyed by llama.cpp's name of the pre-tokenizer.

If several names have the same steps, quantkit writes the first of these names into GGUF files.
"""

# With these pre-tokenizers, llama.cpp keeps a word whole if it is a token, and begins a text with BOS unless the file
# forbids it.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")


def tokenizer_files(metadata: Mapping[str, Any], where: str, num_rows: int) -> dict[str, dict[str, Any]]:
    """Return the contents of Hugging Face's tokenizer files, keyed by file name; empty if the file has no tokenizer.

    Args:
        metadata: metadata of the GGUF file.
        where: path of the file, for messages.
        num_rows: number of rows of the embedding.
    Raises:
        CheckpointError: entries are missing or damaged, or the vocabulary and the embedding differ in size.
        ModelError: the kind of tokenizer, or its pre-tokenizer, is not supported.
    """
    entries = {key.removeprefix("tokenizer."): value for key, value in metadata.items() if key.startswith("tokenizer.")}
    kind = entries.get("ggml.model")
    if kind in (None, "none", "no_vocab"):
        return {}
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"{where}: tokenizer {shorten(kind)} is not supported; supported: gpt2, llama")
    tokens = _texts(entries, "ggml.tokens", where)
    if len(tokens) != num_rows:
        raise CheckpointError(
            f"{where}: tokenizer.ggml.tokens has {len(tokens)} tokens, but the embedding has {num_rows} rows; "
            "the tokenizer belongs to a different model; download the file again"
        )
    types = entries.get("ggml.token_type") or [NORMAL] * num_rows
    if len(types) != num_rows:
        raise CheckpointError(
            f"{where}: tokenizer.ggml.token_type has {len(types)} entries, but there are {num_rows} tokens; "
            "download the file again"
        )
    added = [
        {"id": number, "content": token, "special": types[number] != USER}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for number, token in enumerate(tokens)
        if types[number] in (UNKNOWN, CONTROL, USER) and token
    ]
    vocab = {token: number for number, token in enumerate(tokens) if not token.startswith("[PAD")}
    data = (_byte_level if kind == "gpt2" else _sentencepiece)(entries, where, tokens, vocab, types)
    special = {
        f"{ours}_token": tokens[number]
        for ours, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (number := token_id(metadata, key, where)) is not None
    }
    data |= {"version": "1.0", "added_tokens": added, "post_processor": _template(entries, special, vocab)}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    if isinstance(template := entries.get("chat_template"), str):
        settings["chat_template"] = template
    return {"tokenizer.json": data, "tokenizer_config.json": settings}


def token_id(metadata: Mapping[str, Any], key: str, where: str) -> int | None:
    """Return the id of a special token, e.g. `eos`; None if the file does not name that token.

    Raises:
        CheckpointError: the entry is not the id of a token.
    """
    number, tokens = metadata.get(f"tokenizer.ggml.{key}_token_id"), metadata.get("tokenizer.ggml.tokens")
    if number is None or not isinstance(tokens, list) or number == (1 << 32) - 1:  # -1 in an unsigned field
        return None
    if type(number) is not int or not 0 <= number < len(tokens):
        raise CheckpointError(
            f"{where}: tokenizer.ggml.{key}_token_id is {shorten(number)}, but the tokenizer has {len(tokens)} tokens; "
            "download the file again"
        )
    return number


def _texts(entries: Mapping[str, Any], key: str, where: str) -> list[str]:
    value = entries.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise CheckpointError(
            f"{where}: tokenizer.{key} is {shorten(value)}, not a list of texts; download the file again"
        )
    return value


def _byte_level(
    entries: Mapping[str, Any], where: str, tokens: list[str], vocab: Mapping[str, int], types: list[int]
) -> dict[str, Any]:
    name = entries.get("ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{where}: pre-tokenizer {shorten(name)} is not supported; supported: {', '.join(PRE_TOKENIZERS)}"
        )
    merges = [merge.split(" ", 1) for merge in _texts(entries, "ggml.merges", where)]
    return {
        "model": _bpe(vocab, [merge for merge in merges if len(merge) == 2], ignore_merges=name in _WHOLE_WORDS),
        "normalizer": {"type": "NFC"} if name == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [_step(*step) for step in PRE_TOKENIZERS[name]]},
        "decoder": _step(*_GPT2),
    }


def _step(kind: str, argument: Any) -> dict[str, Any]:
    """Return a step of PRE_TOKENIZERS in the form of tokenizer.json."""
    if kind == "Split":
        return {"type": kind, "pattern": {"Regex": argument}, "behavior": "Isolated", "invert": False}
    if kind == "Digits":
        return {"type": kind, "individual_digits": argument}
    return {"type": kind, "add_prefix_space": False, "trim_offsets": True, "use_regex": argument}


def _sentencepiece(
    entries: Mapping[str, Any], where: str, tokens: list[str], vocab: Mapping[str, int], types: list[int]
) -> dict[str, Any]:
    """Return the entries of tokenizer.json for a SentencePiece tokenizer.

    Every pair of tokens that together form a third token becomes a merge. Merges are sorted by the score of the token
    that they form, highest first.
    """
    scores = entries.get("ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(
            f"{where}: tokenizer.ggml.scores must have an entry for each of {len(tokens)} tokens; "
            "download the file again"
        )
    mergeable = {token for token, number in vocab.items() if types[number] in (NORMAL, USER)}
    merges = [
        (-float(scores[vocab[token]]), vocab[token], at, token)
        for token in mergeable
        if types[vocab[token]] == NORMAL
        for at in range(1, len(token))
        if token[:at] in mergeable and token[at:] in mergeable
    ]
    prefix = entries.get("ggml.add_space_prefix") is not False
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    first = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    last = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    merged = [[token[:at], token[at:]] for _, _, at, token in sorted(merges)]
    return {
        "model": _bpe(vocab, merged, unk_token=unknown, fuse_unk=True, byte_fallback=BYTE in types),
        "normalizer": {"type": "Sequence", "normalizers": [*first, space]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *last]},
    }


def _bpe(vocab: Mapping[str, int], merges: list[list[str]], **settings: Any) -> dict[str, Any]:
    return {"type": "BPE", "vocab": vocab, "merges": merges, **settings}


def _template(entries: Mapping[str, Any], special: Mapping[str, str], vocab: Mapping[str, int]) -> Any:
    """Return the step that adds BOS before a text and EOS after it; None if neither is added."""
    default = entries["ggml.model"] == "llama" or entries.get("ggml.pre") in _WHOLE_WORDS
    first = ["bos_token"] if entries.get("ggml.add_bos_token", default) else []
    last = ["eos_token"] if entries.get("ggml.add_eos_token") else []
    first, last = ([special[name] for name in names if special.get(name) in vocab] for names in (first, last))
    if not first and not last:
        return None

    def around(*sequences: str) -> list[dict[str, Any]]:
        parts = []
        for number, name in enumerate(sequences):
            before, after = (
                [{"SpecialToken": {"id": token, "type_id": number}} for token in side] for side in (first, last)
            )
            parts += [*before, {"Sequence": {"id": name, "type_id": number}}, *after]
        return parts

    ids = {token: {"id": token, "ids": [vocab[token]], "tokens": [token]} for token in (*first, *last)}
    return {"type": "TemplateProcessing", "single": around("A"), "pair": around("A", "B"), "special_tokens": ids}
