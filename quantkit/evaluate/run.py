"""Run a whole evaluation of one model: lm-eval tasks, perplexity and long contexts."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from quantkit.demo import bundled_folder
from quantkit.errors import DataError, QuantkitError, first_line
from quantkit.evaluate.behaviour import BehaviourPlan, Trace, has_chat_template, make_plan, measure_rates, sample
from quantkit.evaluate.engine import Evaluated
from quantkit.evaluate.long_context import long_context
from quantkit.evaluate.options import EvaluationOptions
from quantkit.evaluate.perplexity import adds_bos, perplexity
from quantkit.evaluate.prompt_sets import read_prompts
from quantkit.evaluate.tasks import (
    LEDGERS,
    Asked,
    LongContext,
    Text,
    check_tasks,
    load_suite,
    load_tasks,
    questions_for,
    read_named_text,
    speaks_demo,
)
from quantkit.results import EvaluationResult, PerplexityResult, SampleRecord, TaskResult
from quantkit.runtime.vllm_engine import VllmLLM

if TYPE_CHECKING:
    from quantkit.evaluate.language_model import QuantkitLM

Progress = Callable[[str], None]


def evaluate(
    llm: Evaluated,
    options: EvaluationOptions | None = None,
    *,
    progress: Progress | None = None,
    traces: Sequence[Trace] | None = None,
    **asked_for: Any,
) -> EvaluationResult:
    """Evaluate one model.

        evaluate(load_llm("demo-awq-int4"), tasks=["demo_facts"], limit=100)

    Args:
        llm: model from `engine.load_llm`, or another loaded model.
        options: options of the evaluation; None = the suite `quick`.
        progress: callback for lines of progress.
        traces: the model's answers to the behaviour test, if it has answered; None = it is asked here.
        asked_for: fields of `EvaluationOptions` that override `options`.
    Raises:
        DataError: there is nothing to evaluate, a task or text is not available, or lm-eval is missing.
    """
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in asked_for.items()}
    options = replace(options or EvaluationOptions(suite=None if given else "quick"), **given)
    say = progress or (lambda _: None)
    began = time.perf_counter()
    asked, seed, left_out = questions_for(llm, options)
    plan = behaviour_plan(llm, options)
    if not (asked.tasks or asked.perplexity or asked.long_context or plan):
        raise DataError("nothing to evaluate: give tasks, texts, prompts or a suite")
    # Texts are read before anything is computed.
    texts = [(part, read_named_text(part.text, options.data)) for part in asked.perplexity]
    tasks = _run_tasks(llm, asked, options, seed, say) if asked.tasks else ()
    measured = [result for part, text in texts for result in _perplexities(llm, part, text, options, say)]
    if asked.long_context is not None:
        tasks += _long_context(llm, asked.long_context, seed, say)
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
    """Return the behaviour test that is asked for; None if there is none, or the suite's does not fit the model.

    Raises:
        RequestError: a test is asked for by option, and the model has no chat template.
        DataError: the prompts cannot be read, or the model can take none of them.
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


def answer_prompts(llm: Evaluated, plan: BehaviourPlan, say: Progress) -> list[Trace]:
    """Let a model answer the prompts of a behaviour test, and tell progress."""
    subject = f"behaviour, {len(plan.questions)} prompts, {plan.num_seeds} answers each"
    say(subject)
    return sample(llm, plan, lambda line: say(f"{subject}: {line}"))


def _behaviour_setting(llm: Evaluated, asked: Asked, plan: BehaviourPlan | None) -> dict[str, str]:
    if plan is None:
        return {} if asked.behaviour is None else {"behaviour": f"left out: {llm.path.name} has no chat template"}
    left_out = f", {plan.num_left_out} left out" if plan.num_left_out else ""
    text = f"{len(plan.questions)} prompts of {plan.name}{left_out}, {plan.num_seeds} seeds, {plan.max_tokens} tokens"
    return {"behaviour": f"{text}, dialect {plan.dialect.name}"}


def check_items(llm: Evaluated, options: EvaluationOptions) -> None:
    """Load the items of all tasks for this model, so that missing ones are reported before anything is computed.

    Raises:
        DataError: lm-eval is missing, or a task or its items are not available.
    """
    asked, *_ = questions_for(llm, options)
    if asked.tasks:
        import_language_model()
        with _quiet():
            load_tasks(asked.tasks, options)


