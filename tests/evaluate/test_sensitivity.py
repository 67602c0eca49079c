"""The sensitivity map: what is swapped and put back, parts and whole, smoothing undone, and proposals that hold."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import quantkit
from quantkit.errors import InputError, ModelError
from quantkit.evaluate import sensitivity as module
from quantkit.evaluate.fidelity import Distances, distances, fixed_windows, window_logits
from quantkit.evaluate.group_swaps import FusedGroup, find_fused_groups, swapped
from quantkit.evaluate.loading import load_llm
from quantkit.evaluate.sensitivity import Goal, Probe, propose, sensitivity_map
from quantkit.results import SensitivityMap, SensitivityRecord
from tests.helpers import TEXT, make_model

NAMES = ["q/k/v", "o", "gate/up", "down"]
CALIBRATED = ["calibration.samples=4", "calibration.sequence_length=64"]


def load(path):
    return load_llm(str(path), dtype="float32", device="cpu", threads=1)


@pytest.fixture(scope="module")
def original(tiny_llama):
    return load(tiny_llama)


@pytest.fixture(scope="module")
def windows(original):
    return fixed_windows(original, TEXT, window=64, max_tokens=400)


def compress(folder, output, recipe, *overrides):
    quantkit.quantize(folder, recipe, output, overrides=list(overrides), device="cpu")
    return load(output)


@pytest.fixture(scope="module")
def coarse(tiny_llama, tmp_path_factory):
    return compress(
        tiny_llama, tmp_path_factory.mktemp("out") / "int3", "rtn-int4", "weights.dtype=int3", "weights.group_size=32"
    )


@pytest.fixture(scope="module")
def smoothed(tiny_llama, text_file, tmp_path_factory):
    data = json.dumps(str(text_file))
    sizes = [f"calibration.data={data}", "weights.group_size=32", *CALIBRATED]
    return compress(tiny_llama, tmp_path_factory.mktemp("out") / "awq", "awq-int4", *sizes)


def test_every_unit_is_listed_with_its_bytes(coarse, original, windows):
    measured = sensitivity_map(coarse, original, windows, data="here")
    assert [(record.layer, record.group) for record in measured.records] == [
        (i, name) for i in range(2) for name in NAMES
    ]
    first = measured.records[0]
    assert first.modules == tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
    assert first.dense_bytes == 2 * 64 * (64 + 32 + 32)
    assert 0 < first.quantized_bytes < first.dense_bytes
    assert all(record.kl > 0 for record in measured.records)
    assert (measured.data, measured.num_tokens) == ("here", sum(map(len, windows)))
    assert measured.proposal is None


def test_the_whole_is_the_checkpoint_and_all_units_together_are_the_whole(coarse, original, windows):
    reference = [window_logits(original, (ids,))[0] for ids in windows]
    # A native call would still run the parts that it recorded.
    with original.engine.runner.layer_by_layer(), swapped(find_fused_groups(coarse, original)):
        together = [window_logits(original, (ids,))[0] for ids in windows]
    own = [window_logits(coarse, (ids,))[0] for ids in windows]
    for a, b in zip(together, own, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    after = [window_logits(original, (ids,))[0] for ids in windows]
    assert all(torch.equal(a, b) for a, b in zip(reference, after, strict=True))


def test_one_unit_alone_is_what_it_says(coarse, original, tiny_llama, windows, tmp_path):
    """The same as a checkpoint in which only that group was quantized."""
    rest = ["*.layers.0.*", "*.self_attn.*", "*.gate_proj", "*.up_proj"]
    alone = compress(
        tiny_llama,
        tmp_path / "down",
        "rtn-int4",
        "weights.dtype=int3",
        "weights.group_size=32",
        f"ignore={json.dumps(rest)}",
    )
    measured = sensitivity_map(coarse, original, windows)
    expected = [distances(window_logits(original, (w,))[0], window_logits(alone, (w,))[0]).kl for w in windows]
    record = next(r for r in measured.records if (r.layer, r.group) == (1, "down"))
    assert record.kl == pytest.approx(float(torch.cat(expected).mean()), rel=1e-4)


def test_the_original_is_restored_when_something_fails(coarse, original):
    groups = find_fused_groups(coarse, original)
    kept = [getattr(*group.part) for group in groups]
    with pytest.raises(KeyError), swapped(groups):
        assert all(getattr(*group.part) is group.replacement for group in groups)
        raise KeyError
    assert all(getattr(*group.part) is value for group, value in zip(groups, kept, strict=True))


def test_scales_that_were_moved_are_moved_back(smoothed, original, windows):
    """Without that a single AWQ group in the original would be nonsense, and the parts would not add up."""
    measured = sensitivity_map(smoothed, original, windows, moved=True)
    assert 0.5 < measured.additivity < 2
    raw = find_fused_groups(smoothed, original, moved=True)
    bare = [group for group in raw if not hasattr(group.replacement, "_linear")]
    assert len(bare) < len(raw)
    group = raw[0]
    plain = replace(group, replacement=group.replacement._linear)
    with swapped([plain]):
        wrong = distances(window_logits(original, (windows[0],))[0], window_logits(smoothed, (windows[0],))[0]).mean
    assert wrong > 2 * measured.records[0].kl


@pytest.mark.parametrize("parallel", [False, True])
def test_scales_are_moved_back_whichever_norm_took_them(tmp_path, text_file, parallel):
    """StableLM's MLP reads a norm of its own or that of the attention, as config.json says."""
    model = make_model(tmp_path / "model", "stablelm", use_parallel_residual=parallel)
    sizes = [f"calibration.data={json.dumps(str(text_file))}", "weights.group_size=32", *CALIBRATED]
    made, plain = compress(model, tmp_path / "awq", "awq-int4", *sizes), load(model)
    groups = find_fused_groups(made, plain, moved=True)
    assert all(hasattr(group.replacement, "_linear") for group in groups if group.name in ("q/k/v", "gate/up"))
    few = fixed_windows(plain, TEXT, window=64, max_tokens=200)
    assert 0.5 < sensitivity_map(made, plain, few, moved=True).additivity < 2


