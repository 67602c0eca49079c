"""Sampling parameters say in one line what is wrong with them."""

from __future__ import annotations

import pytest

from quantkit.errors import InputError
from quantkit.runtime.types import SamplingParams


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": True}, "temperature is True"),
        ({"temperature": 10**400}, "temperature is a whole number of"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": -1}, "min_p is -1"),
        ({"top_k": 0}, "top_k is 0; give an integer of at least 1, or None for all tokens"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": 1e39}, "repetition_penalty is 1e+39; it must be from 0.001 to 1000; 1 is no penalty"),
        ({"presence_penalty": float("inf")}, "presence_penalty is inf"),
        ({"presence_penalty": -1e39}, "presence_penalty is -1e+39; it must be from -1000 to 1000"),
        ({"frequency_penalty": None}, "frequency_penalty is None"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"ignore_eos": 1}, "ignore_eos is 1"),
        ({"stop": 5}, "stop is 5 (int); give a text or a list of texts"),
        ({"stop": None}, "stop is None (NoneType)"),
        ({"stop": ["a", 5]}, "stop holds 5 (int)"),
        ({"stop": ["a", ""]}, "stop holds ''"),
        ({"stop": b"end"}, "stop holds 101 (int)"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5 (int)"),
        ({"stop_token_ids": "5"}, "stop_token_ids is '5' (str)"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids holds '2' (str)"),
    ],
)
def test_bad_values_are_refused_in_one_line(setting, said):
    with pytest.raises(InputError) as caught:
        SamplingParams(**setting)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4


def test_one_stop_text_or_several():
    assert SamplingParams(stop="end").stop_texts == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_texts == ("a", "b")
    assert SamplingParams(stop_token_ids=[3]).stop_token_ids == (3,)
    assert SamplingParams().stop_texts == ()
