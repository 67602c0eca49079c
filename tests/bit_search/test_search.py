"""A whole search on a tiny model: the recipe runs and is what was promised, interrupted ones go on, refusals."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil

import pytest

import quantkit
from quantkit.bit_search import run as module
from quantkit.bit_search import sensitivities
from quantkit.bit_search.candidates import Candidate, default_candidates, read_candidates, trial, uniform, usable
from quantkit.bit_search.choose import Judge
from quantkit.bit_search.options import SearchOptions, SearchTarget
from quantkit.bit_search.recipe_file import _patterns
from quantkit.bit_search.run import search_recipe
from quantkit.compress.pipeline import layers as pipeline
from quantkit.compress.recipe import load
from quantkit.errors import GateFailure, ModelError, OutputError, RecipeError, ResourceError, ResumeError
from quantkit.evaluate.fidelity import fidelity, fixed_windows
from quantkit.evaluate.loading import load_llm
from quantkit.results import SearchResult
from quantkit.sweep.trials import Outcome
from tests.helpers import TEXT

ENGINE = {"dtype": "float32", "threads": 1}
CANDIDATES = ("int3:32", "int4:32", "int8:32")


@pytest.fixture(scope="module")
def options(text_file, tmp_path_factory):
    """A search by plain rounding; what it measures is kept for the others."""

    def build(output, **changes):
        given = {"candidates": CANDIDATES, "text": str(text_file), "max_tokens": 600, "device": "cpu", "engine": ENGINE}
        return SearchOptions(recipe=load("rtn-int4", ["weights.group_size=32"]), output=output, **{**given, **changes})

    return build


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("work") / "trials"


@pytest.fixture(scope="module")
def searched(tiny_llama, options, work, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    result = search_recipe(
        str(tiny_llama), SearchTarget(bits=5.0), options(folder / "mine.yaml", work=work, checkpoint=folder / "made")
    )
    return result, folder


def test_the_budget_is_used_and_the_uniform_recipe_of_that_size_beaten(searched, tiny_llama, work):
    result, _ = searched
    assert 4.7 < result.bits_per_weight <= 5.0
    assert len({group.choice for group in result.groups}) > 1
    uniform = next(candidate for candidate in result.candidates if candidate.name == "int4:32")
    assert uniform.bits_per_weight == pytest.approx(4 + 32 / 32)  # the scales of a float32 model
    original, rounded = (load_llm(str(p), device="cpu", **ENGINE) for p in (tiny_llama, work / "int4-32"))
    for part, ours in ((0, result.search_kl), (1, result.measured_kl)):
        windows = fixed_windows(original, TEXT, max_tokens=1200)[part::2][:2]
        assert ours < 0.9 * fidelity(rounded, original, windows, greedy_tokens=0).mean_kl


def test_a_result_says_the_same_after_json(searched):
    result, _ = searched
    assert [group.group for group in result.groups[:4]] == ["q/k/v", "o", "gate/up", "down"]
    assert SearchResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_the_recipe_runs_unchanged_and_gives_what_was_measured(searched, tiny_llama, text_file, tmp_path):
    result, folder = searched
    made = quantkit.quantize(tiny_llama, folder / "mine.yaml", tmp_path / "again", device="cpu")
    assert made.output_bytes == result.output_bytes
    assert made.bits_per_weight == pytest.approx(result.bits_per_weight, rel=1e-3)
    one, other = ((p / "model-00001-of-00003.safetensors").read_bytes() for p in (tmp_path / "again", folder / "made"))
    assert one == other
    original, again = (load_llm(str(p), device="cpu", **ENGINE) for p in (tiny_llama, tmp_path / "again"))
    windows = fixed_windows(original, TEXT, max_tokens=1200)[1::2][:2]  # two of 256 are below 600
    assert fidelity(again, original, windows, greedy_tokens=0).mean_kl == pytest.approx(result.measured_kl, rel=1e-4)


def test_trials_stand_alone_in_the_original_and_make_up_for_nothing():
    base, candidate = load("gptq-int4", ["steps.gptq.damping=0.05"]), Candidate(dtype="int3", group_size=32)
    steps, own = (dict(recipe.source["steps"][0])["gptq"] for recipe in (trial(base, candidate), base))
    assert (own["true_sequential"], own["asymmetric_calibration"]) == (True, 1.0)
    assert (steps["true_sequential"], steps["asymmetric_calibration"], steps["damping"]) == (False, 0.0, 0.05)
    assert trial(base, candidate).has_original_inputs
    tuned = load("autoround-int4")  # compares with the original always
    assert trial(tuned, candidate).source == uniform(tuned, candidate).source
    assert trial(load("rtn-int4"), candidate).source == uniform(load("rtn-int4"), candidate).source


def test_rounding_knows_no_later_layers_so_the_expectation_is_exact(searched):
    result, _ = searched
    assert result.expected_kl == pytest.approx(result.measured_kl, rel=1e-4)
    assert abs(result.prediction_error) < 1e-3


def test_the_file_says_what_was_expected_and_measured(searched):
    result, folder = searched
    content = (folder / "mine.yaml").read_text()
    assert f"Expected KL to the original {result.expected_kl:.5f}" in content
    assert f"Measured after compressing: {result.measured_kl:.5f}" in content
    assert re.search(r"# layer \d (q/k/v|o|gate/up|down): KL [\d.e-]+ alone\n      - model\.layers\.", content)
    assert load(folder / "mine.yaml").name == "mine"


def test_candidates_that_trials_compress_are_those_of_the_search(searched, tiny_llama, options, tmp_path, monkeypatch):
    result, _ = searched
    places, made = [], []
    monkeypatch.setattr(module, "check_place", lambda on: None)

    def elsewhere(trials, on, jobs):
        places.append((on, jobs))
        for one in trials:
            _, model, _, recipe, _, output, _, device = one.commands[0].arguments
            quantkit.quantize(model, recipe, output, device=device)
            yield Outcome(name=one.name)

    def counted(*args, **options):
        made.append(args[1].name)
        return quantkit.quantize(*args, **options)

    monkeypatch.setattr(module, "run_trials", elsewhere)
    monkeypatch.setattr(sensitivities, "quantize", counted)
    again = search_recipe(str(tiny_llama), SearchTarget(bits=5.0), options(tmp_path / "mine.yaml", on="ray", jobs=2))
    assert places == [("ray", 2)]
    assert made == ["mine"]  # the recipe that was found, and no candidate
    assert again.groups == result.groups


def test_a_trial_that_fails_ends_the_search_with_its_reason(tiny_llama, options, tmp_path, monkeypatch):
    failed = Outcome(name="int3-32", exit_code=5, reason="killed")
    monkeypatch.setattr(module, "run_trials", lambda trials, on, jobs: (failed for _ in trials))
    with pytest.raises(ResourceError, match="int3-32: killed"):
        search_recipe(str(tiny_llama), SearchTarget(bits=5.0), options(tmp_path / "mine.yaml", jobs=2))


@pytest.mark.slow
def test_a_killed_search_goes_on_and_ends_the_same(searched, tiny_llama, options, tmp_path, monkeypatch):
    result, _ = searched
    calls = []

    class Killed(Exception):
        pass

    def counting(measure, limit):
        def wrapped(probe, groups):
            calls.append(groups)
            if len(calls) > limit:
                raise Killed
            return measure(probe, groups)

        return wrapped

    measure = module.Probe.measure
    monkeypatch.setattr(module.Probe, "measure", counting(measure, 13))
    with pytest.raises(Killed):
        search_recipe(str(tiny_llama), SearchTarget(bits=5.0), options(tmp_path / "mine.yaml"))
    assert not (tmp_path / "mine.yaml").exists()
    calls.clear()
    monkeypatch.setattr(module.Probe, "measure", counting(measure, 10**9))
    lines = []
    again = search_recipe(
        str(tiny_llama), SearchTarget(bits=5.0), options(tmp_path / "mine.yaml"), progress=lines.append
    )
    assert any(line.startswith("reusing 13 measurements") for line in lines)
    same = ("groups", "search_kl", "expected_kl", "measured_kl", "bits_per_weight", "candidates")
    assert [getattr(again, name) for name in same] == [getattr(result, name) for name in same]
    assert not (tmp_path / "mine.yaml.search").exists()


def test_numbers_of_another_search_are_refused(searched, tiny_llama, options, work, tmp_path):
    changed = options(tmp_path / "x.yaml", work=work, max_tokens=300)
    with pytest.raises(ResumeError, match=r"started with different settings or files \(windows.*--no-resume"):
        search_recipe(str(tiny_llama), SearchTarget(bits=5.0), changed)


def test_a_second_target_measures_nothing_twice(searched, tiny_llama, options, work, tmp_path):
    """And a KL that is asked for is reached with fewer bits than the budget before had."""
    result, _ = searched
    lines = []
    goal = SearchTarget(kl=2 * result.measured_kl)
    second = search_recipe(str(tiny_llama), goal, options(tmp_path / "kl.yaml", work=work), progress=lines.append)
    assert not any("group 1 of" in line for line in lines)
    assert second.reached
    assert second.measured_kl <= goal.kl
    assert second.expected_kl == pytest.approx(second.measured_kl, rel=1e-4)
    assert second.bits_per_weight < result.bits_per_weight
    assert load(tmp_path / "kl.yaml").gates == (f"kl<={goal.kl:g}",)


def test_a_recovery_is_searched_for_by_kl_and_judged_by_tasks(
    searched, tiny_llama, options, work, tmp_path, monkeypatch
):
    monkeypatch.setattr(Judge, "recovery", lambda self, llm: 100 - 10 * _kl(self.original, llm))
    second = search_recipe(str(tiny_llama), SearchTarget(recovery=98.5), options(tmp_path / "r.yaml", work=work))
    assert second.reached
    assert second.recovery >= 98.5
    assert load(tmp_path / "r.yaml").gates == ("recovery>=98.5",)


def _kl(original, llm):
    return fidelity(llm, original, fixed_windows(original, TEXT, max_tokens=300), greedy_tokens=0).mean_kl


def test_nothing_is_replaced_unasked(searched, tiny_llama, options):
    _, folder = searched
    with pytest.raises(OutputError, match=r"mine\.yaml exists already"):
        search_recipe(str(tiny_llama), SearchTarget(bits=4), options(folder / "mine.yaml"))
    with pytest.raises(OutputError, match=r"give a name that ends in \.yaml"):
        search_recipe(str(tiny_llama), SearchTarget(bits=4), options(folder / "mine"))


def test_a_kept_result_of_other_candidates_is_not_taken_for_this_one(tiny_llama, options, work, tmp_path):
    """The same choice, all groups the first candidate, is another model where the first candidate is another."""
    cheap = options(tmp_path / "cheap.yaml", work=work, candidates=("int3:32",))
    least = search_recipe(str(tiny_llama), SearchTarget(bits=4.01), cheap)
    large = search_recipe(
        str(tiny_llama), SearchTarget(bits=9.01), options(tmp_path / "large.yaml", work=work, candidates=("int8:32",))
    )
    assert {group.choice for group in least.groups} == {"int3:32"}
    assert {group.choice for group in large.groups} == {"int8:32"}
    assert least.output_bytes < large.output_bytes
    assert least.measured_kl > large.measured_kl


def test_starting_over_deletes_only_what_a_search_has_made(tiny_llama, options, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match=r"quantkit needs .*mine as a work folder, .* choose another --work"):
        search_recipe(str(tiny_llama), SearchTarget(bits=5), options(tmp_path / "x.yaml", work=mine, resume=False))
    assert (mine / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kv-fp8", "quantizes no weights"),
        ("fp8-block", "which a search cannot vary"),
        ("nvfp4", "stores nvfp4 weights"),
    ],
)
def test_recipes_without_groups_to_search_are_refused(name, message, tiny_llama, tmp_path):
    with pytest.raises(RecipeError, match=message):
        search_recipe(
            str(tiny_llama), SearchTarget(bits=5), SearchOptions(recipe=load(name), output=tmp_path / "x.yaml")
        )


def test_a_step_that_changes_the_whole_model_is_refused_before_any_work(tiny_llama, options, tmp_path):
    asked = dataclasses.replace(options(tmp_path / "x.yaml"), recipe=load("rtn-int4", ["steps=[rotate]"]))
    with pytest.raises(ModelError, match="step rotate changes the whole model"):
        search_recipe(str(tiny_llama), SearchTarget(bits=5), asked)


def test_other_calibration_text_in_the_same_file_is_another_search(tiny_llama, options, text_file, tmp_path):
    data, work = tmp_path / "mine.txt", tmp_path / "work"
    data.write_text(TEXT)
    changes = {"calibration.data": str(data), "calibration.samples": 2, "calibration.sequence_length": 16}
    recipe = load("gptq-int4", {"weights.group_size": 32, **changes})
    given = {"recipe": recipe, "candidates": ("int4:32",), "text": str(text_file), "max_tokens": 64, "engine": ENGINE}
    search_recipe(str(tiny_llama), SearchTarget(bits=6), SearchOptions(output=tmp_path / "a.yaml", work=work, **given))
    data.write_text(TEXT[::-1])
    with pytest.raises(ResumeError, match="calibration"):
        search_recipe(
            str(tiny_llama), SearchTarget(bits=6), SearchOptions(output=tmp_path / "b.yaml", work=work, **given)
        )


@pytest.mark.parametrize("name", ["int4-32", "int3-32"])
def test_a_trial_of_something_else_is_not_taken_for_this_one(searched, tiny_llama, options, work, tmp_path, name):
    copied = shutil.copytree(work, tmp_path / "work")
    trial = copied / name
    if name == "int4-32":  # another recipe's
        shutil.rmtree(trial)
        shutil.copytree(copied / "int8-32", trial)
    else:  # cut short
        (trial / "model-00001-of-00003.safetensors").write_bytes(b"x")
    with pytest.raises(ResumeError, match=f"{name} is not the output of recipe"):
        search_recipe(str(tiny_llama), SearchTarget(bits=5.0), options(tmp_path / "x.yaml", work=copied))


@pytest.mark.slow
def test_candidates_share_a_pass_that_goes_on_where_it_was_killed(tiny_llama, options, tmp_path, monkeypatch):
    small = {"weights.group_size": 32, "calibration.data": str(options("x.yaml").text), "calibration.samples": 4}
    recipe = load("gptq-int4", {**small, "calibration.sequence_length": 16})
    given = {"candidates": ("int4:32", "int8:32"), "max_tokens": 64}
    asked = [dataclasses.replace(options(tmp_path / f"{name}.yaml", **given), recipe=recipe) for name in "ab"]
    calls, run_layer = [], pipeline._run_layer

    def killed(run, index, *rest):
        calls.append((run.plan.recipe.name, index))
        if len(calls) == 4:
            raise KeyboardInterrupt
        run_layer(run, index, *rest)

    monkeypatch.setattr(pipeline, "_run_layer", killed)
    with pytest.raises(KeyboardInterrupt):
        search_recipe(str(tiny_llama), SearchTarget(bits=6), asked[0])
    again = search_recipe(str(tiny_llama), SearchTarget(bits=6), asked[0])
    # Layer by layer, each by all; then what was left of it, and the two layers of the recipe.
    assert calls == [("int4-32", 0), ("int8-32", 0), ("int4-32", 1), ("int8-32", 1), ("int8-32", 1), ("a", 0), ("a", 1)]
    whole = search_recipe(str(tiny_llama), SearchTarget(bits=6), asked[1])
    assert (again.groups, again.expected_kl, again.measured_kl) == (whole.groups, whole.expected_kl, whole.measured_kl)


def test_fewer_bits_than_the_smallest_candidate_are_refused_before_any_work(searched, tiny_llama, options, tmp_path):
    result, _ = searched
    least = min(candidate.bits_per_weight for candidate in result.candidates)
    with pytest.raises(GateFailure, match=f"take {least:.3f} bits per weight"):
        search_recipe(str(tiny_llama), SearchTarget(bits=least - 0.01), options(tmp_path / "x.yaml"))
    assert not list(tmp_path.iterdir())


def test_candidates_are_read_and_those_that_do_not_fit_are_named(tiny_llama):
    assert read_candidates(["int4", "int8:channel", "skip", "int4"], 64) == (
        Candidate(dtype="int4", group_size=64),
        Candidate(dtype="int8", group_size="channel"),
    )
    for wrong in ("int9", "int4:", "int4:x"):
        with pytest.raises(RecipeError, match=f"candidate '{wrong}'"):
            read_candidates([wrong], 32)
    assert {c.dtype for c in default_candidates(128)} >= {"int2", "int4", "int8"}
    base = load("rtn-int4", ["weights.group_size=32"])
    asked = read_candidates(["int4:32", "int4:40", "fp8:channel"], 32)
    candidates, notes = usable(str(tiny_llama), base, asked, "cpu")
    assert candidates[0].name == "int4:32"
    assert "left out int4:40: for this model's widths it is the same as int4:32" in notes
    assert [candidate.name for candidate in usable(str(tiny_llama), base, asked[1:2], "cpu")[0]] == ["int4:40"]
    with pytest.raises(RecipeError, match="none of the candidates can be used; the last one failed with: "):
        usable(str(tiny_llama), base, read_candidates(["int4:24"], 32), "cpu")
    pinned = load("rtn-int4", {"weights.group_size": 32, "overrides": [{"modules": "*.o_proj", "skip": True}]})
    with pytest.raises(RecipeError, match="has overrides, but a search writes its own"):
        usable(str(tiny_llama), pinned, candidates, "cpu")


def test_many_modules_are_one_pattern_where_it_matches_nothing_else():
    experts = [f"model.layers.1.mlp.experts.{e}.{n}_proj" for e in range(4) for n in ("up", "down")]
    others = ["model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"]
    assert _patterns(experts, experts + others) == ["model.layers.1.mlp.experts.*"]
    assert _patterns(experts[:7], experts + others) == experts[:7]
    assert _patterns(others, experts + others) == others
