"""Records: there and back through JSON, refusals that name the place, and what is computed from raw numbers."""

from __future__ import annotations

import json
import math

import pytest

from quantkit.errors import ReportError
from quantkit.results import (
    BenchmarkRun,
    ModelFacts,
    PerplexityResult,
    Report,
    RequestTiming,
    RooflineRecord,
    SensitivityMap,
    SensitivityRecord,
    TaskResult,
    Workload,
)
from tests.report.synthetic import make_report


@pytest.fixture(scope="module")
def report() -> Report:
    return make_report()


def test_a_report_survives_json(report):
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_a_report_of_another_version_is_refused_before_its_fields_are_looked_at():
    with pytest.raises(ReportError, match=r"schema version 9, but this quantkit reads versions 1 to 2; run `quantkit"):
        Report.from_dict({"schema_version": 9, "novel": 1})


def changed(report: Report, change) -> dict:
    data = json.loads(json.dumps(report.to_dict()))
    change(data)
    return data


def put(path, value):
    def change(data):
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


WRONG = [
    (put(["model", "num_bytes"], "many"), r"report\.model\.num_bytes: expected int, found 'many'"),
    (put(["model", "num_byte"], 1), r"report\.model: unknown field 'num_byte' \(did you mean 'num_bytes'\?\)"),
    (put(["sensitivity", "records", 0, "kl"], None), None),  # null stands for what is not finite
    (put(["sensitivity", "records", 0, "modules"], "q"), r"sensitivity\.records\[0\]\.modules: expected .*found 'q'"),
    (put(["sensitivity", "proposal", "action"], "pray"), r"action: 'pray' is not one of 'ignore', 'more bits'"),
    (put(["gates", 1, "held"], 1), r"report\.gates\[1\]\.held: expected bool, found 1"),
    (put(["sensitivity", "proposal", "groups", 0], [1]), r"groups\[0\]: expected 2 entries, found 1"),
    (put(["evaluation"], [1]), r"report\.evaluation: expected a JSON object, found list"),
    (lambda data: data["fidelity"].pop("mean_kl"), r"report\.fidelity: field 'mean_kl' is missing"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_does_not_fit_is_refused_with_its_path(report, change, message):
    data = changed(report, change)
    if message is None:
        assert math.isnan(Report.from_dict(data).sensitivity.records[0].kl)
        return
    with pytest.raises(ReportError, match=message):
        Report.from_dict(data)


def timing(*token_s: float, arrived: float = 1.0, prompt: int = 10) -> RequestTiming:
    return RequestTiming(request_id=0, prompt_tokens=prompt, arrived_s=arrived, token_s=token_s)


def test_latencies_are_computed_from_timestamps():
    one = timing(1.5, 1.75, 2.5)
    assert (one.ttft_s, one.tpot_s, one.latency_s, one.num_new_tokens) == (0.5, 0.5, 1.5, 3)
    assert one.inter_token_s == (0.25, 0.75)
    assert run_of(one).context_gaps == ((11, 0.25), (12, 0.75))


def test_tokens_of_one_step_share_its_time():
    one = timing(1.0, 2.0, 2.0, 2.0, 2.0, 2.5, 2.5)
    assert one.inter_token_s == (0.25, 0.25, 0.25, 0.25, 0.25, 0.25)
    assert sum(one.inter_token_s) == 1.5
    assert timing(1.0, 1.0, 2.0).inter_token_s == (0.0, 1.0)  # nothing came before the first tokens


def test_a_request_without_tokens_has_no_latency():
    none = timing()
    assert (none.ttft_s, none.tpot_s, none.latency_s, none.inter_token_s) == (None, None, None, ())
    assert timing(2.0).tpot_s is None


def run_of(*requests: RequestTiming, **limits) -> BenchmarkRun:
    load = Workload(name="x", mode="closed", num_requests=len(requests), prompt_tokens=10, new_tokens=3, **limits)
    return BenchmarkRun(workload=load, requests=requests)


def test_rates_are_over_the_whole_run():
    run = run_of(timing(1.5, 2.0, arrived=1.0), timing(2.0, 3.0, arrived=1.5), timing(arrived=2.0))
    assert run.duration_s == 2.0
    assert (run.output_tokens_per_s, run.requests_per_s, run.goodput_per_s) == (2.0, 1.0, None)


def test_goodput_counts_requests_that_meet_every_limit():
    slow_start, slow_stream, good = timing(3.0, 3.1), timing(1.2, 3.2), timing(1.2, 1.3)
    run = run_of(slow_start, slow_stream, good, timing(), ttft_limit_s=0.5, tpot_limit_s=0.5)
    assert run.goodput_per_s == pytest.approx(1 / 2.2)


def test_a_run_without_tokens_has_no_rates():
    run = run_of(timing())
    assert (run.duration_s, run.output_tokens_per_s, run.requests_per_s) == (0.0, None, None)


def test_a_step_against_the_ceilings():
    sizes = {"batch": 1, "context": 0, "num_tokens": 1, "bytes_moved": 1000, "flops": 4000}
    step = RooflineRecord(phase="decode", seconds=2.0, copy_bytes_per_s=1e3, gemm_flops_per_s=8e3, **sizes)
    assert (step.intensity, step.mbu, step.mfu, step.floor_s, step.bound_by) == (4.0, 0.5, 0.25, 1.0, "memory")


def test_perplexity_is_over_all_tokens_not_a_mean_of_windows():
    text = PerplexityResult(
        data="x", window=4, stride=4, through="prefill", window_nll=(2.0, 7.0), window_tokens=(1, 2)
    )
    assert (text.nll, text.num_tokens) == (9.0, 3)
    assert text.perplexity == pytest.approx(math.exp(3))


def test_a_perplexity_beyond_floats_is_infinite():
    text = PerplexityResult(data="x", window=1, stride=1, through="decode", window_nll=(900.0,), window_tokens=(1,))
    assert text.perplexity == math.inf


def test_a_sensitivity_map_adds_up():
    records = tuple(SensitivityRecord(layer=i, group="o", modules=("m",), kl=kl) for i, kl in enumerate((0.1, 0.3)))
    sensitivity = SensitivityMap(data="x", num_tokens=1, records=records, total_kl=0.5)
    assert sensitivity.additivity == pytest.approx(0.8)
    assert [r.layer for r in sensitivity.worst(1)] == [1]
    assert SensitivityMap(data="x", num_tokens=1, records=(), total_kl=0.0).additivity is None


def test_answers_without_text_have_no_length():
    assert TaskResult(task="t", metric="acc", value=1.0, stderr=None, num_samples=0).mean_answer_tokens is None


def test_a_report_without_gates_holds_and_finds_nothing():
    report = Report(model=ModelFacts(name="x"))
    assert report.held
    assert report.find_comparison("all tasks") is None
