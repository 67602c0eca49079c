"""Behaviour of a chat model: answers, decision margins, faults, bad prompts. For single checks: test_answer_checks."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.api import load_recipe
from quantkit.cli import main
from quantkit.errors import DataError, RequestError
from quantkit.evaluate.behaviour import (
    make_plan,
    measure_rates,
    sample_answers,
)
from quantkit.evaluate.decision_margins import DecisionFinder, compare_behaviour, margin_records, score_traces
from quantkit.evaluate.loading import load_llm
from quantkit.evaluate.options import EvaluationOptions
from quantkit.evaluate.prompt_sets import BUNDLED, Prompt, read_prompts
from quantkit.evaluate.run import evaluate
from quantkit.evaluate.verify.options import VerifyOptions
from quantkit.evaluate.verify.pair_checks import check_pair
from quantkit.evaluate.verify.run import verify_pair
from quantkit.report.files import read_report
from quantkit.results import ModelFacts, Report
from quantkit.results.behaviour import MIN_PROMPTS
from quantkit.results.gates import evaluate_gates
from quantkit.results.statistics.comparison import compare_evaluations
from tests import fake_vllm
from tests.evaluate.chat_model import PROMPTS, halve_end, ids, make_chat_model, swap_call, two_bits, write_prompts
from tests.helpers import edit_config, transformers_logits

ENGINE = {"dtype": "float32", "device": "cpu", "threads": 1}
VERIFY = ("--suite", "none", "--no-bench", "--no-sensitivity", "--dtype", "float32", "--threads", "1")
GATES = ("margin[tool]>=0.8", "margin[end]>=0.8", "flips<=0.01", "loop_rate<=+0.01", "valid_calls>=99")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_chat_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture(scope="module")
def original(folder):
    return load_llm(str(folder), **ENGINE)


def plan_of(llm, prompts, **changes):
    asked = {"name": "mine", "count": None, "seeds": 1, "max_tokens": 24, "seed": 0, **changes}
    return make_plan(llm, read_prompts(prompts), **asked)


@pytest.fixture(scope="module")
def plan(original, prompts):
    return plan_of(original, prompts)


@pytest.fixture(scope="module")
def traces(original, plan):
    return sample_answers(original, plan)


def faulty(folder, to, fault):
    """A copy of a model with a fault in its tensors."""
    copy = shutil.copytree(folder, to)
    tensors = load_file(copy / "model.safetensors")
    fault(tensors)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


def run(*words):
    """Exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code


def judged(llm, original, prompts, seed=0, gates=GATES):
    """The results of gates on a model beside its original."""
    plan = plan_of(original, prompts, seed=seed)
    theirs, ours = sample_answers(original, plan), sample_answers(llm, plan)
    results = [
        replace(evaluate(each, EvaluationOptions(prompts=prompts), traces=traces), seconds=0.0)
        for each, traces in ((llm, ours), (original, theirs))
    ]
    behaviour = compare_behaviour(llm, original, plan, (theirs, ours))
    report = Report(model=ModelFacts(name="m"), comparisons=compare_evaluations(*results), behaviour=behaviour)
    return report, {gate.gate: gate.held for gate in evaluate_gates(report, gates)}


def test_the_original_calls_tools_and_chats(plan, traces):
    texts = [trace.text for trace in traces]
    assert plan.dialect.name == "hermes"
    assert (
        {"Yes of course then", "No then"} <= set(texts[:10]) <= {"Yes of course then", "No then", "Well of course then"}
    )
    assert set(texts[10:]) == {'<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'}
    rates = {rate.task: rate.value for rate in measure_rates(plan, traces)}
    assert rates == {
        **dict.fromkeys(("unended", "loop_rate", "empty", "other_script", "right_format"), 0.0),
        "valid_calls": 1.0,
    }


def test_answers_depend_on_the_seed_and_on_nothing_else(original, plan, traces, prompts):
    assert [trace.token_ids for trace in sample_answers(original, plan)] == [trace.token_ids for trace in traces]
    other = sample_answers(original, plan_of(original, prompts, seed=1))
    assert [trace.token_ids for trace in other] != [trace.token_ids for trace in traces]