def check_evaluation(options: EvaluationOptions) -> None:
    """Check the options before a model is loaded.

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
    """Return the settings that affect the numbers, so that two evaluations can be checked for equal settings."""
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
    }


def _perplexities(
    llm: Evaluated, part: Text, text: str, options: EvaluationOptions, say: Progress
) -> Iterator[PerplexityResult]:
    for through in part.through:
        subject = f"perplexity of {part.text}, {through}"
        say(subject)

        def tell(line: str, subject: str = subject) -> None:
            say(f"{subject}: {line}")

        yield perplexity(
            llm,
            text,
            data=part.text,
            # One suite serves models of different contexts: a window is shortened to the context, not refused.
            window=None if part.window is None else min(part.window, llm.capacity),
            stride=part.stride,
            through=through,
            max_windows=part.max_windows,
            add_bos=options.add_bos,
            say=tell,
        )


def _long_context(llm: Evaluated, part: LongContext, seed: int, say: Progress) -> tuple[TaskResult, ...]:
    say(f"long contexts of {', '.join(map(str, part.lengths))} tokens")
    ledgers = bundled_folder("tasks") / LEDGERS if speaks_demo(llm) else None
    return long_context(
        llm, lengths=part.lengths, depths=part.depths, samples=part.samples, ledgers=ledgers, seed=seed, say=say
    )


def import_language_model() -> type[QuantkitLM]:
    """Import the lm-eval model class.

    Raises:
        DataError: lm-eval is missing; the message says what to install.
    """
    try:
        from quantkit.evaluate.language_model import QuantkitLM
    except ImportError as error:
        extra = "lm-eval is not installed; tasks need it: pip install '.[eval]' in quantkit's folder"
        raise DataError(f"{extra} ({first_line(error)})") from error
    return QuantkitLM


def _run_tasks(
    llm: Evaluated, asked: Asked, options: EvaluationOptions, seed: int, say: Progress
) -> tuple[TaskResult, ...]:
    import_language_model()
    say(f"reading the items of {len(asked.tasks)} tasks")
    with _quiet(), _patched_lm_eval():
        loaded = load_tasks(asked.tasks, options)
        model: Any = _language_model(llm, options, say)
        results = _simple_evaluate(model, loaded, asked.limit, options, seed)
    # Lengths of answers without BOS: special tokens were not generated.
    return task_results(results, lambda text: len(model.tok_encode(text, add_special_tokens=False)))


def _language_model(llm: Evaluated, options: EvaluationOptions, say: Progress) -> Any:
    """Wrap a model for lm-eval: with lm-eval's class for vLLM, or quantkit's class for its own engine."""
    if isinstance(llm, VllmLLM):
        from quantkit.evaluate.language_model import make_vllm_model

        return make_vllm_model(llm, add_bos_token=options.add_bos)
    ours: Any = import_language_model()
    model = ours(llm, add_bos_token=options.add_bos)
    model.say = say
    return model


def _simple_evaluate(model: Any, tasks: list[Any], limit: int | None, options: EvaluationOptions, seed: int) -> Any:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    try:
        return simple_evaluate(
            model,
            tasks=tasks,
            # The tasks are loaded already; reading lm-eval's own list takes seconds.
            task_manager=TaskManager(include_defaults=False),
            limit=limit,
            num_fewshot=options.num_fewshot,
            apply_chat_template=options.chat_template,
            # Some metrics have no closed-form standard error, and lm-eval's default of 100,000 resamples takes long.
            bootstrap_iters=1000,
            **dict.fromkeys(seeds, seed),
        )
    except QuantkitError:
        raise
    except (KeyError, ValueError, TypeError) as error:  # a task's templates and filters are programs of their own
        raise DataError(f"lm-eval cannot run these tasks ({type(error).__name__}: {first_line(error)})") from error


@contextlib.contextmanager
def _patched_lm_eval() -> Iterator[None]:
    """Patch lm-eval inside the block: compile each template once, and do not describe machine and repository.

    Compiling a template for each item took a quarter of the time. Describing the machine takes seconds on every rank,
    and git would print an error about a missing repository. lm-eval has no setting for either.
    """
    from lm_eval import evaluator
    from lm_eval.utils import env

    with (
        patch.object(env, "from_string", functools.lru_cache(env.from_string)),
        patch.multiple(evaluator, add_env_info=lambda _: None, get_git_commit_hash=lambda: None),
        patch.dict(os.environ),
    ):
        # Each rank already has every answer. lm-eval returns results only on LOCAL_RANK 0, so hide that variable.
        os.environ.pop("LOCAL_RANK", None)
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence progress bars and logs of lm-eval and datasets inside the block; quantkit prints its own progress."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        # Progress bars bypass logging and write to stderr, so the stream itself is exchanged.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


FAVOURITES = ("acc_norm", "acc", "exact_match")
"""Preferred main metrics. The first one that a task has is used; if it has none of them, the task's own
first metric.
"""


def task_results(results: Mapping[str, Any], count_tokens: Callable[[str], int]) -> tuple[TaskResult, ...]:
    """Convert lm-eval's results to one record per task.

    Args:
        results: result of lm-eval's `simple_evaluate`, including samples.
        count_tokens: function that counts the tokens of a generated text.
    """
    return tuple(_task_result(name, results, count_tokens) for name in results["configs"])


def _task_result(name: str, results: Mapping[str, Any], count_tokens: Callable[[str], int]) -> TaskResult:
    numbers, config = results["results"][name], results["configs"][name]
    # lm-eval names a number `metric,filter`; entries without a comma, such as the alias, are no metrics.
    values = {key: float(value) for key, value in numbers.items() if "," in key and _is_number(value)}
    scores = {key: value for key, value in values.items() if "_stderr," not in key}
    main = _main_key(list(scores), [entry["metric"] for entry in config.get("metric_list") or []])
    metric, answer_filter = main.split(",", 1)
    generates = config["output_type"] == "generate_until"
    # A task with several filters lists every item once per filter; all of them together would count items twice.
    rows = [row for row in results["samples"].get(name, ()) if row["filter"] == answer_filter]
    samples = tuple(_sample(name, row, count_tokens if generates else None) for row in rows)
    directions = results["higher_is_better"].get(name) or {}
    return TaskResult(
        task=name,
        metric=metric,
        value=scores[main],
        stderr=values.get(f"{metric}_stderr,{answer_filter}"),
        num_samples=len(rows) or int(results["n-samples"][name]["effective"]),
        # A task need not declare a direction: higher is better unless it says otherwise.
        higher_is_better=directions.get(metric) is not False,
        # A metric of the whole corpus has no score per item, so such a task cannot be paired.
        samples=samples if all(metric in sample.scores for sample in samples) else (),
        others={key.removesuffix(",none"): value for key, value in scores.items() if key != main},
        num_fewshot=int(results["n-shot"].get(name) or 0),
        version=str(results["versions"].get(name, "")),
    )


def _main_key(keys: list[str], declared: list[str]) -> str:
    """Return the key `metric,filter` of the preferred metric, else of the first that the task declares."""
    # Reversed, so that of several filters of one metric the first stays in the dict.
    known = {key.split(",", 1)[0]: key for key in reversed(keys)}
    return next((known[metric] for metric in (*FAVOURITES, *declared) if metric in known), keys[0])


def _sample(task: str, row: Mapping[str, Any], count_tokens: Callable[[str], int] | None) -> SampleRecord:
    scores = {name: float(row[name]) for name in row["metrics"] if _is_number(row[name])}
    answer = str(row["resps"][0][0]) if count_tokens is not None else None
    return SampleRecord(
        task=task,
        index=int(row["doc_id"]),
        scores=scores,
        answer_tokens=None if answer is None or count_tokens is None else count_tokens(answer),
        item_hash=row["doc_hash"],
        answer=answer,
    )


def _is_number(value: Any) -> bool:
    # By the name of the module, so that NumPy need not be imported; an array has a shape and is no number.
    if type(value).__module__ == "numpy":
        return getattr(value, "shape", None) == ()
    return isinstance(value, bool | int | float)