def test_what_was_ignored_is_no_unit(tiny_llama, original, windows, tmp_path):
    llm = compress(tiny_llama, tmp_path / "out", "rtn-int8", 'ignore=["*.layers.1.*", "*.self_attn.o_proj"]')
    measured = sensitivity_map(llm, original, windows)
    assert [(r.layer, r.group) for r in measured.records] == [(0, "q/k/v"), (0, "gate/up"), (0, "down")]


def test_a_proposal_reaches_its_goal_when_it_is_carried_out(coarse, original, tiny_llama, windows, tmp_path):
    total = sensitivity_map(coarse, original, windows).total_kl
    goal = Goal(kl=total / 2)
    proposal = sensitivity_map(coarse, original, windows, goal=goal, ignored=("*.nothing",)).proposal
    assert 0 < len(proposal.groups) < 8
    assert proposal.predicted_kl <= module.MARGIN * goal.kl
    assert proposal.extra_bytes > 0
    patterns = json.loads(proposal.overrides[0].removeprefix("ignore="))
    assert patterns[0] == "*.nothing"
    mended = compress(
        tiny_llama,
        tmp_path / "out",
        "rtn-int4",
        "weights.dtype=int3",
        "weights.group_size=32",
        f"ignore={json.dumps(patterns[1:])}",
    )
    measured = [distances(window_logits(original, (w,))[0], window_logits(mended, (w,))[0]).kl for w in windows]
    assert float(torch.cat(measured).mean()) == pytest.approx(proposal.predicted_kl, rel=1e-3)


def test_a_goal_that_is_reached_needs_no_proposal(coarse, original, windows):
    assert sensitivity_map(coarse, original, windows, goal=Goal(kl=100.0)).proposal is None


