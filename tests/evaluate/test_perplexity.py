"""Windows cut as documented, and the perplexity that transformers gives on the same windows."""

from __future__ import annotations

import math

import pytest
import torch

from quantkit.errors import DataError
from quantkit.evaluate.loading import load_llm
from quantkit.evaluate.perplexity import adds_bos, cut_windows, perplexity
from tests.helpers import transformers_logits

TEXT = "The owl of Rome counted nineteen apples and gave sixteen of them to a friend. " * 3


@pytest.fixture(scope="module")
def llm(loud_llama):
    return load_llm(str(loud_llama), dtype="float32", device="cpu", threads=1)


def test_the_example_of_the_module_is_true():
    windows = cut_windows(range(12), num_text=5, stride=4, bos=(99,))
    assert [item.ids for item in windows] == [(99, 0, 1, 2, 3, 4), (99, 4, 5, 6, 7, 8), (99, 8, 9, 10, 11)]
    assert [item.num_scored for item in windows] == [5, 4, 3]


@pytest.mark.parametrize("length", [2, 3, 10, 11, 12, 13, 40])
@pytest.mark.parametrize(("room", "stride"), [(5, 5), (5, 4), (5, 1), (40, 40)])
@pytest.mark.parametrize("bos", [(), (99,)])
def test_every_token_is_scored_once_in_the_first_window_that_reaches_it(length, room, stride, bos):
    windows = cut_windows(range(length), num_text=room, stride=stride, bos=bos)
    scored = [token for item in windows for token in item.ids[-item.num_scored :]]
    # Without BOS nothing precedes the first token of the text, nor the first of a window that overlaps no other.
    lost = set() if bos else ({0} if stride < room else set(range(0, length, stride)))
    assert scored == [token for token in range(length) if token not in lost]
    assert all(len(item.ids) <= room + len(bos) for item in windows)


def reference(folder, windows):
    """exp of the mean negative log-likelihood, by transformers."""
    total = count = 0
    for ids, scored in windows:
        logprobs = transformers_logits(folder, torch.tensor([ids]))[0].log_softmax(-1)
        total -= sum(logprobs[i - 1, ids[i]].item() for i in range(len(ids) - scored, len(ids)))
        count += scored
    return math.exp(total / count), count


@pytest.mark.parametrize("through", ["prefill", "decode"])
def test_it_is_that_of_transformers(loud_llama, llm, through):
    ids = llm.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    result = perplexity(llm, TEXT, window=64, stride=50, through=through, data="owls")
    windows = [(list(item.ids), item.num_scored) for item in cut_windows(ids, num_text=63, stride=50, bos=(0,))]
    value, count = reference(loud_llama, windows)
    assert result.perplexity == pytest.approx(value, rel=1e-4)
    assert result.num_tokens == count == len(ids)
    assert (result.data, result.window, result.stride, result.through) == ("owls", 64, 50, through)


def test_defaults_and_bos(llm):
    assert adds_bos(llm.tokenizer)
    whole = perplexity(llm, TEXT)
    assert (whole.window, whole.stride, whole.window_tokens) == (512, 511, (len(TEXT),))
    bare = perplexity(llm, TEXT, add_bos=False, window=100)
    assert bare.stride == 100
    assert bare.num_tokens == len(TEXT) - 3  # the first of each window
    ids = llm.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert perplexity(llm, ids, window=100, add_bos=False).nll == bare.nll
    assert len(perplexity(llm, TEXT, window=50, max_windows=2).window_nll) == 2


BAD = [
    ({"text": "x", "add_bos": False}, "the text 'text' is too short to score"),
    ({"window": 600}, "window is 600 tokens; it must be 2 to 512"),
    ({"window": 10, "stride": 10}, "stride is 10; it must be 1 to 9"),
    ({"through": "sideways"}, "the setting 'through' is 'sideways'; give 'prefill' or 'decode'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_settings_are_one_line(llm, changes, message):
    with pytest.raises(DataError, match=message):
        perplexity(llm, changes.pop("text", TEXT), **changes)
