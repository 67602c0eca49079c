"""Gates: read or refused, judged on a report, and what to do when they fail."""

from __future__ import annotations

import dataclasses

import pytest

from quantkit.errors import GateError
from quantkit.results import Diagnosis, ModelFacts, Report
from quantkit.results.gates import (
    IN_PER_CENT,
    METRICS,
    MORE_PROMPTS,
    behaviour_gates,
    evaluate_gates,
    gate_numbers,
    parse_gate,
)
from quantkit.results.remedies import describe_proposal
from tests.report.synthetic import GATES, make_report


@pytest.fixture(scope="module")
def report() -> Report:
    return make_report()


READ = [
    ("recovery>=98.9", ("recovery", None, ">=", 98.9)),
    (" kl <= 0.02 ", ("kl", None, "<=", 0.02)),
    ("recovery[demo_facts]>=97", ("recovery", "demo_facts", ">=", 97.0)),
    ("recovery>=99%", ("recovery", None, ">=", 99.0)),
    ("memory_ratio<=35%", ("memory_ratio", None, "<=", 0.35)),
    ("kl<1e-2", ("kl", None, "<", 0.01)),
    ("kl<=+0.01", ("kl", None, "<=", 0.01)),
    ("loop_rate<=+1%", ("loop_rate", None, "<=", 0.01)),
    ("margin[no_tool]>=0.8", ("margin", "no_tool", ">=", 0.8)),
    ("valid_calls>=99%", ("valid_calls", None, ">=", 99.0)),
]


@pytest.mark.parametrize(("text", "expected"), READ)
def test_gates_are_read(text, expected):
    gate = parse_gate(text)
    assert (gate.metric, gate.subject, gate.operator, gate.limit) == expected
    assert parse_gate(gate.text) == gate


