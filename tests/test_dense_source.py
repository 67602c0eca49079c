"""Checkpoints that are quantized already as sources: what is read and written is what their dense twins give."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.checkpoints import reader as reader_module
from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.pipeline import data_free
from quantkit.compress.pipeline.events import Listener
from quantkit.dense_source import open_dense
from quantkit.errors import CheckpointError, QuantkitError, SchemeError
from quantkit.models.families import find
from quantkit.planning.estimate import estimate
from tests import quantized_sources as sources
from tests.compress.pipeline.test_quantize import IDS, decoded_logits, run
from tests.helpers import edit_config, load_tensors, make_model, one_of_each, transformers_logits

SMALL = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64}
LARGE = {"hidden_size": 256, "intermediate_size": 384}
MIXTURE = {**LARGE, "moe_intermediate_size": 128, "q_lora_rank": 128, "kv_lora_rank": 128}
MODELS = {
    "deepseek_v3": MIXTURE,
    "gpt_oss": {},
    "minimax_m2": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3": SMALL,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
# DeepSeek-V3, MiniMax-M2, gpt-oss and Kimi as they are published, and what else is read: model, maker and section.
KINDS = {
    "fp8 blocks": ("deepseek_v3", *sources.fp8()),
    "fp8 of minimax": ("minimax_m2", *sources.fp8()),
    "fp8 powers of two": ("deepseek_v3", *sources.fp8(scale_fmt="ue8m0")),
    "fp8 ragged blocks": ("deepseek_v3", sources.fp8_ragged, FP8),
    "fp8 per tensor": ("qwen3", *sources.fp8(None)),
    "mxfp4 stacks": ("gpt_oss", sources.mxfp4_stack, {"quant_method": "mxfp4"}),
    "int4 experts": ("deepseek_v3", *sources.compressed("W4A16", where="experts")),
    "int4 zero points": ("qwen3", *sources.compressed("W4A16_ASYM")),
    "int8": ("qwen3", *sources.compressed("W8A8")),
    "fp8 channels": ("qwen3", *sources.compressed("FP8_DYNAMIC")),
    "fp8 tensors": ("qwen3", *sources.compressed("FP8")),
    "fp8 blocks of compressed-tensors": ("qwen3", *sources.compressed("FP8_BLOCK")),
    "nvfp4": ("deepseek_v3", *sources.compressed("NVFP4A16")),
    "nvfp4 of modelopt": ("deepseek_v3", *sources.modelopt_nvfp4()),
    "modelopt of two kinds": ("qwen3", *sources.modelopt_mixed()),
    "mxfp4": ("qwen3", *sources.compressed("MXFP4A16")),
    "mxfp8": ("qwen3", *sources.compressed("MXFP8A16")),
    "nf4": ("qwen3", sources.nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}
PUBLISHED = ("fp8 blocks", "fp8 of minimax", "mxfp4 stacks", "int4 experts", "nvfp4 of modelopt", "nvfp4")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """By kind: the quantized checkpoint and its twin, made once."""
    folder = tmp_path_factory.mktemp("sources")
    pairs = {}

    def make(kind):
        family, maker, section = KINDS[kind]
        dense = folder / family
        if not dense.exists():
            make_model(dense, family, dtype=torch.bfloat16, **MODELS[family])
        if kind not in pairs:
            pairs[kind] = sources.write_pair(dense, folder / kind.replace(" ", "-"), maker, section)
        return pairs[kind]

    return make


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def same_tensors(view, twin):
    assert view.names == twin.names
    for name in view.names:
        value, expected = view.tensor(name), twin.tensor(name)
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape), name
        assert (view.info(name).dtype, view.info(name).shape) == (value.dtype, value.shape), name
        assert torch.equal(bits(value), bits(expected)), name


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_library(pair, kind):
    source, twin = pair(kind)
    view, dense = open_dense(source), CheckpointReader(twin)
    assert load_tensors(source).keys() != load_tensors(twin).keys()
    same_tensors(view, dense)
    assert view.config == dense.config
    assert "dequantized to bfloat16 while read" in view.notes[0]
    assert view.digests == CheckpointReader(source).digests


def assert_equal_but_for_hashes(ours, twin):
    names = sorted(path.name for path in ours.iterdir())
    assert names == sorted(path.name for path in twin.iterdir())
    for name in names:
        if name not in ("quantkit.json", "quantkit-run.json"):  # which name the source and its files
            assert (ours / name).read_bytes() == (twin / name).read_bytes(), name


@pytest.mark.parametrize(("kind", "recipe"), one_of_each(PUBLISHED, ["fp8-dynamic", "gptq-int4", "w8a8-int8"]))
def test_what_is_written_is_that_of_the_dense_twin(pair, tmp_path, text_file, kind, recipe):
    source, twin = pair(kind)
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
    same_tensors(open_dense(tmp_path / "codes"), CheckpointReader(tmp_path / "twin"))
    same_tensors(open_dense(kept), CheckpointReader(tmp_path / "twin"))


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
    same_tensors(open_dense(tmp_path / "gptq"), CheckpointReader(tmp_path / "dense"))


def test_a_stack_of_fp8_experts_is_one_too(tmp_path):
    maker, section = sources.fp8()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stored, values = maker(name, torch.randn(3, 256, 128, generator=torch.Generator().manual_seed(0)).bfloat16())
    assert len(stored) == 2
    (tmp_path / "config.json").write_text("{}")
    edit_config(tmp_path, architectures=["NoSuch"], dtype="bfloat16", quantization_config=section)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(bits(open_dense(tmp_path).tensor(name)), bits(values))


def test_experts_of_a_stack_are_read_one_by_one(pair, monkeypatch):
    """The largest read is one expert's codes, the largest tensor alive beside a layer is one expert's values."""
    source, _ = pair("mxfp4 stacks")
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
    ("fp8 blocks", "mlp.gate_proj.weight_scale_inv", None, r"gate_proj.weight is codes .*without weight_scale_inv"),
    ("fp8 blocks", "mlp.gate_proj.weight", None, r"gate_proj: .*weight_scale_inv are no weight of fp8"),
    ("fp8 blocks", "mlp.gate_proj.weight_scale_inv", "nan", r"gate_proj: dequantizes to \d+ NaN .*a scale"),
    (
        "fp8 blocks",
        "mlp.gate_proj.weight_scale_inv",
        "narrow",
        r"weight_scale_inv' has shape \(2, 2\), its scheme needs",
    ),
    ("mxfp4 stacks", "mlp.experts.gate_up_proj_scales", None, r"gate_up_proj: has blocks, but no scales"),
    ("mxfp4 stacks", "mlp.experts.gate_up_proj_blocks", None, r"gate_up_proj: scales are no weight of mxfp4"),
    ("mxfp4 stacks", "mlp.experts.gate_up_proj_scales", "nan", r"dequantizes to \d+ NaN or infinite values: a scale"),
    (
        "mxfp4 stacks",
        "mlp.experts.gate_up_proj_scales",
        "narrow",
        r"different numbers of them: blocks \(4,.*scales \(2,",
    ),
    ("int4 experts", "mlp.experts.1.up_proj.weight_scale", None, r"experts\.1\.up_proj: has .*but no weight_scale"),
    ("int4 experts", "mlp.experts.1.up_proj.weight_scale", "nan", r"experts\.1\.up_proj: dequantizes to \d+ NaN"),
    ("nvfp4 of modelopt", "mlp.experts.1.up_proj.weight_scale_2", None, r"experts\.1\.up_proj: .*'weight_scale_2'"),
]


@pytest.mark.parametrize(("kind", "name", "change", "message"), BROKEN, ids=[f"{b[1]} {b[2]}" for b in BROKEN])
def test_damaged_sources_are_refused(pair, tmp_path, kind, name, change, message):
    source = tmp_path / "source"
    shutil.copytree(pair(kind)[0], source)
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


def test_what_cannot_be_read_is_said(pair, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(pair("fp8 blocks")[0], source)
    for section, kind, message in [
        ({"quant_method": "hqq"}, CheckpointError, "method 'hqq', which no known format reads"),
        ({**FP8, "weight_block_size": [128]}, SchemeError, "weight_block_size"),
        ({"quant_method": "gptq", "bits": 4}, CheckpointError, "has weight, .* but no scales; .*of another model"),
    ]:
        edit_config(source, quantization_config=section)
        with pytest.raises(kind, match=message) as error:
            run(source, "fp8-dynamic", tmp_path / "out")
        assert isinstance(error.value, QuantkitError)
        assert error.value.exit_code == 4


def test_a_wrappers_config_says_it_in_that_of_its_language_model(pair, tmp_path):
    source, twin = pair("int4 experts")
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


KEEP = """
name: mine
weights: {{dtype: int4, group_size: 32}}
overrides:
  - modules: ["{pattern}"]
    keep: source
