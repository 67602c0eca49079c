"""Settings of an engine: sizes as people write them, contradictions, and that every one is described."""

from __future__ import annotations

import dataclasses

import pytest

from quantkit.errors import InputError, RequestError, SchemeError
from quantkit.kernels.layouts import kv_scheme
from quantkit.quantities import parse_bytes
from quantkit.runtime.config import KV_TYPES, EngineConfig


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("4GiB", 4 * 2**30),
        ("512 MB", 512_000_000),
        ("1.5g", 1_500_000_000),
        ("2ki", 2048),
        ("7B", 7),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1", "0", "4 XiB", "4GiB more", True, 0, "nan"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InputError, match="write it as 24GiB or 24GB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_length": 0}, "max_length is 0"),
        ({"num_pages": -1}, "num_pages is -1"),
        ({"page_size": 1.5}, "page_size is 1.5"),
        ({"max_sequences": 0}, "max_sequences is 0"),
        ({"token_budget": 3}, "token_budget is 3, but each of 4 sequences"),
        ({"max_length": 100, "num_pages": 6}, "6 pages of 16 tokens hold 96 tokens.*use 7 pages or more"),
    ],
)
def test_contradictions_are_found_before_loading(settings, said):
    with pytest.raises(RequestError, match=said):
        EngineConfig(**{"page_size": 16, "max_sequences": 4, "token_budget": 64, **settings})


def test_every_setting_is_described_and_what_a_flag_accepts_is_known():
    for field in dataclasses.fields(EngineConfig):
        assert field.metadata["text"].endswith("."), field.name
        assert field.metadata.keys() <= {"text", "flag", "metavar", "choices", "minimum", "shown"}, field.name


def test_what_is_no_memory_and_what_is_unknown_is_refused():
    assert EngineConfig(memory="2KiB").memory == "2KiB"
    with pytest.raises(InputError, match="memory 'much' is not an amount"):
        EngineConfig(memory="much")
    with pytest.raises(TypeError, match="max_lenght"):
        EngineConfig(max_lenght=3)


def test_the_names_of_cache_types_are_those_that_layouts_know():
    with pytest.raises(SchemeError, match=f"supported: {', '.join(KV_TYPES)}$"):
        kv_scheme("int5")
