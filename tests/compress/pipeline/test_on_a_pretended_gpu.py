"""Compression with `--device cuda`, where no GPU is: what a GPU would refuse is refused, and the files are the same."""

from __future__ import annotations

import pytest
import torch

import quantkit
from quantkit.compress.pipeline import plan
from tests.pretended import GPU, pretended_gpu


def test_tensors_of_two_places_do_not_meet():
    with pretended_gpu() as gpu:
        there, here = torch.ones(3, device=gpu), torch.ones(3)
        assert there.device == gpu
        assert (there + 1).is_cuda
        assert torch.equal((there + here.to(gpu)).cpu(), 2 * here)
        with pytest.raises(RuntimeError, match="same device"):
            there + here
        with pytest.raises(TypeError):
            there.numpy()


@pytest.mark.parametrize(
    "recipe",
    [
        "autoround-int4",
        "awq-int4-kv4",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("gptq-int4", "w8a8-int8")),
    ],
)
def test_the_checkpoint_is_that_of_the_cpu(recipe, tiny_llama, text_file, tmp_path, monkeypatch):
    overrides = {"calibration.data": str(text_file), "calibration.samples": 4, "calibration.sequence_length": 16}
    if "int4" in recipe:
        overrides["weights.group_size"] = 16
    if recipe == "autoround-int4":
        overrides["steps.autoround.iterations"] = 2
    monkeypatch.setenv("QUANTKIT_NATIVE", "0")  # what C computes on a CPU differs in the last bits
    quantkit.quantize(tiny_llama, recipe, tmp_path / "cpu", overrides=overrides, device="cpu")
    monkeypatch.setattr(plan, "pick_device", lambda name: GPU)
    monkeypatch.setattr(plan, "pick_compute_dtype", lambda source, device: source)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "pretended")
    with pretended_gpu():
        quantkit.quantize(tiny_llama, recipe, tmp_path / "gpu", overrides=overrides, device="cuda")
    files = sorted(path.name for path in (tmp_path / "cpu").glob("*.safetensors"))
    assert files
    for name in files:
        assert (tmp_path / "gpu" / name).read_bytes() == (tmp_path / "cpu" / name).read_bytes(), name
