"""Test that lm-eval gives the same results over HTTP as in process, item by item."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("tenacity")

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from quantkit.demo import bundled_folder
from quantkit.evaluate.language_model import QuantkitLM
from quantkit.evaluate.options import EvaluationOptions
from quantkit.evaluate.tasks import load_tasks
from quantkit.runtime.llm import LLM
from tests.helpers import SHARED
from tests.server.conftest import serving

DEMO = bundled_folder("demo") / "model"
BLIMP = SHARED.parent / "data" / "benchmarks"


@pytest.fixture(scope="module")
def door():
    with serving(DEMO, dtype="float32") as server:
        yield server


@pytest.fixture(scope="module")
def inside():
    return QuantkitLM(LLM(DEMO, threads=1, dtype="float32"))


def remote(server, kind="LocalCompletionsAPI", path="completions"):
    from lm_eval.models import openai_completions

    return getattr(openai_completions, kind)(
        model="tiny", base_url=f"{server.url}/v1/{path}", tokenizer=str(DEMO), tokenizer_backend="huggingface",
        num_concurrent=4, max_retries=1, max_length=512, add_bos_token=True,
    )  # fmt: skip


def answers(model, tasks, options=EvaluationOptions(), limit=12):  # noqa: B008 - frozen
    result = simple_evaluate(
        model, tasks=load_tasks(tasks, options), limit=limit, task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0, log_samples=True,
    )  # fmt: skip
    return {task: [sample["resps"] for sample in samples] for task, samples in result["samples"].items()}


def assert_alike(actual, expected):
    assert actual.keys() == expected.keys()
    for task, items in expected.items():
        for mine, other in zip(actual[task], items, strict=True):
            for ((score, greedy),), ((expected_score, expected_greedy),) in zip(mine, other, strict=True):
                assert float(score) == pytest.approx(float(expected_score), abs=1e-4)
                assert str(greedy) == str(expected_greedy)


@pytest.mark.parametrize("task", ["demo_facts", pytest.param("demo_agreement", marks=pytest.mark.slow)])
def test_choices(door, inside, task):
    assert_alike(answers(remote(door), [task]), answers(inside, [task]))


@pytest.mark.slow
@pytest.mark.skipif(not BLIMP.is_dir(), reason="the real benchmark items are missing")
@pytest.mark.parametrize("name", ["blimp_anaphor_gender_agreement", "blimp_passive_1"])
def test_blimp(door, inside, name):
    options = EvaluationOptions(data=(Path(BLIMP),))
    assert_alike(answers(remote(door), [name], options), answers(inside, [name], options))


@pytest.mark.slow
def test_generated_texts(door, inside):
    assert answers(remote(door), ["demo_answers"], limit=6) == answers(inside, ["demo_answers"], limit=6)


@pytest.mark.slow
def test_a_conversation(served):
    """`local-chat-completions` runs a generation task on the tiny model; the demo model has no chat template."""
    model = remote(served, "LocalChatCompletion", "chat/completions")
    result = simple_evaluate(
        model, tasks=load_tasks(["demo_answers"], EvaluationOptions()), limit=3, apply_chat_template=True,
        task_manager=TaskManager(include_defaults=False), bootstrap_iters=0,
    )  # fmt: skip
    assert len(result["samples"]["demo_answers"]) == 3