steps: [{steps}]
{calibration}
format: {format}
"""
CALIBRATION = "calibration: {samples: 4, sequence_length: 16}"


def keep_recipe(folder, pattern, steps="gptq", format_="compressed-tensors"):
    path = folder / "mine.yaml"
    calibration = CALIBRATION if steps and steps != "rotate" else ""
    path.write_text(KEEP.format(pattern=pattern, steps=steps, calibration=calibration, format=format_))
    return path


KEPT = [
    ("fp8 blocks", "*.shared_experts.*", "fp8 128x128"),
    ("fp8 blocks of compressed-tensors", "*self_attn*", "fp8 128x128"),
    ("fp8 channels", "*self_attn*", "fp8 channel"),
    ("fp8 tensors", "*mlp*", "fp8 tensor"),
    ("int4 experts", "*.experts.*", "int4 g128"),
    ("mxfp4 stacks", "*experts*", "mxfp4 g32"),
    ("nvfp4", "*.experts.*", "nvfp4 g16"),
    ("mxfp8", "*self_attn*", "mxfp8 g32"),
]


@pytest.mark.parametrize(("kept", "steps"), one_of_each(KEPT, ["awq, gptq", "", ""]), ids=str)
def test_kept_linears_have_the_numbers_of_the_source(pair, tmp_path, text_file, kept, steps):
    kind, pattern, scheme = kept
    source, _ = pair(kind)
    overrides = {"calibration.data": str(text_file)} if steps else {}
    result = quantkit.quantize(source, keep_recipe(tmp_path, pattern, steps), tmp_path / "out", overrides=overrides)
    assert any(f"keep the codes of the source ({scheme}" in warning for warning in result.warnings)
    layers = [layer for layer in result.layers if any(one.scheme.startswith(scheme) for one in layer.linears)]
    kept = {f"{layer.name}.{one.name}" for layer in layers for one in layer.linears if one.scheme.startswith(scheme)}
    others = {f"{layer.name}.{one.name}" for layer in result.layers for one in layer.linears} - kept
    assert kept
    assert others
    before, after = model_view(source), model_view(tmp_path / "out")
    for name in kept:
        assert torch.equal(bits(after.tensor(f"{name}.weight")), bits(before.tensor(f"{name}.weight"))), name
        codes, written = before.codes(f"{name}.weight"), after.codes(f"{name}.weight")
        assert torch.equal(bits(codes.codes), bits(written.codes))
        assert torch.equal(codes.scale.float(), written.scale.float())
    for name in others:
        assert not torch.equal(after.tensor(f"{name}.weight"), before.tensor(f"{name}.weight")), name


AS_NVFP4 = """
name: mine
weights: {{dtype: nvfp4}}
ignore: ["*self_attn*"]
overrides:
  - modules: ["{pattern}"]
    keep: source
    weights: {{dtype: {dtype}}}
