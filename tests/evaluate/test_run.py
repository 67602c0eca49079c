"""A whole evaluation: records of every item, the suite's part for the model, long contexts, and pairs of models."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from quantkit.demo import DEMO_MODEL, bundled_folder
from quantkit.errors import DataError, InputError
from quantkit.evaluate import loading
from quantkit.evaluate import long_context as module
from quantkit.evaluate.loading import check_same_language, load_llm, other_arithmetic
from quantkit.evaluate.long_context import WRITERS, ledger_writer, long_context, write_passkey
from quantkit.evaluate.options import DEFAULT_TEXT_TOKENS, EvaluationOptions
from quantkit.evaluate.run import check_evaluation, evaluate
from quantkit.evaluate.tasks import LEDGERS, LongContext, speaks_demo
from quantkit.results import EvaluationResult
from quantkit.results.statistics.comparison import compare_evaluations

SUITE = """
description: small
demo:
  tasks: [demo_facts, demo_answers]
  limit: 12
  perplexity: [{text: demo, window: 64, max_windows: 2, through: [prefill, decode]}]
others: {long_context: {lengths: [200, 9999], depths: [0, 1], samples: 1}}
seed: 5
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    path = tmp_path_factory.mktemp("suites") / "small.yaml"
    path.write_text(SUITE)
    return str(path)


@pytest.fixture(scope="module")
def demo():
    return load_llm(None, dtype="float32", device="cpu", threads=1)


@pytest.fixture(scope="module")
def stranger(loud_llama):
    return load_llm(str(loud_llama), dtype="float32", device="cpu", threads=1)


@pytest.fixture(scope="module")
def result(demo, suite):
    return evaluate(demo, EvaluationOptions(suite=suite))


def test_every_item_has_a_record(result):
    facts, answers = result.find_task("demo_facts"), result.find_task("demo_answers")
    assert (facts.metric, facts.num_samples, facts.num_fewshot, facts.version) == ("acc", 12, 0, "1.0")
    assert facts.scores == (1.0,) * 12
    assert facts.value == 1.0
    assert [sample.index for sample in facts.samples] == list(range(12))
    assert len({sample.item_hash for sample in facts.samples}) == 12
    assert all(sample.answer is None and sample.answer_tokens is None for sample in facts.samples)
    assert answers.metric == "exact_match"
    assert all(sample.answer_tokens == len(sample.answer) for sample in answers.samples)  # digits are tokens
    assert answers.mean_answer_tokens > 1


def test_the_record_says_how_it_was_made_and_reads_itself_back(result, demo, suite):
    assert result.settings == {
        "engine": "quantkit",
        "suite": suite,
        "limit": "12",
        "few-shot examples": "as each task says",
        "chat template": "not applied",
        "BOS": "added",
        "KV cache": "auto",
        "seed": "5",
    }
    assert (result.model, result.arithmetic) == (str(DEMO_MODEL), "float32")
    assert EvaluationResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    prefill, decode = result.perplexity
    assert (prefill.through, decode.through) == ("prefill", "decode")
    assert decode.nll == pytest.approx(prefill.nll, rel=1e-5)


def test_the_same_model_again_differs_in_nothing(result, demo, suite):
    again = evaluate(demo, EvaluationOptions(suite=suite))
    compared = compare_evaluations(again, result)
    assert {item.subject for item in compared} >= {"demo_facts", "demo_answers", "answer length: demo_answers"}
    assert all(item.difference == pytest.approx(0, abs=1e-4) for item in compared)


def test_a_share_asks_the_first_items_and_windows_of_each_part(demo, suite, result):
    part = evaluate(demo, EvaluationOptions(suite=suite), share=2)
    assert part.settings["limit"] == "6"
    for task, whole in zip(part.tasks, result.tasks, strict=True):
        assert [sample.item_hash for sample in task.samples] == [sample.item_hash for sample in whole.samples[:6]]
    assert [text.window_tokens for text in part.perplexity] == [text.window_tokens[:1] for text in result.perplexity]


