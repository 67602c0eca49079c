"""Trials: made together as alone, on the inputs of the original, and either goes on with what the other has left."""

from __future__ import annotations

import errno

import pytest
import torch

import quantkit
from quantkit.compress.calibration import layer as calibration_layer
from quantkit.compress.calibration.hidden_state_store import ActivationStore
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.pipeline import layers as pipeline
from quantkit.compress.pipeline.run import quantize_together
from quantkit.compress.recipe.load import build
from quantkit.errors import ResourceError
from tests.compress.pipeline.killer import KillAfterFirst, Killed
from tests.helpers import make_model

NUMBERS = {"three": ("int3", 32), "four": ("int4", 16), "eight": ("int8", 16)}
WEIGHTS = {name: {"dtype": dtype, "group_size": size} for name, (dtype, size) in NUMBERS.items()}


@pytest.fixture
def recipes(text_file):
    """By name, of some steps."""

    def of(*steps, inputs="original"):
        calibration = {"data": str(text_file), "samples": 8, "sequence_length": 24, "inputs": inputs}
        return {
            name: build({"name": name, "weights": weights, "steps": list(steps), "calibration": calibration}, name)
            for name, weights in WEIGHTS.items()
        }

    return of


def files(folder):
    """All but the run log, which holds timings."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "quantkit-run.json"}


def together(model, made, folder):
    folder.mkdir(exist_ok=True)
    quantize_together(str(model), {folder / name: recipe for name, recipe in made.items()}, device="cpu")


def counted(monkeypatch, name):
    """Names of the layers that a method of theirs is called for."""
    calls, method = [], getattr(LayerContext, name)
    monkeypatch.setattr(LayerContext, name, lambda self, *given: (calls.append(self.name), method(self, *given)))
    return calls


# GPTQ's are gathered once a layer. AWQ's depend on the size of groups, and what it leaves to GPTQ differs.
@pytest.mark.parametrize(("steps", "gathered"), [(("gptq",), 2), (("awq", "gptq"), 10)])
def test_made_together_as_alone(tiny_llama, recipes, tmp_path, steps, gathered, monkeypatch):
    calls, made = counted(monkeypatch, "_show"), recipes(*steps)
    together(tiny_llama, made, tmp_path / "together")
    assert len(calls) == gathered
    for name, recipe in made.items():
        quantkit.quantize(tiny_llama, recipe, tmp_path / name, device="cpu")
        assert files(tmp_path / name) == files(tmp_path / "together" / name)


def test_set_after_set_trials_keep_their_runs_apart(tiny_llama, recipes, tmp_path):
    made = recipes({"gptq": {"true_sequential": True}})
    together(tiny_llama, made, tmp_path / "together")
    quantkit.quantize(tiny_llama, made["four"], tmp_path / "four", device="cpu")
    assert files(tmp_path / "four") == files(tmp_path / "together" / "four")


def test_experts_are_counted_once(recipes, tmp_path, monkeypatch):
    model, made, calls = make_model(tmp_path / "moe", "qwen3_moe"), recipes("rtn"), []
    count = calibration_layer.count_tokens
    monkeypatch.setattr(calibration_layer, "count_tokens", lambda *given: calls.append(1) or count(*given))
    together(model, made, tmp_path / "together")
    assert len(calls) == 2
    quantkit.quantize(model, made["four"], tmp_path / "four", device="cpu")
    assert files(tmp_path / "four") == files(tmp_path / "together" / "four")


def test_only_the_first_layer_has_the_same_inputs_otherwise(tiny_llama, recipes, tmp_path):
    for inputs in ("original", "quantized"):
        quantkit.quantize(tiny_llama, recipes("gptq", inputs=inputs)["three"], tmp_path / inputs, device="cpu")
    one, other = (
        [path.read_bytes() for path in sorted((tmp_path / inputs).glob("*.safetensors"))]
        for inputs in ("original", "quantized")
    )
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, True]  # the last is embeddings


def test_a_killed_pass_goes_on_together_and_alone(tiny_llama, recipes, tmp_path, monkeypatch):
    made, run_layer, calls = recipes("gptq"), pipeline._run_layer, []
    together(tiny_llama, made, tmp_path / "whole")

    def killed(run, index, *rest):
        calls.append(index)
        if len(calls) == 5:
            raise Killed
        run_layer(run, index, *rest)

    monkeypatch.setattr(pipeline, "_run_layer", killed)
    for folder in ("killed", "alone"):
        calls.clear()
        with pytest.raises(Killed):
            together(tiny_llama, made, tmp_path / folder)
    calls.clear()
    together(tiny_llama, made, tmp_path / "killed")
    assert calls == [1, 1]  # one layer of two trials was left
    for name, recipe in made.items():
        result = quantkit.quantize(tiny_llama, recipe, tmp_path / "alone" / name, device="cpu")
        assert result.resumed_layers == (2 if name == "three" else 1)
        whole = files(tmp_path / "whole" / name)
        assert whole == files(tmp_path / "killed" / name) == files(tmp_path / "alone" / name)


def test_what_was_killed_alone_goes_on_together(tiny_llama, recipes, tmp_path):
    made = recipes("gptq")
    together(tiny_llama, made, tmp_path / "whole")
    (tmp_path / "killed").mkdir()
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)  # each keeps its own
    quantkit.quantize(tiny_llama, made["four"], tmp_path / "whole" / "four", overwrite=True)
    with pytest.raises(Killed):
        quantkit.quantize(tiny_llama, made["four"], tmp_path / "killed" / "four", listener=KillAfterFirst())
    torch.set_num_threads(before)
    together(tiny_llama, made, tmp_path / "killed")
    for name in made:
        assert files(tmp_path / "whole" / name) == files(tmp_path / "killed" / name)


def test_what_cannot_be_written_is_told_as_by_quantize(tiny_llama, recipes, tmp_path, monkeypatch):
    def full(self, run):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ActivationStore, "advance", full)
    with pytest.raises(ResourceError, match="no space left while writing"):
        together(tiny_llama, recipes("gptq"), tmp_path / "together")
