"""Run a whole evaluation of one model: lm-eval tasks, perplexity, long contexts and behaviour."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from quantkit.demo import bundled_folder
from quantkit.errors import DataError
from quantkit.evaluate.behaviour import (
    BehaviourPlan,
    Trace,
    has_chat_template,
    make_plan,
    measure_rates,
    sample_answers,
)
from quantkit.evaluate.lm_eval_run import run_tasks
from quantkit.evaluate.loading import Evaluated
from quantkit.evaluate.long_context import long_context
from quantkit.evaluate.options import EvaluationOptions
from quantkit.evaluate.perplexity import adds_bos, perplexity
from quantkit.evaluate.prompt_sets import read_prompts
from quantkit.evaluate.tasks import (
    LEDGERS,
    Asked,
    Text,
    check_tasks,
    load_suite,
    questions_for,
    read_named_text,
    speaks_demo,
)
from quantkit.evaluate.work_sharing import Say, about
from quantkit.quantities import counted
from quantkit.results import EvaluationResult, PerplexityResult


def evaluate(
    llm: Evaluated,
    options: EvaluationOptions | None = None,
    *,
    progress: Say | None = None,
    traces: Sequence[Trace] | None = None,
    share: int = 1,
    **asked_for: Any,
) -> EvaluationResult:
    """Evaluate one model.

        evaluate(load_llm("demo-awq-int4"), tasks=["demo_facts"], limit=100)

    Args:
        llm: model from `loading.load_llm`, or another loaded model.
        options: options of the evaluation; None = the suite `quick`, or no suite if `asked_for` has any fields.
        progress: callback for progress messages.
        traces: the model's answers to the behaviour test, if they exist already; None = let the model answer now.
        share: use only the first 1 / `share` of each task's items and of each text's windows.
        asked_for: fields of `EvaluationOptions` that override `options`.
    Raises:
        DataError: there is nothing to evaluate, a task or text is not available, or lm-eval is missing.
    """
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in asked_for.items()}
    options = replace(options or EvaluationOptions(suite=None if given else "quick"), **given)
    say = progress or (lambda _: None)
    began = time.perf_counter()
    asked, seed, left_out = questions_for(llm, options)
    asked = asked.sample(share) if share > 1 else asked
    plan = behaviour_plan(llm, options)
    if not (asked.tasks or asked.perplexity or asked.long_context or plan):
        raise DataError("nothing to evaluate: give a suite, tasks, texts or prompts, e.g. --suite quick")
    # Texts are read before anything is computed.
    texts = [(part, read_named_text(part.text, options.data)) for part in asked.perplexity]
    tasks = run_tasks(llm, asked, options, seed, say) if asked.tasks else ()
    measured = [result for part, text in texts for result in _perplexities(llm, part, text, options, say)]
    if asked.long_context is not None:
        say(f"long contexts of {', '.join(map(str, asked.long_context.lengths))} tokens")
        ledgers = bundled_folder("tasks") / LEDGERS if speaks_demo(llm) else None
        tasks += long_context(llm, asked.long_context, ledgers=ledgers, seed=seed, say=say)
    if plan is not None and traces is None:
        traces = answer_prompts(llm, plan, say)
    return EvaluationResult(
        model=str(llm.path),
        arithmetic=llm.arithmetic,
        tasks=tasks,
        perplexity=tuple(measured),
        behaviour=measure_rates(plan, traces) if plan is not None and traces is not None else (),
        settings={**_settings(llm, asked, options, seed), **left_out, **_behaviour_setting(llm, asked, plan)},
        seconds=time.perf_counter() - began,
    )


def behaviour_plan(llm: Evaluated, options: EvaluationOptions) -> BehaviourPlan | None:
    """Return the requested behaviour test.

    None if no test is requested, or if only the suite requests one and the model has no chat template.

    Raises:
        RequestError: an option requests a test, but the model has no chat template.
        DataError: the prompts cannot be read, or no prompt can be used with the model.
    """
    asked, seed, _ = questions_for(llm, options)
    required = options.behaviour is True or options.prompts is not None
    if asked.behaviour is None or not (required or has_chat_template(llm)):
        return None
    counts = [count for count in (asked.behaviour.prompts, options.limit) if count is not None]
    return make_plan(
        llm,
        read_prompts(options.prompts),
        name="bundled" if options.prompts is None else options.prompts.name,
        count=min(counts, default=None),
        seeds=asked.behaviour.seeds,
        max_tokens=asked.behaviour.max_tokens,
        seed=seed,
    )


def answer_prompts(llm: Evaluated, plan: BehaviourPlan, say: Say) -> list[Trace]:
    """Let a model answer the prompts of a behaviour test, and report progress."""
    subject = f"behaviour, {counted(len(plan.questions), 'prompt')}, {counted(plan.num_seeds, 'answer')} each"
    say(subject)
    return sample_answers(llm, plan, about(subject, say))


def _behaviour_setting(llm: Evaluated, asked: Asked, plan: BehaviourPlan | None) -> dict[str, str]:
    if plan is None:
        return {} if asked.behaviour is None else {"behaviour": f"left out: {llm.path.name} has no chat template"}
    left_out = f", {plan.num_left_out} left out" if plan.num_left_out else ""
    asked_for = f"{counted(plan.num_seeds, 'seed')}, {counted(plan.max_tokens, 'token')}"
    text = f"{counted(len(plan.questions), 'prompt')} of {plan.name}{left_out}, {asked_for}"
    return {"behaviour": f"{text}, dialect {plan.dialect.name}"}


def check_evaluation(options: EvaluationOptions) -> None:
    """Check the options of an evaluation, as far as this is possible without a model.

    Raises:
        DataError: the suite, a folder, a text or the items of a shipped task do not exist, or a prompt is not valid.
    """
    if options.suite is not None:
        load_suite(options.suite)
    for text in options.texts:
        read_named_text(text, options.data)
    if options.prompts is not None:
        read_prompts(options.prompts)
    check_tasks(options.tasks, options)


def _settings(llm: Evaluated, asked: Asked, options: EvaluationOptions, seed: int) -> dict[str, str]:
    """Return the settings that affect the results, to check whether two evaluations had the same settings."""
    bos = options.add_bos if options.add_bos is not None else llm.tokenizer is not None and adds_bos(llm.tokenizer)
    return {
        "engine": llm.engine_name,
        "suite": options.suite or "",
        "limit": "all" if asked.limit is None else str(asked.limit),
        "few-shot examples": "as each task says" if options.num_fewshot is None else str(options.num_fewshot),
        "chat template": "applied" if options.chat_template else "not applied",
        "BOS": "added" if bos else "not added",
        "KV cache": llm.kv_type,
        "seed": str(seed),
        **({"adapter": llm.adapter} if llm.adapter else {}),
    }


def _perplexities(
    llm: Evaluated, part: Text, text: str, options: EvaluationOptions, say: Say
) -> Iterator[PerplexityResult]:
    for through in part.through:
        subject = f"perplexity of {part.text}, {through}"
        say(subject)
        yield perplexity(
            llm,
            text,
            data=part.text,
            # A suite is used for models with different contexts, so a window is shortened to the context, not refused.
            window=None if part.window is None else min(part.window, llm.capacity),
            stride=part.stride,
            through=through,
            max_windows=part.max_windows,
            add_bos=options.add_bos,
            say=about(subject, say),
        )
