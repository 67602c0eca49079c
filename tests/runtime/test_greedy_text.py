"""Every native family, quantized by the recipe that most people use: the same text as transformers writes with it."""

from __future__ import annotations

import pytest
import torch

from quantkit.api import quantize
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.model import NativeModel
from quantkit.runtime.types import SamplingParams
from tests.helpers import (
    COMPRESSED_ONLY,
    EVERY_FAMILY,
    GRANITE_EXPERTS,
    NEMOTRON_EXPERTS,
    known_to_transformers,
    save_tokenizer,
)
from tests.runtime.helpers import make_loud_model, prompts

NATIVE = {name: (name, {}) for name in EVERY_FAMILY if name not in COMPRESSED_ONLY}
VARIANTS = {
    "granitemoehybrid, experts": ("granitemoehybrid", GRANITE_EXPERTS),
    "nemotron_h, experts": ("nemotron_h", NEMOTRON_EXPERTS),
}
CASES = NATIVE | {name: case for name, case in VARIANTS.items() if known_to_transformers(case[0])}
QUICK = ("nemotron_h, experts",)
# Transformers loads no experts of these as codes.
AS_VALUES = ("gpt_oss", "granitemoe", "granitemoeshared", "granitemoehybrid, experts")
TOKENS = 24


def reference_text(folder, sequence, text):
    """What transformers finds likeliest after each token; where that is the text itself, it is its greedy text."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*sequence, *text]]), use_cache=False).logits[0]
    return logits[len(sequence) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("case", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in CASES])
def test_greedy_text_of_a_gptq_checkpoint_is_that_of_transformers(tmp_path, case):
    family, changes = CASES[case]
    source = make_loud_model(tmp_path / "source", family, **changes)
    save_tokenizer(source)
    settings = {"calibration.samples": 2, "calibration.sequence_length": 32, "weights.group_size": 16}
    quantize(source, "gptq-int4", tmp_path / "out", overrides=settings)
    reference = tmp_path / "out"
    if case in AS_VALUES:
        reference = tmp_path / "values"
        quantize(source, "gptq-int4", reference, overrides={**settings, "format": "dense"})
    (sequence,) = prompts(30)
    llm = LLM(tmp_path / "out", dtype="float32")
    assert isinstance(llm.engine.runner.model, NativeModel)
    (completion,) = llm.generate([sequence], SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    text = list(completion.token_ids)
    assert len(text) == TOKENS
    assert text == reference_text(reference, sequence, text)
