"""Under lm-eval: the numbers and texts of lm-eval's own HFLM on the same model."""

from __future__ import annotations

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from quantkit.errors import RequestError
from quantkit.evaluate.language_model import QuantkitLM
from quantkit.evaluate.loading import load_llm
from tests.runtime.helpers import make_loud_model

LONG = "a long story that goes on and on about an owl " * 20  # 920 bytes: more than the 512 of the context
PAIRS = [
    ("The owl", " sleeps"),
    ("The owl", " works at night"),
    ("The owl ", "sleeps"),  # the space belongs to the continuation
    ("The owl \n ", "sleeps"),
    ("", "The owl"),
    ("", "<s>The owl"),
    ("<s>The owl", " sleeps"),
    (LONG, " about"),
    (LONG, " about another owl"),
]


@pytest.fixture(scope="module")
def llm(loud_llama):
    return load_llm(str(loud_llama), dtype="float32", device="cpu", threads=1)


@pytest.fixture(scope="module", params=[None, False], ids=["bos by the tokenizer", "no bos"])
def both(request, loud_llama, llm):
    theirs = HFLM(pretrained=str(loud_llama), dtype="float32", device="cpu", batch_size=4, add_bos_token=request.param)
    return QuantkitLM(llm, add_bos_token=request.param), theirs


def instances(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=item, idx=0) for item in arguments]


def test_log_likelihoods_are_those_of_hflm(both):
    ours, theirs = (model.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True) for model in both)
    assert [score for score, _ in ours] == pytest.approx([score for score, _ in theirs], abs=1e-3, rel=1e-5)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert len({round(score, 3) for score, _ in ours}) > 5


def test_a_request_without_any_text_is_refused(llm):
    with pytest.raises(RequestError, match="neither a context nor a continuation"):
        QuantkitLM(llm).loglikelihood(instances("loglikelihood", [("", "")]), disable_tqdm=True)


def test_tokens_are_those_of_hflm(both):
    ours, theirs = both
    for context, continuation in PAIRS:
        if context:
            assert ours._encode_pair(context, continuation) == theirs._encode_pair(context, continuation)
        assert ours.tok_encode(context + continuation) == theirs.tok_encode(context + continuation)


def test_whole_texts_are_scored_as_by_hflm(both):
    texts = [("The owl sleeps.",), (LONG,), ("x",)]
    ours, theirs = (model.loglikelihood_rolling(instances("loglikelihood_rolling", texts)) for model in both)
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_generated_texts_are_those_of_hflm(both):
    options = [{"until": ["e"], "max_gen_toks": 20}, {"until": "\n", "max_gen_toks": 9, "do_sample": False}]
    asked = [(text, option) for text in ("The owl", "Two cats", LONG) for option in options]
    ours, theirs = (model.generate_until(instances("generate_until", asked)) for model in both)
    assert ours == theirs
    assert any(ours)


def test_sampling_options_arrive(llm):
    model = QuantkitLM(llm)
    wish = {"do_sample": True, "temperature": 5.0, "seed": 3, "max_gen_toks": 8}
    one, again, other = (
        model.generate_until(instances("generate_until", [("The owl", {**wish, "seed": seed})])) for seed in (3, 3, 4)
    )
    assert one == again != other


def test_what_does_not_fit_is_one_line(llm):
    model = QuantkitLM(llm)
    with pytest.raises(RequestError, match="generates 512 tokens, but the model's context is 512 tokens; lower max"):
        model.generate_until(instances("generate_until", [("x", {"max_gen_toks": 512})]))
    with pytest.raises(RequestError, match="a continuation of 920 tokens, but the model's context is 512 tokens"):
        model.loglikelihood(instances("loglikelihood", [("x", LONG)]))
    with pytest.raises(RequestError, match="2 tokens of context and 0 of continuation"):
        model.loglikelihood(instances("loglikelihood", [("x", "")]))


def test_a_model_without_tokenizer_is_refused(tmp_path):
    bare = make_loud_model(tmp_path / "bare", "llama")
    with pytest.raises(RequestError, match="no usable tokenizer, which tasks need; copy the"):
        QuantkitLM(str(bare), dtype="float32", threads=1)


@pytest.mark.parametrize(("given", "count"), [(None, 64), (1, 64), ("auto", 64), (5, 5), ("auto:3", 3)])
def test_batch_size_is_a_number_of_sequences(loud_llama, given, count):
    model = QuantkitLM(str(loud_llama), batch_size=given, device="cuda:0", threads=1)  # lm-eval's default device
    assert model.llm.engine.config.max_sequences == count
    assert model.batch_size == count
