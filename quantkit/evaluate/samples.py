"""lm-eval's results as quantkit's records: one main metric per task, and every item's scores."""

from collections.abc import Callable, Mapping
from typing import Any

from quantkit.results import SampleRecord, TaskResult

FAVOURITES = ("acc_norm", "acc", "exact_match")
"""The metric by which a task is judged, the first it has; a task without any of these by its own first one."""


def task_results(results: Mapping[str, Any], count_tokens: Callable[[str], int]) -> tuple[TaskResult, ...]:
    """One record per task.

    Args:
        results: what lm-eval's `simple_evaluate` returned, samples included.
        count_tokens: length of a generated text.
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
    """`metric,filter` of the favourite metric, else of the first that the task declares."""
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
