"""Layers that measurements share are run once, and the numbers are those of running everything."""

from __future__ import annotations

import pytest
import torch

import quantkit
from quantkit.evaluate.fidelity import fixed_windows
from quantkit.evaluate.group_swaps import find_fused_groups, swapped
from quantkit.evaluate.loading import load_llm
from quantkit.evaluate.sensitivity import Probe
from tests.helpers import TEXT, make_model


def load(path):
    return load_llm(str(path), dtype="float32", device="cpu", threads=1)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "original", num_hidden_layers=3)
    quantkit.quantize(folder / "original", "rtn-int4", folder / "coarse", overrides={"weights.group_size": 32},
                      device="cpu")  # fmt: skip
    return load(folder / "original"), load(folder / "coarse")


def test_replayed_measurements_are_those_of_a_full_run(models, monkeypatch):
    original, coarse = models
    groups = find_fused_groups(coarse, original)
    probe = Probe(original, fixed_windows(original, TEXT, window=64, max_tokens=200))
    runs = []
    block = type(original.model.blocks[0])
    call = block.__call__
    monkeypatch.setattr(block, "__call__", lambda self, *args: runs.append(1) or call(self, *args))
    # One group after another; then beside others, moved to and fro; then what nothing is shared with.
    last = [group for group in groups if group.layer == 2]
    asked = [*([group] for group in groups), groups[:6], groups[:7], groups[:5], [*groups[:4], *last], [*last], []]
    for chosen in [*asked, *reversed(asked)]:
        runs.clear()
        measured, ran = probe.measure(chosen), len(runs)
        with swapped(chosen):
            full = probe.compare(original)
        assert torch.equal(measured.kl, full.kl)
        assert ran <= len(runs) - ran
    assert original.model.blocks[0].__class__ is block


def test_layers_before_the_group_are_not_run_again(models, monkeypatch):
    original, coarse = models
    groups = find_fused_groups(coarse, original)
    probe = Probe(original, fixed_windows(original, TEXT, window=64, max_tokens=200))
    block = type(original.model.blocks[0])
    runs, call = [], block.__call__
    monkeypatch.setattr(block, "__call__", lambda self, *args: runs.append(self.attention.layer) or call(self, *args))
    last = [group for group in groups if group.layer == 2]
    for group in last[:3]:
        runs.clear()
        probe.measure([group])
    assert set(runs) == {2}


def test_after_an_error_the_model_is_whole(models, monkeypatch):
    original, coarse = models
    groups = find_fused_groups(coarse, original)
    probe = Probe(original, fixed_windows(original, TEXT, window=64, max_tokens=200))
    before, compare = original.model.blocks, Probe.compare
    for group in groups[8:10]:
        probe.measure([group])
    monkeypatch.setattr(Probe, "compare", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        probe.measure([groups[10]])
    assert original.model.blocks is before
    monkeypatch.setattr(Probe, "compare", compare)
    assert probe.measure([groups[8]]).mean > 0
