"""MTP heads: what they compute is what a plain reference computes, and no token of the text changes."""

from __future__ import annotations

import pytest
import torch

from quantkit.api import quantize
from quantkit.compress.convert.run import convert
from quantkit.errors import CheckpointError, RequestError
from quantkit.kernels import cpu
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.engine.speculation import SpeculationController
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.loader import load_model
from quantkit.runtime.types import SamplingParams
from tests.helpers import edit_tensors, load_tensors
from tests.runtime.helpers import make_batch, make_loud_model, prompts
from tests.runtime.mtp_models import KINDS, Reference, drafts_in_turns, make_mtp_model, make_predictable


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder of each kind of model."""
    return {kind: make_mtp_model(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@torch.inference_mode()
def drafts_of(folder, ids, chunk, num_steps):
    """Logits of drafts at every position but the last of `ids`, and at further steps; by quantkit, in chunks."""
    model = load_model(folder, dtype="float32", backend="native", mtp=True)
    cache, pages = KVCache(model.layouts(None, 16), 8, 1), [[3, 0, 5, 1, 7, 2, 4, 6]]
    logits = []
    for start in range(0, len(ids) - 1, chunk):
        tokens = ids[start : start + chunk][: len(ids) - 1 - start]
        _, hidden = model.compute(make_batch([tokens], [start], pages, rows=[]), cache)
        following = ids[start + 1 : start + 1 + len(tokens)]
        states = model.draft_states(hidden, make_batch([following], [start], pages), cache)
        logits.append(model.draft_logits(states))
    for past in range(len(ids) - 1, len(ids) - 1 + num_steps):
        token = int(logits[-1][-1].argmax())
        states = model.draft_states(states[-1:], make_batch([[token]], [past], pages), cache)
        logits.append(model.draft_logits(states))
    return torch.cat(logits)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_computes_what_a_plain_reference_computes(models, kind):
    (ids,) = prompts(40)
    expected = Reference(models[kind]).draft_logits(ids, 3)
    for chunk in (64, 7):
        actual = drafts_of(models[kind], ids, chunk, 3)
        assert actual.shape == expected.shape == (42, 260)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_a_head_may_have_its_own_embedding_and_output_projection(tmp_path):
    folder = make_mtp_model(tmp_path, "glm4_moe", own_tables=True)
    (ids,) = prompts(20)
    expected = Reference(folder).draft_logits(ids, 2)
    torch.testing.assert_close(drafts_of(folder, ids, 64, 2), expected, rtol=0, atol=1e-4)


def test_copies_of_the_models_tables_are_not_kept_twice(tmp_path):
    folder = make_mtp_model(tmp_path, "glm4_moe", own_tables=True)
    own = load_model(folder, mtp=True)
    tensors = load_tensors(folder)
    copies = {
        "model__layers__2__embed_tokens__weight": tensors["model.embed_tokens.weight"],
        "model__layers__2__shared_head__head__weight": tensors["lm_head.weight"],
    }
    edit_tensors(folder, **copies)
    shared = load_model(folder, mtp=True)
    assert shared.mtp.embedding is shared.mtp.output is None
    assert own.num_bytes - shared.num_bytes >= sum(table.nbytes for table in copies.values())


def texts(folder, requests, **settings):
    """Tokens of each request, and the engine's counters."""
    settings = {"dtype": "float32", "threads": 1, "page_size": 16, **settings}
    llm = LLM(folder, **settings)
    tokens = []
    for _ in range(2):  # the second time, the prompts' pages are shared
        done = llm.generate(*zip(*requests, strict=True))
        tokens += [completion.token_ids for completion in done]
        llm.engine.check_integrity()
    stats = llm.stats()
    assert stats["kv_free_pages"] == stats["kv_pages"]
    return tokens, stats


def requests():
    """Prompts of several lengths, greedy and sampled."""
    greedy = SamplingParams(max_tokens=24, ignore_eos=True)
    drawn = [SamplingParams(max_tokens=24, temperature=0.7, seed=seed, top_p=0.9, ignore_eos=True) for seed in range(2)]
    return list(zip(prompts(1, 5, 40, 17, 33), [greedy, drawn[0], greedy, drawn[1], greedy], strict=True))