def test_margins_are_those_of_transformers(folder, tmp_path, original, plan, traces):
    copy = faulty(folder, tmp_path / "out", two_bits)
    llm = load_llm(str(copy), **ENGINE)
    scored = score_traces(llm, original, plan, traces)
    finder, compared = DecisionFinder(original, plan.dialect), 0
    for trace, result in zip(traces, scored, strict=True):
        window = torch.tensor([[*trace.question.ids, *trace.token_ids]])
        logs = [transformers_logits(each, window)[0].log_softmax(-1) for each in (folder, copy)]
        expected = []
        for each in finder.find(trace):
            rows = [side[len(trace.question.ids) - 1 + each.at] for side in logs]
            others = [token for token in range(len(rows[0])) if token not in each.same]
            margins = [float(row[list(each.same)].max() - row[others].max()) for row in rows]
            if margins[0] > 0:
                expected.append((each.kind, *margins))
        assert [kind for kind, *_ in result.margins] == [kind for kind, *_ in expected]
        for (_, *ours), (_, *theirs) in zip(result.margins, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
            compared += 1
    assert compared > 60


def test_kinds_of_decisions_and_where_they_are(original, plan, traces):
    finder, known = DecisionFinder(original, plan.dialect), ids()
    call, chat = traces[12], next(trace for trace in traces[:10] if trace.text.startswith("Yes"))
    found = {(each.kind, each.at): each.same for each in finder.find(call)}
    assert found[("tool", 0)] == (known["<tool_call>"],)
    assert found[("end", len(call.token_ids) - 1)] == (1,)
    assert sorted(at for kind, at in found if kind == "json") == [2, 4, 6, 7]
    assert {(each.kind, each.at) for each in finder.find(chat)} == {("option", 0), ("end", 4)}
    bare = replace(call, text="", token_ids=(*call.token_ids[1:-2], 1))  # the same call without its markers
    assert [(each.kind, each.at) for each in finder.find(bare) if each.kind != "json"] == [("tool", 0), ("end", 7)]
    refused = replace(chat, question=replace(call.question, prompt=Prompt.model_validate(PROMPTS[12])))
    (decision,) = [each for each in finder.find(refused) if each.kind == "no_tool"]
    assert (decision.at, decision.same, decision.against) == (0, (known["<tool_call>"],), True)
    logits = torch.zeros(max(decision.same) + 1)
    logits[decision.same[0]] = -3.0
    assert decision.margin(logits) == 3.0
    assert replace(decision, against=False).margin(logits) == -3.0


def test_a_kind_that_few_prompts_have_gets_no_ratio(original, plan, traces):
    scored = score_traces(original, original, plan, traces)
    few, enough = (margin_records(scored[10 : 10 + count])[0] for count in (MIN_PROMPTS - 1, MIN_PROMPTS))
    assert (few.kind, few.num_prompts, few.ratio, few.low) == ("tool", MIN_PROMPTS - 1, None, None)
    assert (enough.num_prompts, enough.flips, enough.ratio) == (MIN_PROMPTS, 0.0, pytest.approx(1.0))


def test_the_original_passes_beside_itself_and_beside_its_twin_in_bfloat16(folder, original, prompts):
    twin = load_llm(str(folder), **{**ENGINE, "dtype": "bfloat16"})
    for seed in range(20):
        report, held = judged(original, original, prompts, seed)
        assert all(held.values()), held
        assert report.behaviour.mean_kl == 0.0
        assert report.behaviour.examples == ()
        if seed < 4:
            assert all(judged(twin, original, prompts, seed)[1].values())


@pytest.mark.parametrize(
    ("fault", "failed"),
    [(halve_end, {"margin[end]"}), (swap_call, {"margin[tool]", "flips", "valid_calls"}), (two_bits, {"flips"})],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_fault_ends_with_code_3(folder, tmp_path, prompts, capsys, fault, failed):
    copy = faulty(folder, tmp_path / "out", fault)
    gates = [word for gate in GATES for word in ("--gate", gate)]
    code = run("verify", copy, "--baseline", folder, *VERIFY, "--prompts", prompts, *gates)
    out, err = capsys.readouterr()
    assert code == 3, err
    assert "gates did not hold: " in err
    report = read_report(copy)
    assert failed <= {gate.gate.partition("<=")[0].partition(">=")[0] for gate in report.gates if not gate.held}
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    assert "starts a tool call" in out
    assert report.behaviour.examples or fault is halve_end
    assert "Answers side by side" in (copy / "report.html").read_text() or not report.behaviour.examples


def test_another_chat_template_is_noted_and_shows(folder, tmp_path, prompts, capsys):
    copy = shutil.copytree(folder, tmp_path / "out")
    for file in copy.glob("*"):
        if file.name in ("chat_template.jinja", "tokenizer_config.json"):
            file.write_text(file.read_text().replace("<tool_call> with arguments", "<plain> with arguments"))
            file.write_text(file.read_text().replace("<offered>", "<plain>"))
    gates = ("--gate", "flips<=0.01", "--gate", "valid_calls>=99")
    assert run("verify", copy, "--baseline", folder, *VERIFY, "--prompts", prompts, *gates) == 3
    assert "chat template formats some prompts differently" in capsys.readouterr().out


def test_a_model_without_a_chat_template(tiny_llama, models, prompts, capsys):
    llm = load_llm(str(tiny_llama), **ENGINE)
    with pytest.raises(RequestError, match="has no chat template"):
        evaluate(llm, EvaluationOptions(prompts=prompts))
    text = str(models / "text.txt")
    suite = models / "behaviour.yaml"
    suite.write_text("{description: x, demo: {}, others: {behaviour: {prompts: 4}}}")
    result = evaluate(llm, EvaluationOptions(suite=str(suite), texts=(text,), window=64))
    assert result.behaviour == ()
    assert result.settings["behaviour"] == "left out: llama has no chat template"


def test_a_checkpoint_that_lost_its_chat_template_is_refused(folder, tmp_path, capsys):
    copy = shutil.copytree(folder, tmp_path / "out")
    (copy / "chat_template.jinja").unlink()
    suite = tmp_path / "suite.yaml"
    suite.write_text("{description: x, demo: {}, others: {behaviour: {prompts: 4}}}")
    assert run("verify", copy, "--baseline", folder, *VERIFY, "--suite", suite) == 4
    assert "out has no chat template, which a behaviour test needs" in capsys.readouterr().err


def test_eval_prints_rates_of_one_model_and_of_two(folder, prompts, capsys):
    words = ["--prompts", prompts, "--limit", 12, "--dtype", "float32", "--threads", 1]
    assert run("eval", folder, *words, "--json") == 0
    data = json.loads(capsys.readouterr().out)["evaluation"]
    assert {rate["task"]: rate["value"] for rate in data["behaviour"]}["valid_calls"] == 1.0
    assert data["settings"]["behaviour"] == "12 prompts of prompts.jsonl, 2 seeds, 256 tokens, dialect hermes"
    assert run("eval", folder, "--baseline", folder, *words) == 0
    out = capsys.readouterr().out
    assert "call tools validly" in out
    assert "no difference seen" in out


def test_prompts_that_do_not_fit_are_left_out_and_counted(folder, original, prompts, tmp_path):
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"messages": [{"role": "user", "content": "x" * 2000}]}) + "\n" + prompts.read_text())
    plan = plan_of(original, long, count=3)
    assert (plan.num_left_out, [each.number for each in plan.questions]) == (1, [1, 2, 3])
    long.write_text(long.read_text().splitlines()[0])
    with pytest.raises(DataError, match=r"none of the prompts of mine can be used with .* of 24 tokens exceed"):
        plan_of(original, long)


