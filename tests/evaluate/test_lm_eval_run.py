"""What lm-eval computes, as records, and how it is called."""

from __future__ import annotations

import pytest

from quantkit.evaluate.lm_eval_run import _patched_lm_eval, task_results


def test_a_template_is_compiled_once_for_all_items():
    env = pytest.importorskip("lm_eval.utils").env
    with _patched_lm_eval():
        assert env.from_string("{{x}}") is env.from_string("{{x}}")
        assert env.from_string("{{x}}").render(x=1) == "1"
    assert env.from_string("{{x}}") is not env.from_string("{{x}}")


def lm_eval_results(**changes):
    """What `simple_evaluate` returns, made by hand."""
    rows = [
        {"doc_id": n, "doc_hash": f"h{n}", "filter": answers, "metrics": ["exact_match", "pair"], "pair": (1, 2)}
        | {"exact_match": score, "resps": [[f"answer {n}"]]}
        for answers, scores in {"strict": (0, 0), "loose": (1.0, 0)}.items()
        for n, score in enumerate(scores)
    ]
    return {
        "configs": {"t": {"output_type": "generate_until", "metric_list": [{"metric": "pair"}]}},
        "results": {"t": {"alias": "t", "exact_match,strict": 0.0, "exact_match_stderr,strict": "N/A", **changes}},
        "samples": {"t": rows},
        "higher_is_better": {"t": {"exact_match": True, "ppl": False}},
        "n-samples": {"t": {"effective": 2}},
        "n-shot": {"t": 5},
        "versions": {"t": 3.0},
    }


def test_the_first_filter_of_the_favourite_metric_counts():
    (task,) = task_results(lm_eval_results(**{"exact_match,loose": 0.5, "pair,strict": 7.0}), len)
    assert (task.metric, task.value, task.stderr, task.scores) == ("exact_match", 0.0, None, (0.0, 0.0))
    assert task.others == {"exact_match,loose": 0.5, "pair,strict": 7.0}
    assert (task.num_fewshot, task.version, task.mean_answer_tokens) == (5, "3.0", 8)


def test_a_task_scored_as_a_whole_keeps_no_samples():
    evaluation = lm_eval_results()
    evaluation["results"]["t"] = {"ppl,none": 9.0, "ppl_stderr,none": 0.5}
    (task,) = task_results(evaluation, len)
    assert (task.metric, task.value, task.stderr, task.samples) == ("ppl", 9.0, 0.5, ())
    assert (task.higher_is_better, task.num_samples) == (False, 2)
