"""Recipes that look at no data: linear by linear, several at once, with the bytes of one after another."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch

import quantkit
from quantkit.compress.pipeline.data_free import _num_workers
from quantkit.errors import CheckpointError
from quantkit.huggingface.skeleton import Skeleton
from tests.compress.pipeline.killer import KillAfterFirst, Killed
from tests.compress.pipeline.test_resume import hashes
from tests.helpers import edit_tensors, load_tensors

INT4 = {"weights.group_size": 32}
NVFP4 = {"weights.dtype": "nvfp4", "weights.group_size": 16}


def run(model, output, threads=2, **options):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return quantkit.quantize(model, "rtn-int4", output, **{"overrides": INT4, **options})
    finally:
        torch.set_num_threads(before)


def test_threads_decide_nothing(tiny_llama, tmp_path):
    run(tiny_llama, tmp_path / "one", threads=1)
    run(tiny_llama, tmp_path / "three", threads=3)
    assert hashes(tmp_path / "one") == hashes(tmp_path / "three")


def test_no_layer_is_built(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(Skeleton, "layer", None)
    monkeypatch.setattr(Skeleton, "record", None)
    assert run(tiny_llama, tmp_path / "out").num_quantized == 14


def test_an_interrupted_run_goes_on(tiny_llama, tmp_path):
    with pytest.raises(Killed):
        run(tiny_llama, tmp_path / "out", listener=KillAfterFirst())
    assert run(tiny_llama, tmp_path / "out").resumed_layers == 1
    run(tiny_llama, tmp_path / "whole")
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


def test_what_engines_fuse_shares_its_scale(tiny_llama, tmp_path):
    run(tiny_llama, tmp_path / "out", overrides=NVFP4)
    tensors = load_tensors(tmp_path / "out")
    for names in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        scales = {tensors[f"model.layers.0.{name}.weight_global_scale"].item() for name in names}
        assert len(scales) == 1


def test_a_broken_weight_ends_the_run(tiny_llama, tmp_path):
    model, name = shutil.copytree(tiny_llama, tmp_path / "model"), "model.layers.1.mlp.up_proj.weight"
    weight = load_tensors(model)[name]
    weight[0, 0] = torch.nan
    edit_tensors(model, **{name: weight})
    with pytest.raises(CheckpointError, match=rf"{name} holds 1 NaN"):
        run(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("rows", "threads", "expected"), [(1 << 10, 2, 2), (1 << 10, 16, 16), (1 << 17, 64, 1)])
def test_as_many_at_once_as_there_is_room_for(rows, threads, expected):
    skeleton = SimpleNamespace(num_layers=1, linear_shapes=lambda _: {"a": (rows, 1 << 12)})
    plan = SimpleNamespace(skeleton=skeleton, source_dtype=torch.bfloat16)
    assert _num_workers(plan, threads) == expected