GOOD = json.dumps(PROMPTS[0]) + "\n"
TOOL = '"tools": [{"type": "function", "function": {"name": "f", "parameters": %s}}]}'
SAID = '{"messages": [{"role": "user", "content": "hi"}], '


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "hello", ":2 is not valid JSON"),
        (GOOD + "[1]", ":2 holds a JSON list, not an object"),
        (GOOD + '{"text": "hi"}', ":2: messages: Field required"),
        (GOOD + '{"messages": []}', ":2: messages: List should have at least 1 item"),
        (GOOD + '{"messages": [{"role": "robot", "content": "x"}]}', ":2: messages.0.role: Input should be 'system'"),
        (SAID + '"tools": {"a": 1}}', ":1: tools: Input should be a valid list"),
        (SAID + '"tools": [{"name": "f"}]}', ":1: tools.0.type: Field required"),
        (SAID + TOOL % '{"type": "text"}', ":1: tools.0.function.parameters: Value error, 'text' is not a type of"),
        (SAID + TOOL % '{"properties": {"x": "string"}}', "'string' is not a JSON schema"),
        (SAID + '"expect": {"xml": true}}', ":1: expect.xml: Extra inputs are not permitted"),
        (GOOD + SAID + '"kind": "' + "x" * 10_000_000 + '"}', ":2: the line has 10000"),
        ("", " is empty; write one prompt per line"),
        ("\n \n", " is empty; write one prompt per line"),
    ],
)  # fmt: skip
def test_bad_prompts_are_one_line_and_code_4(text, message, folder, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    assert run("eval", folder, "--prompts", file) == 4
    err = capsys.readouterr().err.strip()
    assert f"{file}{message}" in err or message in err
    assert "\n" not in err
    assert len(err) < 400


def test_a_missing_file_of_prompts(folder, tmp_path, capsys):
    assert run("verify", folder, "--baseline", folder, "--prompts", tmp_path / "no.jsonl") == 4
    assert "no.jsonl cannot be read as text" in capsys.readouterr().err


def test_the_bundled_prompts_differ_and_their_kinds_take_turns():
    bundled = read_prompts()
    assert len(bundled) >= 300
    assert BUNDLED.stat().st_size < 200_000
    assert len({json.dumps(prompt.chat) for prompt in bundled}) == len(bundled)
    for start in (0, 128, 256):  # every part of the list has all kinds
        assert {prompt.kind for prompt in bundled[start : start + 64]} == {prompt.kind for prompt in bundled}


def test_thinking_that_the_prompt_has_begun(folder, tmp_path, prompts):
    copy = shutil.copytree(folder, tmp_path / "thinking")
    file = next(each for each in (copy / "chat_template.jinja", copy / "tokenizer_config.json") if each.exists())
    file.write_text(file.read_text() + "<think>\n" if file.suffix == ".jinja" else file.read_text())
    edit_config(copy, max_position_embeddings=1024)
    llm = load_llm(str(copy), **ENGINE)
    plan = plan_of(llm, prompts, count=2, max_tokens=4)
    assert all(question.is_thinking for question in plan.questions)
    rates = {rate.task: rate.value for rate in measure_rates(plan, sample_answers(llm, plan))}
    assert rates["empty"] == 1.0  # the thinking never ends


def test_a_recipes_gates_are_joined_by_those_about_behaviour(folder, tmp_path, prompts):
    quantkit.quantize(folder, "rtn-int8", tmp_path / "out", device="cpu")
    options = VerifyOptions(
        evaluation=EvaluationOptions(prompts=prompts), noise=False, bench=None, sensitivity=False, engine=ENGINE
    )
    recipe = load_recipe("rtn-int8").gates
    report = verify_pair(check_pair(tmp_path / "out", folder), options)
    assert [gate.gate for gate in report.gates] == [
        *recipe,
        *("margin[tool]>=0.7", "margin[end]>=0.7", "margin[json]>=0.7", "loop_rate<=+0.1"),
    ]
    assert all(gate.held for gate in report.gates[len(recipe) :])
    given = verify_pair(check_pair(tmp_path / "out", folder, ["kl<=1"]), options)
    assert [gate.gate for gate in given.gates] == ["kl<=1"]
    silent = replace(options, evaluation=EvaluationOptions(texts=("demo",), behaviour=False))
    assert verify_pair(check_pair(tmp_path / "out", folder), silent).behaviour is None


def test_vllm_answers_too_without_margins(folder, tmp_path, prompts, monkeypatch):
    fake_vllm.install(monkeypatch)
    copy = faulty(folder, tmp_path / "out", swap_call)
    options = VerifyOptions(evaluation=EvaluationOptions(prompts=prompts, limit=12), noise=False, bench=None, vllm={})
    report = verify_pair(check_pair(copy, folder, ["valid_calls>=99", "margin[tool]>=0.8"]), options)
    assert report.behaviour is None
    assert report.find_comparison("behaviour: valid_calls").baseline == 1.0
    assert [gate.held for gate in report.gates] == [False, False]
    assert "margin was not measured" in report.gates[1].explanation