REFUSED = [
    ("recoverey>=98", r"unknown metric 'recoverey' \(did you mean 'recovery'\?\)"),
    ("recovery=98", r"is not valid; write a metric, a comparison and a limit, e\.g\. recovery>=98\.9"),
    ("recovery>=", "is not valid"),
    ("recovery>=9.8.7", "'9.8.7' is not a number"),
    ("recovery>=0.989", r"recovery is in per cent of the original \(about 100\), so the limit 0.989 is probably in"),
    ("top1>=97", "top1 is a share between 0 and 1"),
    ("", "is not valid"),
    ("margin[tol]>=0.8", r"unknown decision 'tol' \(did you mean 'tool'\?\); supported: tool, no_tool, thinking"),
    ("flips<=1.5", "flips is a share between 0 and 1"),
    ("valid_calls>=0.99", "valid_calls is in per cent of the original"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_what_is_no_gate_is_refused_with_what_to_write(text, message):
    with pytest.raises(GateError, match=message):
        parse_gate(text)


def test_gates_are_judged_in_order(report):
    results = evaluate_gates(report, GATES)
    assert [result.gate for result in results] == list(GATES)
    assert all(result.held and result.remedy is None for result in results)
    assert results[2].value == report.fidelity.mean_kl
    assert results[2].explanation == "kl is 0.0131, must be <= 0.02"


def test_failed_gates_name_the_modules_to_ignore(broken_report):
    failed = [result for result in evaluate_gates(broken_report, GATES) if not result.held]
    assert [result.metric for result in failed] == ["recovery", "perplexity_ratio", "kl", "top1"]
    for result in failed:
        assert result.remedy.startswith("ignore layer 23 down, layer 1 down (predicted KL")
        assert "--set 'ignore=[model.layers.23.mlp.down_proj, model.layers.1.mlp.down_proj]'" in result.remedy


def test_without_a_proposal_the_worst_groups_are_named_then_the_worst_linears(broken_report):
    no_proposal = dataclasses.replace(
        broken_report, sensitivity=dataclasses.replace(broken_report.sensitivity, proposal=None)
    )
    assert evaluate_gates(no_proposal, ["kl<=0.02"])[0].remedy.startswith("the most sensitive parts are layer 23 down")
    no_map = dataclasses.replace(broken_report, sensitivity=None)
    worst = broken_report.compression.worst_linears(1)[0][0]
    assert f"the largest errors are in {worst}" in evaluate_gates(no_map, ["kl<=0.02"])[0].remedy
    nothing = dataclasses.replace(no_map, compression=None)
    assert "smaller groups" in evaluate_gates(nothing, ["kl<=0.02"])[0].remedy


def test_speed_and_memory_have_remedies_of_their_own(report):
    speed, memory = evaluate_gates(report, ["itl_ratio<=0.1", "memory_ratio<=0.1"])
    assert "quantize the output head to 8 bits" in speed.remedy
    assert "about 1.3x at batch 1" in speed.remedy
    assert "fewer bits" in memory.remedy
    undiagnosed = dataclasses.replace(report, diagnosis=Diagnosis())
    assert "fewer weight bits" in evaluate_gates(undiagnosed, ["itl_ratio<=0.1"])[0].remedy


def test_acceptance_without_drafts_says_which_option_is_missing(report):
    report = dataclasses.replace(report, comparisons=())
    (result,) = evaluate_gates(report, ["acceptance_ratio>=0.95"])
    assert not result.held
    assert result.remedy.startswith("add `--speculate mtp` to `quantkit verify`")


def test_a_limit_inside_the_interval_is_told(report):
    tasks = report.find_comparison("all tasks")
    gate = f"recovery>={(tasks.recovery_low + tasks.recovery) / 2:.2f}"
    result = evaluate_gates(report, [gate])[0]
    assert result.held
    assert "includes the limit: use more samples to decide" in result.explanation


def test_gates_on_one_task_one_text_one_workload(report):
    gates = ["recovery[demo_facts]>=90", "itl_ratio[closed-8]<=0.6", "perplexity_ratio[demo-heldout (decode)]<=1.1"]
    results = evaluate_gates(report, gates)
    assert [result.subject for result in results] == ["demo_facts", "closed-8", "demo-heldout (decode)"]
    assert results[0].value == report.find_comparison("demo_facts").recovery
    assert all(result.held for result in results)


def test_a_subject_that_does_not_exist_is_refused_with_the_nearest(report):
    with pytest.raises(GateError, match=r"no recovery for 'demo_fact' \(did you mean 'demo_facts'\?\); it has"):
        evaluate_gates(report, ["recovery[demo_fact]>=90"])


def test_without_a_subject_the_worst_text_counts(report):
    ratios = METRICS["perplexity_ratio"].values(report)
    assert len(ratios) == 2
    assert evaluate_gates(report, ["perplexity_ratio<=1.05"])[0].value == max(ratios.values())


def test_an_answer_length_is_gated_from_both_sides(report):
    low, high = evaluate_gates(report, ["length_ratio>=0.9", "length_ratio<=0.95"])
    assert low.held
    assert not high.held


def test_what_was_not_measured_does_not_hold():
    result = evaluate_gates(Report(model=ModelFacts(name="x")), ["kl<=0.02"])[0]
    assert (result.held, result.value) == (False, None)
    assert "was not measured" in result.explanation
    assert "quantkit verify" in result.remedy


@pytest.mark.parametrize("name", METRICS)
def test_every_number_is_read_from_a_full_report_and_missing_from_an_empty_one(name, report):
    values = METRICS[name].values(report)
    assert values
    assert all(isinstance(value, int | float) for value in values.values())
    assert METRICS[name].values(Report(model=ModelFacts(name="x"))) == {}


def test_all_numbers_are_listed_by_the_names_gates_use(report):
    numbers = gate_numbers(report)
    assert numbers["recovery"] == numbers["recovery[all tasks]"]
    assert numbers["memory_ratio"] == pytest.approx(331 / 988)
    for name in numbers:
        parse_gate(f"{name}>=50" if name.partition("[")[0] in IN_PER_CENT else f"{name}<=1")


def test_memory_is_of_weights_in_memory_or_else_on_disk(report):
    assert gate_numbers(dataclasses.replace(report, benchmark=None))["memory_ratio"] == pytest.approx(331 / 988)


def test_a_limit_with_a_plus_sign_is_about_the_difference_to_the_original(broken_report):
    rate = broken_report.find_comparison("behaviour: unended")
    assert rate.baseline > 0.2 > rate.difference
    over, plain = evaluate_gates(broken_report, ["unended<=+0.2", "unended<=0.2"])
    assert (over.gate, over.value, over.held) == ("unended<=+0.2", rate.difference, True)
    assert (plain.gate, plain.value, plain.held) == ("unended<=0.2", rate.value, False)
    assert "over the original's, must be <= +0.2" in over.explanation
    assert "over the original's" not in plain.explanation


def test_margins_are_judged_by_kind_and_the_worst_counts(broken_report):
    worst, tool, flips = evaluate_gates(broken_report, ["margin>=0.8", "margin[tool]>=0.56", "flips[json]<=0.3"])
    assert (worst.value, worst.held, tool.held, flips.held) == (0.55, False, False, True)
    assert "its 95 % interval, 0.520 to 0.580, includes the limit" in tool.explanation
    assert "includes" not in worst.explanation


def test_a_kind_of_decision_that_few_prompts_have_does_not_hold_and_says_so(report):
    few, none = evaluate_gates(report, ["margin[refusal]>=0.1", "flips[thinking]<=0.5"])
    assert (few.value, few.held, none.held) == (None, False, False)
    assert few.explanation == (
        "the original begins a refusal in 3 prompts, fewer than the 8 needed, so the gate does not hold"
    )
    assert "ends its thinking in 0 prompts" in none.explanation
    assert few.remedy == none.remedy == MORE_PROMPTS
    (unmeasured,) = evaluate_gates(Report(model=ModelFacts(name="m")), ["margin[tool]>=0.8"])
    assert unmeasured.explanation == "margin was not measured, so the gate does not hold"


def test_gates_that_fit_any_recipe_are_about_what_the_original_shows_often(report):
    gates = behaviour_gates(report)
    assert [gate.partition(">=")[0].partition("<=")[0] for gate in gates] == [
        *("margin[tool]", "margin[end]", "margin[json]"),
        "loop_rate",
    ]
    assert all(result.held for result in evaluate_gates(report, gates))
    assert behaviour_gates(Report(model=ModelFacts(name="m"))) == []


def test_a_proposal_of_many_groups_fits_a_line():
    few = make_report().sensitivity.proposal
    assert "--set 'ignore=[" in describe_proposal(few)
    many = dataclasses.replace(few, groups=tuple((layer, "o") for layer in range(90)))
    text = describe_proposal(many)
    assert "layer 5 o and 84 more groups (" in text and "layer 6 o" not in text
    override = "--set OVERRIDE, where OVERRIDE is sensitivity.proposal.overrides in report.json"
    assert text.endswith(f"quantkit quantize ... {override}")
    assert "layer 89 o (" in describe_proposal(many, most=90)