def test_a_share_of_all_items_is_a_share(demo):
    (task,) = evaluate(demo, EvaluationOptions(suite=None, tasks=("demo_facts",)), share=40).tasks
    (whole,) = evaluate(demo, EvaluationOptions(suite=None, tasks=("demo_facts",), limit=1000)).tasks
    assert task.num_samples == -(-whole.num_samples // 40) < whole.num_samples


def test_options_add_to_the_suite_and_replace_its_limit(demo, suite, tmp_path):
    text = tmp_path / "mine.txt"
    text.write_text("What is the flag of Marstad? " * 9)
    told = []
    options = EvaluationOptions(suite=suite, tasks=("demo_agreement",), limit=2, texts=(str(text),), window=32, seed=1)
    evaluation = evaluate(demo, options, progress=told.append)
    assert [task.num_samples for task in evaluation.tasks] == [2, 2, 2]
    assert [item.data for item in evaluation.perplexity] == ["demo", "demo", str(text)]
    assert evaluation.perplexity[-1].window == 32
    assert evaluation.settings["seed"] == "1"
    assert any("reading the items of 3 tasks" in line for line in told)


def test_perplexity_is_of_the_beginning_of_a_text_unless_all_of_it_is_asked_for(demo, tmp_path):
    text = tmp_path / "long.txt"
    text.write_text("What is the flag of Marstad? " * 40)  # 281 tokens, in windows of 31 beside BOS
    asked = {"texts": (str(text),), "window": 32}
    (cut,) = evaluate(demo, EvaluationOptions(**asked, text_tokens="100")).perplexity
    assert cut.part == "the first 124 of 281 tokens"
    (whole,) = evaluate(demo, EvaluationOptions(**asked, text_tokens="all")).perplexity
    assert (whole.part, whole.num_tokens) == ("all 281 tokens", 281)
    assert whole.window_nll[:4] == pytest.approx(cut.window_nll, rel=1e-5)
    text.write_text("What is the flag of Marstad? " * 3000)
    told: list[str] = []
    (usual,) = evaluate(demo, EvaluationOptions(texts=(str(text),)), progress=told.append).perplexity
    assert usual.read_tokens < usual.text_tokens == 21001
    assert usual.read_tokens == pytest.approx(DEFAULT_TEXT_TOKENS, rel=0.01)


@pytest.mark.parametrize("wrong", ["none", "0", -1])
def test_a_part_of_a_text_that_is_no_number_is_refused(wrong):
    with pytest.raises(InputError, match="text_tokens '"):
        EvaluationOptions(text_tokens=wrong)


def test_one_number_of_threads_for_all_models_is_chosen_for_prompts(monkeypatch, loud_llama):
    asked = []
    choice = SimpleNamespace(threads=1)
    monkeypatch.setattr(loading, "choose_threads", lambda requested, **how: asked.append((requested, how)) or choice)
    loading._threads.cache_clear()
    for path in (loud_llama, DEMO_MODEL):
        load_llm(str(path), device="cpu")
    loading._threads.cache_clear()
    assert asked == [(None, {"decodes": False})]


def test_steps_are_shorter_for_a_large_vocabulary(monkeypatch, loud_llama):
    assert load_llm(str(loud_llama), device="cpu", threads=1).config.token_budget == 1024
    vocab = json.loads((loud_llama / "config.json").read_text())["vocab_size"]
    monkeypatch.setattr(loading, "_LOGIT_BYTES", 400 * 4 * vocab)
    assert load_llm(str(loud_llama), device="cpu", threads=1).config.token_budget == 384
    assert load_llm(str(loud_llama), device="cpu", threads=1, max_sequences=500).config.token_budget == 500


def test_fields_can_be_given_by_name(demo, suite):
    evaluation = evaluate(demo, tasks=["demo_facts"], limit=3)
    assert [(task.task, task.num_samples) for task in evaluation.tasks] == [("demo_facts", 3)]
    changed = evaluate(demo, EvaluationOptions(tasks=("demo_facts",), limit=3), limit=2, add_bos=False)
    assert (changed.tasks[0].num_samples, changed.settings["BOS"]) == (2, "not added")


def test_a_model_of_another_language_gets_the_other_part(stranger, suite, demo):
    assert speaks_demo(demo)
    assert not speaks_demo(stranger)
    evaluation = evaluate(stranger, EvaluationOptions(suite=suite))
    assert [task.task for task in evaluation.tasks] == ["passkey_200"]
    assert evaluation.perplexity == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "nothing to evaluate: give a suite, tasks, texts or prompts, e.g. --suite quick"),
        ({"texts": ("no.txt",)}, r"'no\.txt' is neither a file nor in a --data folder \(no --data folder was given\)"),
        ({"tasks": ("local_piqa",)}, "but no --data folder was given; pass --data"),
        ({"suite": "quik"}, "did you mean 'quick'"),
    ],
)
def test_bad_input_is_one_line(demo, changes, message):
    with pytest.raises(DataError, match=message):
        evaluate(demo, EvaluationOptions(**changes))
    if changes:
        with pytest.raises(DataError, match=message):
            check_evaluation(EvaluationOptions(**changes))


def test_without_lm_eval_tasks_say_what_to_install_and_the_rest_works(demo, monkeypatch):
    monkeypatch.setitem(sys.modules, "quantkit.evaluate.language_model", None)
    with pytest.raises(
        DataError, match=r"tasks need lm-eval, which is not installed; run pip install 'quantkit-lm\[eval\]'"
    ):
        evaluate(demo, tasks=["demo_facts"])
    assert evaluate(demo, texts=["demo"], window=900).perplexity[0].num_tokens > 10_000


def test_no_programs_are_run_to_describe_the_machine(demo, monkeypatch):
    collect = pytest.importorskip("torch.utils.collect_env")
    monkeypatch.setattr(collect, "run", lambda command: pytest.fail(f"ran {command}"))
    monkeypatch.setattr(subprocess, "check_output", lambda command: pytest.fail(f"ran {command}"))  # git
    assert evaluate(demo, tasks=["demo_facts"], limit=2).tasks[0].num_samples == 2


