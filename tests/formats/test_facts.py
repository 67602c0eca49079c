"""What formats say about themselves, what reading back compares, and what is imported only where it is needed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantkit.errors import AuditError, CheckpointError, SchemeError
from quantkit.formats import REGISTRY, writable
from tests.formats.schemes import SCHEMES, linear, quantize, random_tensor, with_input
from tests.helpers import make_model

FORMATS = REGISTRY.all()


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_knows_its_own_name_and_who_loads_it(name):
    assert FORMATS[name].name == name
    assert set(FORMATS[name].engines) <= {"transformers", "vllm", "llama.cpp", "mlx-lm"}
    assert FORMATS[name].engines


def test_messages_name_the_formats_that_have_a_fact():
    assert writable(lambda known: known.holds_transposed) == "dense, gptq, gptq-v2"
    assert writable(lambda known: known.holds_group_index) == "dense, gptq, gptq-v2"
    assert writable(lambda known: bool(known.suffix)) == "gguf"
    assert "fp8" not in writable(lambda known: True)


CASES = [
    *(("compressed-tensors", name) for name in SCHEMES),
    ("gptq", "int4-g32"),
    ("gptq-v2", "int8-g32-asym"),
    ("awq", "int4-g32-asym"),
    ("gguf", "mxfp4"),
    ("mlx", "int4-g32-asym"),
    ("dense", "int4-g32"),
]


@pytest.mark.parametrize(("name", "scheme"), CASES)
def test_every_part_of_a_weight_is_compared_with_what_it_is_stored_as(name, scheme):
    format_, scheme = FORMATS[name], SCHEMES[scheme]
    values = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    weight = with_input(quantize(values, scheme.weight, torch.float16), scheme)
    stored = format_.encode(weight, scheme)
    format_.check_encoded("a.b", weight, scheme, stored)
    for key in stored if format_.keeps_codes else ():
        if key.endswith("_shape"):
            continue
        changed = stored[key].clone()
        changed.view(-1).view(torch.uint8)[0] ^= 1
        with pytest.raises(
            (AuditError, CheckpointError, SchemeError), match=r"does not decode|symmetric|times a whole number"
        ):
            format_.check_encoded("a.b", weight, scheme, {**stored, key: changed})


def test_an_encoder_that_loses_something_is_found_though_the_file_is_whole():
    format_, scheme = FORMATS["gptq"], linear("int4", 32)
    weight = random_tensor(0, (32, 64), scheme.weight, torch.float16)
    written = format_.encode(weight, scheme)
    order = torch.arange(64).flip(0) // 32
    for part, other in (("codes", weight.codes ^ 1), ("scale", weight.scale * 2), ("group_index", order)):
        with pytest.raises(AuditError, match=f"a: the encoded {part} does not decode to the original"):
            changed = replace(weight, **{part: other})
            format_.check_encoded("a", changed, scheme, written)


class Transposed:
    """A family of which only that is known."""

    hf_names = ("GPT2LMHeadModel",)
    transposed = ("attn.c_attn",)
    decode_at_load = False
    compressed_experts = True


@pytest.mark.parametrize("name", [name for name, known in FORMATS.items() if known.is_written])
def test_transposed_linears_go_where_readers_find_them(name):
    if name in ("dense", "gptq", "gptq-v2"):
        assert FORMATS[name].check_model(Transposed, [{}]) == ()
        return
    with pytest.raises(SchemeError, match=f"{name} loaders do not support; set format to one of dense, gptq, gptq-v2"):
        FORMATS[name].check_model(Transposed, [{}])


BLOCKED = """
import sys
sys.modules["compressed_tensors"] = sys.modules["gguf"] = None
from quantkit.checkpoints.kv_cache_entries import read_cache_schemes
from quantkit.runtime.model.loader import load_model
assert load_model(sys.argv[1], dtype="float32").stored_bytes > 0
entry = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
[scheme] = read_cache_schemes({"quantization_config": {"kv_cache_scheme": entry}}, 1)
assert scheme.key.is_fixed
"""


@pytest.mark.slow
def test_an_ordinary_model_needs_no_library_of_a_format(tmp_path):
    model = make_model(tmp_path / "m", num_hidden_layers=1)
    run = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(model)], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-1000:]