def fake_units(costs):
    parts = [
        FusedGroup(
            layer=index,
            name="o",
            modules=(f"m{index}",),
            part=(object(), ""),
            replacement=None,
            quantized_bytes=10,
            stored_bytes=10 + size,
            dense_bytes=0,
        )
        for index, (_, size) in enumerate(costs)
    ]
    records = tuple(SensitivityRecord(layer=i, group="o", modules=(f"m{i}",), kl=kl) for i, (kl, _) in enumerate(costs))
    total = sum(kl for kl, _ in costs)
    return parts, SensitivityMap(data="", num_tokens=1, records=records, total_kl=total)


def exact(groups, measured):
    """A model whose parts add up."""
    kl = {f"m{r.layer}": r.kl for r in measured.records}

    def measure(chosen):
        value = torch.tensor([sum(kl[group.modules[0]] for group in chosen)])
        return Distances(kl=value, agrees=torch.tensor([bool(value < 0.05)]))

    return measure


def test_bytes_are_spent_where_they_mend_most():
    groups, measured = fake_units([(0.1, 1000), (0.08, 100), (0.01, 100), (0.05, 50)])
    proposal = propose(groups, measured, exact(groups, measured), Goal(kl=0.2))
    assert proposal.groups == ((3, "o"), (1, "o"))  # 0.24 in all, 0.16 may stay, 0.11 does
    assert proposal.extra_bytes == 150
    assert proposal.predicted_kl == pytest.approx(0.11)


def test_a_prediction_that_does_not_hold_is_followed_by_another_unit():
    groups, measured = fake_units([(0.1, 100), (0.09, 100), (0.01, 100)])

    def twice(chosen):
        return Distances(kl=2 * exact(groups, measured)(chosen).kl, agrees=torch.tensor([True]))

    assert propose(groups, measured, exact(groups, measured), Goal(kl=0.15)).groups == ((0, "o"),)
    assert propose(groups, measured, twice, Goal(kl=0.15)).groups == ((0, "o"), (1, "o"))


def test_other_gates_count_too():
    groups, measured = fake_units([(0.1, 100), (0.04, 100), (0.03, 100)])
    assert propose(groups, measured, exact(groups, measured), Goal(top1=0.9)).groups == ((0, "o"), (1, "o"))
    assert propose(groups, measured, exact(groups, measured), Goal(kl_p99=0.08)).groups == ((0, "o"),)


def test_leaving_everything_alone_is_no_proposal():
    groups, measured = fake_units([(0.1, 100), (0.1, 100)])
    assert propose(groups, measured, exact(groups, measured), Goal(kl=0.01)) is None


def test_refusals(coarse, original, tiny_llama, tmp_path):
    with pytest.raises(InputError, match="needs text"):
        sensitivity_map(coarse, original, ())
    half = load_llm(str(tiny_llama), dtype="bfloat16", device="cpu", threads=1)
    with pytest.raises(ModelError, match=r"runs in torch\.float32, but .* runs in torch\.bfloat16; load"):
        find_fused_groups(coarse, half)
    foreign = load_llm(str(tiny_llama), dtype="float32", device="cpu", threads=1, backend="transformers")
    with pytest.raises(ModelError, match="quantkit runs this model through transformers"):
        find_fused_groups(foreign, original)


def test_a_quantized_cache_does_not_hide_what_is_swapped(coarse, tiny_llama, windows):
    """With it every token is a decode step, which as one native call would compute with the original's weights."""
    original = load_llm(str(tiny_llama), dtype="float32", device="cpu", threads=1, kv_cache="int8")
    assert original.engine.runner.program_status in ("one native call", None)
    probe = Probe(original, windows[:2])
    group = next(group for group in find_fused_groups(coarse, original) if group.name == "down")
    assert probe.measure([group]).mean > 1e-6
    assert probe.compare(original).mean == 0  # and afterwards the original is itself again