def test_ledgers_are_found_at_every_depth(demo):
    part = LongContext(lengths=(200,), depths=(0.0, 1.0), samples=3)
    (task,) = long_context(demo, part, ledgers=bundled_folder("tasks") / LEDGERS, seed=1)
    assert (task.task, task.num_samples, task.metric) == ("ledger_200", 6, "acc")
    assert set(task.others) == {"acc at depth 0", "acc at depth 1"}
    assert task.value == sum(task.scores) / 6 >= 5 / 6
    assert len({sample.item_hash for sample in task.samples}) == 6


def test_a_wrong_answer_is_not_found(demo, monkeypatch):
    write = ledger_writer(bundled_folder("tasks") / LEDGERS)
    monkeypatch.setitem(module.WRITERS, "passkey", lambda *args: replace(write(*args), answers=("zebra",)))
    (task,) = long_context(demo, LongContext(lengths=(100,), depths=(0.5,), samples=2))
    assert task.value == 0.0


@pytest.mark.parametrize("write", [write_passkey, ledger_writer(bundled_folder("tasks") / LEDGERS)])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_texts_fill_the_length_and_hold_the_fact_where_it_should_be(write, depth):
    needle = write(random.Random(3), depth, lambda text: len(text) <= 3000)
    assert 2850 < len(needle.prompt) <= 3000
    body, question = needle.prompt.rsplit("\n", 1)
    (answer,) = needle.answers
    assert answer not in question
    place = body.index(answer) / len(body)
    assert place == pytest.approx(depth, abs=0.17)
    assert write(random.Random(3), depth, lambda text: len(text) <= 3000) == needle


@pytest.mark.parametrize("kind", [kind for kind in WRITERS if kind != "passkey"])
def test_texts_with_several_facts_fill_the_length_and_hold_their_answers(kind):
    def drawn(seed):
        return WRITERS[kind](random.Random(seed), 0.5, lambda text: len(text) <= 6000)

    needle, (body, question) = drawn(3), drawn(3).prompt.rsplit("\n", 1)
    assert 5600 < len(needle.prompt) <= 6000 and needle.depth is None
    assert drawn(3) == needle != drawn(4)
    assert all(answer in body and answer not in question for answer in needle.answers)
    assert len(needle.answers) == {"multikey": 1, "multivalue": 4, "variables": 4, "words": 3}[kind]
    assert needle.score(" " + ", ".join(needle.answers)) == 1
    assert needle.score("nothing of this") == 0
    if kind == "words":
        counts = Counter(body.split("\n")[1].split())
        assert {word for word, _ in counts.most_common(3)} == set(needle.answers)
        assert counts.most_common(4)[3][1] < counts.most_common(3)[2][1]
        assert len(counts) > 100
    if kind == "variables":
        values = {}
        for name, source in re.findall(r"VAR (\w+) = (\w+)\.", body):
            values[name] = values.get(source, source)  # a variable that was not yet assigned would stay a name
        asked = question.split("the value ")[1][:5]
        assert {name for name, value in values.items() if value == asked} == set(needle.answers)
        assert len(values) == 8
    if len(needle.answers) > 1:
        assert needle.score(f"it is {needle.answers[1].upper()}.") == pytest.approx(1 / len(needle.answers))
        assert needle.score(f"{' '.join(needle.answers)}s {needle.answers[0]}") < 1  # whole words alone count
    if needle.wrong:
        assert needle.score(" ".join((*needle.answers, *needle.wrong))) == 0
        assert all(word in body for word in needle.wrong)


def test_kinds_are_asked_one_by_one(stranger):
    tasks = long_context(stranger, LongContext(lengths=(400,), samples=2, kinds=("variables", "words")))
    assert [(task.task, task.num_samples, task.others) for task in tasks] == [
        ("variables_400", 2, {}),
        ("words_400", 2, {}),
    ]
    with pytest.raises(DataError, match="the facts and the question alone exceed a length"):
        long_context(stranger, LongContext(lengths=(40,), samples=1, kinds=("variables",)))


def test_lengths_that_do_not_fit(stranger):
    with pytest.raises(
        DataError, match=r"none of the lengths 600, 9000 fits: a prompt for .* may have at most 500 tokens"
    ):
        long_context(stranger, LongContext(lengths=(600, 9000)))


def test_another_vocabulary_is_refused(stranger, tmp_path):
    with pytest.raises(DataError, match=r"have different vocabularies \(258 and 1024 tokens\)"):
        check_same_language(None, str(stranger.path))
    check_same_language(None, str(DEMO_MODEL))
    shutil.copytree(DEMO_MODEL, tmp_path / "copy")
    (tmp_path / "copy" / "tokenizer.json").unlink()
    check_same_language(None, str(tmp_path / "copy"))  # nothing is known, so nothing is refused
    assert (other_arithmetic("bfloat16"), other_arithmetic("float32")) == ("float32", "bfloat16")
