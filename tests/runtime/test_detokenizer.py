"""Pieces put together are the text; nothing is shown that a later token changes."""

from __future__ import annotations

import random

import pytest

from quantkit.demo import DEMO_MODEL
from quantkit.runtime.detokenizer import Detokenizer, StopFinder, TextStream, decoder
from tests.helpers import SHARED, save_tokenizer

TEXTS = [
    "Once upon a time, there was a little girl named Lily.",
    "  two leading spaces,  two inside, one behind ",
    "naïve café — “quoted” … 100 %",
    "日本語のテキストと中文和한국어",
    "emoji 👩‍👩‍👧‍👦 and 🏳️‍🌈, flags 🇨🇭🇯🇵",
    "\n\n\tindented\n  code(x) = y\n",
    "a",
    "mixed é日👍 " * 12,
]


def metaspace(folder):
    """A SentencePiece-like tokenizer: metaspace, byte fallback, a leading space that decoding drops."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdeghilmnoprstuy,.é"]
    vocab = {word: number for number, word in enumerate([*words, "▁t", "he", "▁the", "▁▁"])}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.save_pretrained(folder)


SOURCES = ["bytes", "metaspace", "demo", "babyllama-361", "stories260k"]


@pytest.fixture(scope="module", params=SOURCES)
def tokenizer(request, tmp_path_factory):
    from transformers import AutoTokenizer

    folder = {"demo": DEMO_MODEL}.get(request.param, SHARED / request.param)
    if request.param in ("bytes", "metaspace"):
        folder = tmp_path_factory.mktemp(request.param)
        (save_tokenizer if request.param == "bytes" else metaspace)(folder)
    elif not folder.is_dir():
        pytest.skip(f"{request.param} is not here")
    return AutoTokenizer.from_pretrained(folder)


def deltas_of(detokenizer, ids):
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def plain(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:12])
def test_pieces_put_together_are_the_decoded_text(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    deltas = deltas_of(Detokenizer(decoder(tokenizer)), ids)
    assert "".join(deltas) == plain(tokenizer, ids)
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:12])
def test_after_a_prompt_the_pieces_continue_its_text(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    whole = plain(tokenizer, ids)
    for cut in range(1, len(ids), 1 + len(ids) // 12):
        before = plain(tokenizer, ids[:cut])
        if "\ufffd" in before or not before:
            continue  # cut inside a character, or nothing to continue
        assert before + "".join(deltas_of(Detokenizer(decoder(tokenizer), ids[:cut]), ids[cut:])) == whole


def test_random_texts(tokenizer):
    chance = random.Random(0)
    letters = "abc  the.\n,é日本👍"
    for _ in range(60):
        text = "".join(chance.choice(letters) for _ in range(chance.randint(1, 90)))
        ids = tokenizer(text)["input_ids"]
        assert "".join(deltas_of(Detokenizer(decoder(tokenizer)), ids)) == plain(tokenizer, ids)


def test_text_comes_as_soon_as_it_is_certain(tokenizer):
    ids = tokenizer("the cat, the dog", add_special_tokens=False)["input_ids"]
    detokenizer = Detokenizer(decoder(tokenizer))
    shown = ""
    for index, token in enumerate(ids):
        shown += detokenizer.push(token)
        assert shown == plain(tokenizer, ids[: index + 1])


def test_special_tokens_are_skipped(tokenizer):
    ids = tokenizer("the cat", add_special_tokens=False)["input_ids"]
    special = [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id, *ids[1:]]
    assert "".join(deltas_of(Detokenizer(decoder(tokenizer)), special)) == plain(tokenizer, special)


def test_bytes_that_are_no_text_come_out_as_in_one_go(tmp_path):
    """Byte-level tokenizers replace broken bytes one by one, so any ids at all give the same text."""
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    chance = random.Random(1)
    for _ in range(80):
        ids = [chance.randrange(258) for _ in range(chance.randint(1, 120))]
        assert "".join(deltas_of(Detokenizer(decoder(tokenizer)), ids)) == plain(tokenizer, ids)


def test_the_cost_of_a_token_does_not_grow(tokenizer):
    sizes = []

    def decode(ids):
        sizes.append(len(ids))
        return decoder(tokenizer)(ids)

    ids = tokenizer("the cat, the dog. " * 60)["input_ids"]
    deltas_of(Detokenizer(decode), ids)
    assert max(sizes) < 30
    assert len(sizes) < 1.5 * len(ids)


def test_a_stop_text_is_found_across_pieces():
    finder = StopFinder(("END", "stop"))
    assert [finder.push(piece) for piece in ("one E", "N", "x EN", "D more")] == [
        ("one ", False), ("", False), ("ENx ", False), ("", True),
    ]  # fmt: skip


def test_the_first_of_several_stop_texts_counts():
    assert StopFinder(("later", "now")).push("a now b later") == ("a ", True)
    assert StopFinder(("bc", "abc")).push("xabc") == ("x", True)


def test_text_that_only_looked_like_a_stop_comes_out():
    finder = StopFinder(("aab",))
    assert finder.push("aa") == ("", False)
    assert finder.push("ac") == ("aaac", False)
    assert finder.push("a") == ("", False)
    assert finder.flush() == "a"


def test_every_split_of_a_text_gives_the_same_end():
    text, stops = "say ababac and abac again", ("abac", "zz")
    for first in range(len(text)):
        for second in range(first, len(text)):
            finder, shown = StopFinder(stops), ""
            for piece in (text[:first], text[first:second], text[second:]):
                got, stopped = finder.push(piece)
                shown += got
                if stopped:
                    break
            assert stopped
            assert shown == "say ab"


def test_a_stop_text_that_ends_in_held_bytes_is_found_at_the_end(tmp_path):
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("x" + "é", add_special_tokens=False)["input_ids"]
    stream = TextStream(decoder(tokenizer), [], ("\ufffd",))
    assert [stream.push(token) for token in ids[:2]] == [("x", False), ("", False)]
    assert stream.flush() == ("", True)
