"""Run tasks with lm-eval, and convert lm-eval's results to records.

Module `tasks` finds the lm-eval task of each name. Module `language_model` adapts the engine to lm-eval.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy

from quantkit.distribution import install_command
from quantkit.errors import DataError, QuantkitError, first_line
from quantkit.evaluate.loading import Evaluated
from quantkit.evaluate.options import EvaluationOptions
from quantkit.evaluate.tasks import Asked, load_tasks, questions_for
from quantkit.evaluate.work_sharing import Say
from quantkit.quantities import counted
from quantkit.results import SampleRecord, TaskResult
from quantkit.runtime.vllm_engine import VllmLLM

if TYPE_CHECKING:
    from quantkit.evaluate.language_model import QuantkitLM


def import_language_model() -> type[QuantkitLM]:
    """Import the lm-eval model class.

    Raises:
        DataError: lm-eval is missing; the message says what to install.
    """
    try:
        from quantkit.evaluate.language_model import QuantkitLM
    except ImportError as error:
        extra = f"tasks need lm-eval, which is not installed; run {install_command('eval')}"
        raise DataError(f"{extra} ({first_line(error)})") from error
    return QuantkitLM


def check_items(llm: Evaluated, options: EvaluationOptions) -> None:
    """Load the items of all tasks for this model, so that missing items are reported before anything is computed.

    Raises:
        DataError: lm-eval is missing, or a task or its items are not available.
    """
    asked, *_ = questions_for(llm, options)
    if asked.tasks:
        import_language_model()
        with _quiet():
            load_tasks(asked.tasks, options)


def run_tasks(llm: Evaluated, asked: Asked, options: EvaluationOptions, seed: int, say: Say) -> tuple[TaskResult, ...]:
    """Run the requested tasks, and return one result per task.

    Raises:
        DataError: lm-eval is missing or cannot run a task, or a task or its items are not available.
    """
    import_language_model()
    say(f"reading the items of {counted(len(asked.tasks), 'task')}")
    with _quiet(), _patched_lm_eval():
        loaded = load_tasks(asked.tasks, options)
        model: Any = _language_model(llm, options, say)
        results = _simple_evaluate(model, loaded, asked.limit, options, seed)
    # Count the tokens of answers without BOS, because the model did not generate special tokens.
    return task_results(results, lambda text: len(model.tok_encode(text, add_special_tokens=False)))


def _language_model(llm: Evaluated, options: EvaluationOptions, say: Say) -> Any:
    """Wrap a model for lm-eval: in lm-eval's own class if it runs in vLLM, otherwise in `QuantkitLM`."""
    if isinstance(llm, VllmLLM):
        from quantkit.evaluate.language_model import make_vllm_model

        return make_vllm_model(llm, add_bos_token=options.add_bos)
    ours: Any = import_language_model()
    model = ours(llm, add_bos_token=options.add_bos)
    model.say = say
    return model


def _simple_evaluate(model: Any, tasks: list[Any], limit: float | None, options: EvaluationOptions, seed: int) -> Any:
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
    except (KeyError, ValueError, TypeError) as error:  # the templates and filters of a task are code
        raise DataError(
            f"lm-eval cannot run these tasks ({type(error).__name__}: {first_line(error)}); run them one by one, and "
            "leave out the task that fails"
        ) from error


@contextlib.contextmanager
def _patched_lm_eval() -> Iterator[None]:
    """Make lm-eval compile each template only once, and skip its description of the machine, inside the `with` block.

    Compiling a template for each item took a quarter of the time. The description takes seconds on every rank, and
    makes git print an error if there is no repository. lm-eval has no setting for either.
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
        # Progress bars bypass logging and write to stderr, so the stream itself is replaced.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


FAVOURITES = ("acc_norm", "acc", "exact_match")
"""Preferred main metrics. The main metric of a task is the first of these that the task has. If the task has none of
these, its main metric is the first that it declares.
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
    # lm-eval names a number `metric,filter`; entries without a comma, such as the alias, are not metrics.
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
        # A metric of the whole corpus has no score per item, so two models cannot be compared item by item.
        samples=samples if all(metric in sample.scores for sample in samples) else (),
        others={key.removesuffix(",none"): value for key, value in scores.items() if key != main},
        num_fewshot=int(results["n-shot"].get(name) or 0),
        version=str(results["versions"].get(name, "")),
    )


def _main_key(keys: list[str], declared: list[str]) -> str:
    """Return the key `metric,filter` of a task's main metric, see `FAVOURITES`; the first key if nothing matches."""
    # Reversed, so that the dict keeps the first of several filters of a metric.
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
    return isinstance(value, int | float | numpy.number | numpy.bool_)