SCHEDULES = [
    {"num_pages": 6, "max_length": 90},
    {"max_drafts": 1, "max_sequences": 2},
    {"token_budget": 8, "max_sequences": 4},
    {"chunked": False, "prefix_cache": False, "force_speculation": False},
]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [*((kind, SCHEDULES[0]) for kind in KINDS), *(("glm4_moe", settings) for settings in SCHEDULES[1:])],
    ids=str,
)
def test_no_token_changes(models, kind, settings):
    plain, _ = texts(models[kind], requests())
    drafted, stats = texts(models[kind], requests(), **{"speculate": "mtp", "force_speculation": True, **settings})
    assert drafted == plain
    assert stats["drafted_tokens"] > 50
    assert (stats["preemptions"] > 0) == ("num_pages" in settings)
    assert (stats["prefix_hit_tokens"] > 0) == settings.get("prefix_cache", True)


@pytest.mark.skipif(cpu.library() is None, reason=cpu.status())
def test_the_c_kernels_change_no_token_in_bf16_either(tmp_path):
    folder = make_mtp_model(tmp_path, "glm4_moe", first_k_dense_replace=3)
    plain, _ = texts(folder, requests(), dtype="bfloat16")
    for kind in ("mtp", "ngram"):
        assert texts(folder, requests(), dtype="bfloat16", speculate=kind, force_speculation=True)[0] == plain


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_do_not_depend_on_chunks_batches_or_shared_pages(models, kind):
    """The head's cache covers all positions, however these were computed, so equal texts have equal drafts."""
    (prompt, *_), params = prompts(70), SamplingParams(max_tokens=24, ignore_eos=True)
    options = {"dtype": "float32", "threads": 1, "page_size": 16, "speculate": "mtp", "force_speculation": True}

    def drafts(**settings):
        llm = LLM(models[kind], **options, **settings)
        proposer, seen = llm.engine._proposer, []
        propose = proposer.propose

        def kept(sequences, count):
            propose(sequences, count)
            seen.extend((len(s.ids), tuple(s.drafts)) for s in sequences if s.id == asked and s.drafts)

        asked = 0
        llm.engine._proposer.propose = kept
        llm.generate([prompt], params)
        whole, asked = list(seen), 1
        seen.clear()
        llm.generate([prompt, *prompts(9, 30)], params)
        return whole, seen

    whole, shared = drafts()
    pieces, _ = drafts(token_budget=7, max_sequences=3)
    assert len(whole) > 5
    assert pieces == whole
    text, reference = (
        [*prompt, *LLM(models[kind], **options).generate([prompt], params)[0].token_ids],
        Reference(models[kind]),
    )
    for length, guessed in whole[:: len(whole) // 4]:  # most drafts before these were rejected
        logits = reference.draft_logits(text[:length], len(guessed) - 1)
        assert guessed == tuple(logits[length - 2 :].argmax(-1).tolist())
    # The last position of a shared page may hold the token that followed in the sequence which computed it: the same
    # token here.
    assert shared == whole


def test_a_perfect_head_is_always_right(tmp_path):
    folder = make_predictable(tmp_path)
    drafted, stats = texts(folder, requests(), speculate="mtp", force_speculation=True)
    assert drafted == texts(folder, requests())[0]
    assert stats["acceptance"] == 1
    assert stats["acceptance_by_position"] == [1, 1, 1, 1]


def test_acceptance_is_counted_by_position():
    controller = SpeculationController(3)
    for drafted, accepted in ((3, 3), (3, 1), (2, 0), (3, 2), (1, 1)):
        controller.accepted(drafted, accepted)
    assert controller.drafted_at == [5, 4, 3]
    assert controller.accepted_at == [4, 2, 1]
    assert controller.acceptance_at == (4 / 5, 2 / 4, 1 / 3)
    assert (controller.num_drafted, controller.num_accepted, controller.acceptance) == (12, 7, 7 / 12)
    assert SpeculationController(3).acceptance_at == ()


def test_plain_steps_in_one_native_call_show_the_head_their_hidden_states(tmp_path, monkeypatch):
    """Plain and drafted steps take turns; the plain ones are one native call, or layer by layer."""
    folder = make_mtp_model(tmp_path, "glm4_moe", first_k_dense_replace=3)

    def run(on):
        monkeypatch.setenv("QUANTKIT_DECODE_PROGRAM", str(int(on)))
        llm = LLM(folder, dtype="float32", threads=1, page_size=16, max_length=64, max_sequences=4, speculate="mtp")
        assert (llm.engine.runner.program_status == "one native call") == on
        return drafts_in_turns(llm, prompts(5, 17, 9), SamplingParams(max_tokens=24, ignore_eos=True))

    assert run(True) == run(False)


def test_while_drafts_are_off_the_head_takes_one_step_per_page(models, monkeypatch):
    llm = LLM(models["glm4_moe"], threads=1, page_size=16, speculate="mtp")
    monkeypatch.setattr(llm.engine.controller, "choose", lambda num_sequences: 0)
    model, seen = llm.engine.model, []
    compute = model.draft_states

    def counted(hidden, batch, cache):
        seen.append(tuple(batch.query_lengths))
        return compute(hidden, batch, cache)

    monkeypatch.setattr(model, "draft_states", counted)
    llm.generate(prompts(5, 20), SamplingParams(max_tokens=40, ignore_eos=True))
    # 44 and 59 positions: the prompt of 20 fills a page at once; other pages fill step by step.
    assert seen == [(20,), (16,), (12,), (16,), (16,)]


def test_the_heads_keys_and_values_are_never_quantized(models):
    llm = LLM(models["glm4_moe"], speculate="mtp", force_speculation=True, kv_cache="int8", threads=1)
    assert [layout.scheme.is_quantized for layout in llm.engine.runner.cache.layouts] == [True, True, False]
    llm.generate(prompts(5, 40), SamplingParams(max_tokens=12, ignore_eos=True))
    assert llm.stats()["drafted_tokens"] > 0
    llm.engine.check_integrity()


def test_what_cannot_draft_is_refused(models, tmp_path):
    plain = make_loud_model(tmp_path / "plain", "llama")
    with pytest.raises(
        RequestError, match=r"the model has no MTP head that can draft; use speculate=ngram \(--speculate ngram\)"
    ):
        LLM(plain, speculate="mtp", lazy=True)
    with pytest.raises(RequestError, match="transformers runs this model, without its MTP head; use speculate=ngram"):
        LLM(models["glm4_moe"], speculate="mtp", backend="transformers", lazy=True)
    with pytest.raises(RequestError, match=r"kv_budget does not work with .* an MTP head"):
        LLM(models["glm4_moe"], speculate="mtp", kv_budget=64, lazy=True)
    hybrid = ["linear_attention", "full_attention", "full_attention"]
    recurrent = make_mtp_model(tmp_path / "hybrid", "qwen3_5_text", layer_types=hybrid)
    with pytest.raises(RequestError, match="keeps a recurrent state"):
        LLM(recurrent, speculate="mtp", lazy=True)


def test_a_head_without_a_tensor_is_refused(tmp_path):
    folder = make_mtp_model(tmp_path, "glm4_moe")
    edit_tensors(folder, model__layers__2__hnorm__weight=None)
    with pytest.raises(CheckpointError, match=r"tensor model.layers.2.hnorm.weight \(64,\) is missing"):
        LLM(folder, speculate="mtp")


@pytest.mark.parametrize("kind", ["qwen3_5_text", "glm4_moe"])
def test_a_quantized_head_drafts_too(models, tmp_path, kind):
    """The head's codes give the drafts of the same weights when these are stored decoded."""
    options = {"mtp": "int8", "weights.group_size": 32}
    quantize(models[kind], "rtn-int8", tmp_path / "out", overrides=options, device="cpu")
    convert(tmp_path / "out", "dense", tmp_path / "dense")
    (ids,) = prompts(20)
    decoded = drafts_of(tmp_path / "dense", ids, 64, 2)
    torch.testing.assert_close(drafts_of(tmp_path / "out", ids, 64, 2), decoded, rtol=0, atol=2e-3)
    assert (drafts_of(models[kind], ids, 64, 0) - decoded[:19]).abs().max() > 1e-3
    plain, _ = texts(tmp_path / "out", requests())
    drafted, stats = texts(tmp_path / "out", requests(), speculate="mtp", force_speculation=True)
    assert drafted == plain
    assert stats["drafted_tokens"] > 50
