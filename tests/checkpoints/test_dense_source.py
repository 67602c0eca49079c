"""Checkpoints that are quantized already as sources: what is read and written is what their dense twins give."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.checkpoints import reader as reader_module
from quantkit.checkpoints.dense_source import open_dense
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.pipeline import data_free
from quantkit.compress.pipeline.state import Listener
from quantkit.errors import CheckpointError, QuantkitError, SchemeError
from tests import quantized_sources as sources
from tests.compress.pipeline.test_quantize import run
from tests.helpers import edit_config, load_tensors, make_model, one_of_each
from tests.quantized_sources import FP8, KINDS, SMALL, bits

PUBLISHED = ("fp8 blocks", "fp8 of minimax", "mxfp4 stacks", "int4 experts", "nvfp4 of modelopt", "nvfp4")


def assert_same_tensors(view, twin):
    assert view.names == twin.names
    assert len(view.names) > 0
    for name in view.names:
        value, expected = view.tensor(name), twin.tensor(name)
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape), name
        assert (view.info(name).dtype, view.info(name).shape) == (value.dtype, value.shape), name
        assert torch.equal(bits(value), bits(expected)), name


def assert_codes_are_read_as(twin, source):
    assert load_tensors(source).keys() != load_tensors(twin).keys()
    assert_same_tensors(open_dense(source), CheckpointReader(twin))


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_library(quantized_pair, kind):
    source, twin = quantized_pair(kind)
    view, dense = open_dense(source), CheckpointReader(twin)
    assert load_tensors(source).keys() != load_tensors(twin).keys()
    assert_same_tensors(view, dense)
    assert view.config == dense.config
    assert "dequantized to bfloat16 when they are read" in view.notes[0]
    assert view.digests == CheckpointReader(source).digests


def assert_equal_but_for_hashes(ours, twin):
    names = sorted(path.name for path in ours.iterdir())
    assert names == sorted(path.name for path in twin.iterdir())
    for name in names:
        if name not in ("quantkit.json", "quantkit-run.json"):  # which name the source and its files
            assert (ours / name).read_bytes() == (twin / name).read_bytes(), name


@pytest.mark.parametrize(("kind", "recipe"), one_of_each(PUBLISHED, ["fp8-dynamic", "gptq-int4", "w8a8-int8"]))
def test_what_is_written_is_that_of_the_dense_twin(quantized_pair, tmp_path, text_file, kind, recipe):
    source, twin = quantized_pair(kind)
    small = {} if recipe == "fp8-dynamic" else {"calibration.samples": 4, "calibration.sequence_length": 16}
    for folder in (source, twin):
        run(folder, recipe, tmp_path / f"out-{folder.name}", text_file, overrides=small)
    assert_equal_but_for_hashes(tmp_path / f"out-{source.name}", tmp_path / f"out-{twin.name}")


@pytest.mark.parametrize("format_", ["gptq", "gptq-v2", "awq"])
def test_our_own_formats_are_sources_too(tmp_path, tiny_llama, format_):
    """Which the loaders of GPTQ and AWQ files have been tried with; a twin is the same codes written as values."""
    symmetric = {"weights.group_size": 32, "weights.symmetric": format_ == "gptq"}
    kept = tmp_path / "kept"
    for name, folder in (("compressed-tensors", kept), (format_, tmp_path / "codes"), ("dense", tmp_path / "twin")):
        half = make_half(tiny_llama, tmp_path / "half")
        quantkit.quantize(half, "rtn-int4", folder, overrides={**symmetric, "format": name})
    assert_codes_are_read_as(tmp_path / "twin", tmp_path / "codes")
    assert_codes_are_read_as(tmp_path / "twin", kept)


def make_half(model, folder):
    if not folder.exists():
        shutil.copytree(model, folder)
        half = {name: tensor.half() for name, tensor in load_file(model / "model.safetensors").items()}
        save_file(half, folder / "model.safetensors", {"format": "pt"})
        edit_config(folder, dtype="float16")
    return folder


def test_linears_of_gpt2_come_as_the_model_keeps_them(tmp_path):
    model = make_half(make_model(tmp_path / "model", "gpt2"), tmp_path / "half")
    for name in ("gptq", "dense"):
        changes = {"weights.group_size": 32, "format": name}
        quantkit.quantize(model, "rtn-int4", tmp_path / name, overrides=changes)
    assert_codes_are_read_as(tmp_path / "dense", tmp_path / "gptq")
    values, kept = CheckpointReader(tmp_path / "dense"), CheckpointReader(model)
    assert {name: values.info(name).shape for name in values.names} == {n: kept.info(n).shape for n in kept.names}


def test_a_stack_of_fp8_experts_is_one_too(tmp_path):
    maker, section = sources.fp8()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stored, values = maker(name, torch.randn(3, 256, 128, generator=torch.Generator().manual_seed(0)).bfloat16())
    assert len(stored) == 2
    (tmp_path / "config.json").write_text("{}")
    edit_config(tmp_path, architectures=["NoSuch"], dtype="bfloat16", quantization_config=section)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(bits(open_dense(tmp_path).tensor(name)), bits(values))


def test_experts_of_a_stack_are_read_one_by_one(quantized_pair, monkeypatch):
    """The largest read is one expert's codes, the largest tensor alive beside a layer is one expert's values."""
    source, _ = quantized_pair("mxfp4 stacks")
    reads = []
    read = reader_module._read

    def counted(file, info, start, num_bytes):
        reads.append(num_bytes)
        return read(file, info, start, num_bytes)

    monkeypatch.setattr(reader_module, "_read", counted)
    view = open_dense(source)
    assert not reads  # headers say it all
    stack = view.info("model.layers.0.mlp.experts.gate_up_proj")
    assert stack.shape == (4, 64, 192)
    value = view._read_tensor(stack.item(2))
    assert sum(reads) == 192 * 64 // 2 + 192 * 2  # codes and scales of this expert alone
    assert value.shape == (64, 192)


def test_a_layer_is_read_when_it_is_due(tmp_path, monkeypatch):
    """Beside the layer that is being finished at most the next one is open: two of them at any time."""
    dense = make_model(tmp_path / "dense", "qwen3", dtype=torch.bfloat16, **SMALL, num_hidden_layers=5)
    source, _ = sources.write_pair(dense, tmp_path / "source", *sources.fp8())
    finished, ahead, begun = [], [], []
    start = data_free._start
    read = reader_module.CheckpointReader._read_tensor
    names = {info: name for name, info in ((n, CheckpointReader(source).info(n).offset) for n in load_tensors(source))}

    def noted(self, info):
        name = names.get(info.offset, "") if info.file.parent == source else ""
        if name.startswith("model.layers."):
            ahead.append(int(name.split(".")[2]) - len(finished))
        return read(self, info)

    def started(plan, index, *others):
        begun.append(index - len(finished))
        return start(plan, index, *others)

    class Noting(Listener):
        def layer_finished(self, record):
            finished.append(record.index)

    monkeypatch.setattr(data_free, "_start", started)
    monkeypatch.setattr(reader_module.CheckpointReader, "_read_tensor", noted)
    run(source, "fp8-dynamic", tmp_path / "out", listener=Noting())
    assert finished == list(range(5))
    assert max(ahead) in (0, 1)
    assert begun == [0, 1, 1, 1, 1]


BROKEN = [
    ("fp8 blocks", "mlp.gate_proj.weight_scale_inv", None, r"gate_proj.weight holds codes .*without weight_scale_inv"),
    ("fp8 blocks", "mlp.gate_proj.weight", None, r"gate_proj: .*weight_scale_inv do not form a valid fp8 weight"),
    ("fp8 blocks", "mlp.gate_proj.weight_scale_inv", "nan", r"gate_proj dequantizes to \d+ NaN .*a scale"),
    (
        "fp8 blocks",
        "mlp.gate_proj.weight_scale_inv",
        "narrow",
        r"weight_scale_inv' has shape \(2, 2\), but its scheme needs",
    ),
    ("mxfp4 stacks", "mlp.experts.gate_up_proj_scales", None, r"gate_up_proj: has blocks, but no scales"),
    ("mxfp4 stacks", "mlp.experts.gate_up_proj_blocks", None, r"scales do not form a valid mxfp4 weight"),
    (
        "mxfp4 stacks",
        "mlp.experts.gate_up_proj_scales",
        "nan",
        r"dequantizes to \d+ NaN .* because a scale",
    ),
    (
        "mxfp4 stacks",
        "mlp.experts.gate_up_proj_scales",
        "narrow",
        r"differ in the number of experts: blocks \(4,.*scales \(2,",
    ),
    ("int4 experts", "mlp.experts.1.up_proj.weight_scale", None, r"experts\.1\.up_proj: has .*but no weight_scale"),
    ("int4 experts", "mlp.experts.1.up_proj.weight_scale", "nan", r"experts\.1\.up_proj dequantizes to \d+ NaN"),
    ("nvfp4 of modelopt", "mlp.experts.1.up_proj.weight_scale_2", None, r"experts\.1\.up_proj: .*'weight_scale_2'"),
]


@pytest.mark.parametrize(("kind", "name", "change", "message"), BROKEN, ids=[f"{b[1]} {b[2]}" for b in BROKEN])
def test_damaged_sources_are_refused(quantized_pair, tmp_path, kind, name, change, message):
    source = tmp_path / "source"
    shutil.copytree(quantized_pair(kind)[0], source)
    tensors = load_file(source / "model.safetensors")
    full = next(other for other in sorted(tensors) if other.endswith(f".{name}"))
    value = tensors.pop(full)
    if change == "nan":
        tensors[full] = torch.full_like(value, 255) if value.dtype == torch.uint8 else value * torch.nan
    if change == "narrow":
        tensors[full] = value[:2].contiguous()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=message) as error:
        run(source, "fp8-dynamic", tmp_path / "out")
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 4


def test_what_cannot_be_read_is_said(quantized_pair, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(quantized_pair("fp8 blocks")[0], source)
    for section, kind, message in [
        ({"quant_method": "hqq"}, CheckpointError, "method 'hqq' is not supported"),
        ({**FP8, "weight_block_size": [128]}, SchemeError, "weight_block_size"),
        ({"quant_method": "gptq", "bits": 4}, CheckpointError, "has weight, .* but no scales; .*with its config.json"),
    ]:
        edit_config(source, quantization_config=section)
        with pytest.raises(kind, match=message) as error:
            run(source, "fp8-dynamic", tmp_path / "out")
        assert isinstance(error.value, QuantkitError)
        assert error.value.exit_code == 4


def test_a_wrappers_config_says_it_in_that_of_its_language_model(quantized_pair, tmp_path):
    source, twin = quantized_pair("int4 experts")
    config = CheckpointReader(source).config
    section = config.pop("quantization_config")
    shutil.copytree(source, tmp_path / "source")
    edit_config(tmp_path / "source", quantization_config=None, text_config={"a": 1, "quantization_config": section})
    view = open_dense(tmp_path / "source")
    assert view.config["text_config"] == {"a": 1}
    assert view.names == CheckpointReader(twin).names


def test_scales_of_a_cache_stay_behind(tmp_path, tiny_llama):
    source = tmp_path / "source"
    shutil.copytree(tiny_llama, source)
    tensors = load_file(source / "model.safetensors")
    names = set(tensors)
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    args = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    section = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": args}
    edit_config(source, quantization_config=section)
    assert set(open_dense(source).names) == names