"""


@pytest.mark.parametrize(("kind", "pattern"), [("mxfp4", "*mlp*"), ("mxfp4 stacks", "*experts*")])
def test_mxfp4_is_kept_as_nvfp4_of_the_same_values(pair, tmp_path, kind, pattern):
    """But for linears whose scales span more than an 8-bit float does, which are rounded and said to be."""
    source = tmp_path / "source"
    shutil.copytree(pair(kind)[0], source)
    tensors = load_file(source / "model.safetensors")
    wide = next(name for name in sorted(tensors) if name.endswith(("mlp.up_proj.weight_scale", "down_proj_scales")))
    codes = tensors[wide.replace("_scales", "_blocks").replace("weight_scale", "weight_packed")]
    first, last = (0, 0, 0), (0, 1, 0)
    if tensors[wide].dim() == 2:
        first, last = first[1:], last[1:]
    codes[first], codes[last] = 0x11, 0x11  # not zero
    tensors[wide][first], tensors[wide][last] = 100, 118
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (tmp_path / "mine.yaml").write_text(AS_NVFP4.format(pattern=pattern, dtype="nvfp4"))
    result = quantkit.quantize(source, tmp_path / "mine.yaml", tmp_path / "out")
    assert any("nvfp4 g16, where its scales have that form" in warning for warning in result.warnings)
    notes = [note for layer in result.layers for note in layer.notes]
    assert len(notes) == 1
    assert "span too much for nvfp4 g16; rounded" in notes[0]
    rounded = {f"{result.layers[0].name}.{name}" for name in notes[0].partition(":")[0].split(", ")}
    before, after = model_view(source), model_view(tmp_path / "out")
    names = {f"{layer.name}.{one.name}" for layer in result.layers for one in layer.linears}
    assert len(names) > len(rounded) > 0
    same = {name: torch.equal(*(view.tensor(f"{name}.weight") for view in (after, before))) for name in names}
    assert all(same[name] for name in names - rounded)
    assert not all(same[name] for name in rounded)  # rounding may happen on what is exact for one of them
    assert {after.stored_scheme(f"{name}.weight").describe() for name in names} == {"nvfp4 g16"}


def test_no_other_codes_become_others(pair, tmp_path):
    for kind, dtype in (("mxfp4", "int4"), ("fp8 channels", "nvfp4")):
        (tmp_path / "mine.yaml").write_text(AS_NVFP4.format(pattern="*mlp*", dtype=dtype))
        with pytest.raises(QuantkitError, match=r"which cannot be kept as \w+ .*only mxfp4 as nvfp4"):
            quantkit.quantize(pair(kind)[0], tmp_path / "mine.yaml", tmp_path / "out")


def model_view(folder):
    view = open_dense(folder)
    return ModelReader.of(view, find(view.config))


def test_files_of_kept_blocks_are_those_of_the_source(pair, tmp_path):
    source, _ = pair("fp8 blocks")
    quantkit.quantize(source, keep_recipe(tmp_path, "*.shared_experts.*", ""), tmp_path / "out")
    before, after = load_tensors(source), load_tensors(tmp_path / "out")
    name = "model.layers.1.mlp.shared_experts.up_proj"
    assert torch.equal(bits(after[f"{name}.weight"]), bits(before[f"{name}.weight"]))
    assert torch.equal(after[f"{name}.weight_scale"], before[f"{name}.weight_scale_inv"])
    groups = CheckpointReader(tmp_path / "out").config["quantization_config"]["config_groups"].values()
    assert {group["weights"]["num_bits"] for group in groups} == {4, 8}


def test_transformers_computes_with_kept_codes(pair, tmp_path):
    source, twin = pair("fp8 blocks of compressed-tensors")
    quantkit.quantize(source, keep_recipe(tmp_path, "*self_attn*", ""), tmp_path / "out")
    assert torch.equal(transformers_logits(tmp_path / "out", IDS), decoded_logits(twin, tmp_path / "out"))


NOT_KEPT = [
    ("fp8 blocks", "*.mlp.gate", "", "compressed-tensors", r"matches no linear"),
    ("fp8 blocks", "*.kv_a_proj_with_mqa", "", "compressed-tensors", r"which has none of it; narrow keep's patterns"),
    ("fp8 channels", "*mlp*", "rotate", "compressed-tensors", r"the step rotate changes all weights"),
    ("fp8 channels", "*mlp*", "", "gptq", r"mlp.* cannot be kept as the source has it: the gptq format has no place"),
    ("fp8 channels", "*.q_proj", "", "compressed-tensors", r"fused by inference engines and need one scheme"),
    (
        "fp8 ragged blocks",
        "*.self_attn.*_a_proj*",
        "",
        "compressed-tensors",
        r"of 128 outputs do not divide 144",
    ),
    ("nvfp4 of modelopt", "*.experts.*", "", "compressed-tensors", r"cannot be kept .*two levels"),
    ("nf4", "*mlp*", "", "compressed-tensors", r"cannot be kept as the source has it"),
]


@pytest.mark.parametrize(("kind", "pattern", "steps", "format_", "message"), NOT_KEPT)
def test_what_cannot_be_kept_is_refused_before_any_work(pair, tmp_path, kind, pattern, steps, format_, message):
    with pytest.raises(QuantkitError, match=message) as error:
        quantkit.quantize(pair(kind)[0], keep_recipe(tmp_path, pattern, steps, format_), tmp_path / "out")
    assert error.value.exit_code == 4
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_plan_counts_the_values_and_what_is_kept(pair, tmp_path):
    source, twin = pair("fp8 channels")
    plans = [estimate(folder, recipe="rtn-int4", overrides={"weights.group_size": 32}) for folder in (source, twin)]
    sizes = [plan.weights[1].size for plan in plans]
    assert sizes[0] == sizes[1]
    assert plans[0].weights[0].size.memory_bytes < plans[1].weights[0].size.memory_bytes  # as stored
    kept = estimate(source, recipe=keep_recipe(tmp_path, "*self_attn*", ""))
    assert sizes[0].memory_bytes < kept.weights[1].size.memory_bytes < plans[1].weights[0].size.memory_bytes
    with pytest.raises(QuantkitError, match="which has none of it"):
        estimate(twin, recipe=keep_recipe(tmp_path, "*self_attn*", ""))


def test_a_dense_source_has_nothing_to_keep(tmp_path, tiny_llama):
    with pytest.raises(QuantkitError, match="which has none of it"):
        quantkit.quantize(tiny_llama, keep_recipe(tmp_path, "*mlp*", ""), tmp_path / "out")
