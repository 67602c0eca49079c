"""A layer that is run again for each set of linears computes nothing twice, and what it would compute run whole."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from quantkit.compress.algorithms.gptq import GptqStep
from quantkit.compress.calibration import stream
from quantkit.compress.calibration.hidden_state_store import ActivationStore
from quantkit.compress.calibration.stream import Stream, learn_structure
from quantkit.compress.pipeline.inputs import advance
from quantkit.models.linear_sets import split_experts

STEP = GptqStep(true_sequential=True, asymmetric_calibration=1.0)


def calibrated(layer, original, folder=None):
    """Codes and the states behind the layer, of both models, which are saved where there is a folder."""
    batches, mode = list(layer.store), "disk" if folder else "ram"
    layer.stream.store = ActivationStore(folder and folder / "own", "ram", iter(batches))
    store = ActivationStore(folder and folder / "original", mode, iter([2 * b for b in batches]))
    layer.data.original = Stream(original.block, store, original.stream.arguments)
    with torch.inference_mode():
        STEP.apply(layer)
        stores = [layer.store, layer.data.original.store]
        advance(stores, layer, layer.forward(layer.store[0][:1]))
    return [
        *(weight.codes for weight in layer.chosen.quantized.values()),
        *(batch for store in stores for batch in store),
    ]


@pytest.mark.parametrize("family", ["llama", "phi", "qwen2_moe"])
@pytest.mark.parametrize("all_tokens", [True, False])
def test_runs_give_what_whole_runs_give(make_layer, family, all_tokens, monkeypatch):
    def run():
        layer = make_layer(family)
        layer.data.all_tokens = all_tokens
        layer.sets = layer.sets if all_tokens else split_experts(layer.sets)
        return calibrated(layer, make_layer(family))

    staged = run()
    monkeypatch.setattr(stream, "learn_structure", lambda *_: stream.NOTHING)
    assert all(torch.equal(a, b) for a, b in zip(staged, run(), strict=True))


def test_with_a_folder_nothing_is_kept_in_memory(make_layer, tmp_path):
    in_memory = calibrated(make_layer(), make_layer())
    layer = make_layer()
    on_disk = calibrated(layer, make_layer(), tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(in_memory, on_disk, strict=True))
    # The files of what is no longer needed are gone, and no file has a name.
    assert set(layer.stream._files) == {"self_attn", "mlp"}
    assert set(layer.data.original._files) == {""}
    assert not [*(tmp_path / "own" / "beside").iterdir(), *(tmp_path / "original" / "beside").iterdir()]


def test_each_linear_sees_each_batch_once(make_layer):
    layer, original = make_layer(), make_layer()
    calls = Counter()
    for context in (layer, original):
        for name in context.schemes:
            context.linear(name).register_forward_hook(lambda *_, name=name: calls.update([name]))
    calibrated(layer, original)
    # Four batches in both models; two runs of one sequence, to learn the layer's structure and to check the result; and
    # one batch of what was settled last, by which all processes see whether it came out the same.
    assert calls == {**dict.fromkeys(layer.schemes, 2 * 4 + 2), "mlp.down_proj": 2 * 4 + 3}


def test_a_layer_that_changes_from_run_to_run_is_run_whole_and_says_so(make_layer):
    layer = make_layer()
    runs = []

    def drift(_, args, output):
        runs.append(len(runs))
        return output + 1e3 * len(runs)

    layer.block.mlp.act_fn.register_forward_hook(drift)
    calibrated(layer, make_layer())
    assert any("a second run gave different outputs" in note for note in layer.chosen.notes)


class Half(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.up, self.down, self._change = nn.Linear(4, 8), nn.Linear(8, 4), change

    def forward(self, hidden):
        return self._change(self.down(self.up(hidden).relu()))


@pytest.mark.parametrize(
    ("change", "ends"),
    [
        (lambda output: output, True),
        (lambda output: (output, None), True),
        (lambda output: (output, output.sum()), False),
        (lambda output: output + 0, False),
        (lambda output: output.mul_(2), False),
    ],
)
def test_a_module_ends_in_a_linear_whose_output_it_returns_as_it_is(change, ends):
    block = nn.Sequential(Half(change))

    def run():
        output = block(torch.ones(2, 4))
        return output[0] if isinstance(output, tuple) else output

    with torch.inference_mode():
        structure = learn_structure(block, ["0.up", "0.down"], run)
    assert ("0" in structure.ends) == ends
    assert structure.without({"0.down"}) == ["0.up"]
    assert structure.without(()) == [""]


def test_what_is_called_twice_or_returns_too_much_is_not_replaced():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.wide = nn.Linear(4, 4), nn.Linear(4, 400)

        def forward(self, hidden):
            return self.shared(self.shared(hidden)) + self.wide(hidden).sum(-1, keepdim=True)

    block = Block()
    with torch.inference_mode():
        structure = learn_structure(block, ["shared", "wide"], lambda: block(torch.ones(2, 4)))
    assert structure.without({"none"}) == [""]
    assert set(structure.modules) == {""}
