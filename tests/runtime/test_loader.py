"""Loading: every stored form computes the same, contradictions are found before a weight is read, memory is bounded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import CheckpointError, InputError, ModelError, ResourceError
from quantkit.formats import compressed_tensors
from quantkit.kernels import cpu
from quantkit.kernels.cpu.linear import NativeLinear
from quantkit.machine.devices import fast_cpu_dtype
from quantkit.machine.system import peak_bytes
from quantkit.numerics.affine import WeightGrid, round_to_nearest
from quantkit.numerics.dtype import INT4
from quantkit.numerics.scheme import LinearScheme, WeightScheme
from quantkit.runtime.model.hf_model import TransformersModel
from quantkit.runtime.model.layers import SideBySide
from quantkit.runtime.model.loader import load_model, pick_dtype
from quantkit.runtime.model.model import NativeModel
from tests import forked
from tests.compress.pipeline.test_quantize import IDS, decoded_logits
from tests.helpers import edit_config, edit_tensors, make_model
from tests.runtime.helpers import difference, make_loud_model, prompts, reference_logits, run

SEQUENCES = prompts(1, 40, 90)
GROUPS = {"weights.group_size": 32}


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return make_loud_model(tmp_path_factory.mktemp("loader"), "llama")


def copied(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize(
    ("family", "recipe", "changes"),
    [
        ("llama", "rtn-int4", GROUPS),
        ("llama", "rtn-int8", {}),
        ("llama", "fp8-dynamic", {}),
        ("llama", "rtn-int4", {**GROUPS, "weights.symmetric": False}),
        ("llama", "rtn-int4", {**GROUPS, "ignore": ["*.k_proj", "*.q_proj", "*.v_proj"]}),
        ("llama", "rtn-int4", {**GROUPS, "format": "dense"}),
        ("llama", "rtn-int4", {**GROUPS, "format": "gptq"}),
        ("llama", "rtn-int4", {**GROUPS, "format": "awq", "weights.symmetric": False}),
        ("qwen2", "rtn-int4", GROUPS),
        ("phi3", "rtn-int4", GROUPS),
        ("gpt_neox", "rtn-int8", {}),
        ("starcoder2", "rtn-int8", {}),
    ],
    ids=str,
)
def test_quantized_checkpoints_compute_what_transformers_computes(tmp_path, family, recipe, changes):
    model = make_loud_model(tmp_path / "model", family)
    quantkit.quantize(model, recipe, tmp_path / "out", overrides=changes)
    sequences = SEQUENCES
    if changes.get("format") in ("gptq", "awq"):  # their own loaders need other packages
        sequences, expected = IDS.tolist(), list(decoded_logits(model, tmp_path / "out"))
    else:
        expected = reference_logits(tmp_path / "out", SEQUENCES)
    # Where inputs are rounded, the last bit decides about a step; the reference decodes zero points in float16.
    close = 2e-2 if recipe == "fp8-dynamic" else 5e-3 if changes.get("format") == "awq" else 1e-4
    assert difference(run(load_model(tmp_path / "out", dtype="float32"), sequences), expected) < close


def test_linears_stored_differently_stay_side_by_side(tmp_path, llama):
    recipe = tmp_path / "mixed.yaml"
    recipe.write_text(
        "name: mixed\ndescription: Eight bits, four in the first layer's MLP.\n"
        "weights: {dtype: int8, group_size: channel}\nformat: compressed-tensors\n"
    )
    quantkit.quantize(llama, recipe, tmp_path / "out")
    # A checkpoint of others, where one of three projections was left as it is.
    tensors = load_file(tmp_path / "out" / "model-00001-of-00003.safetensors")
    name = next(n for n in tensors if "k_proj" in n).partition("k_proj")[0] + "k_proj"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    file = tmp_path / "out" / index["weight_map"][f"{name}.weight_packed"]
    tensors = load_file(file)
    stored = {n: tensors.pop(n) for n in list(tensors) if n.startswith(f"{name}.")}
    tensors[f"{name}.weight"] = CheckpointReader(llama).tensor(f"{name}.weight")
    save_file(tensors, file, {"format": "pt"})
    weight_map = {n: f for n, f in index["weight_map"].items() if n not in stored} | {f"{name}.weight": file.name}
    (tmp_path / "out" / "model.safetensors.index.json").write_text(json.dumps({**index, "weight_map": weight_map}))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"]["ignore"].append(name)
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path / "out", dtype="float32")
    assert isinstance(model.blocks[int(name.split(".")[2])].attention.qkv, SideBySide)
    assert difference(run(model, SEQUENCES), reference_logits(tmp_path / "out", SEQUENCES)) < 1e-4


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_experts_in_one_tensor_are_the_same_experts(tmp_path, family):
    single = make_loud_model(tmp_path / "single", family)
    stacked = copied(single, tmp_path / "stacked")
    tensors = load_file(stacked / "model.safetensors")
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    inside = "block_sparse_moe" if family == "mixtral" else "mlp"
    for layer in range(2):
        start = f"model.layers.{layer}.{inside}.experts."
        gate, up, down = (torch.stack([tensors.pop(f"{start}{i}.{name}.weight") for i in range(4)]) for name in names)
        tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = down
    save_file(tensors, stacked / "model.safetensors", {"format": "pt"})
    one, other = load_model(single), load_model(stacked)
    assert one.num_bytes == other.num_bytes
    assert one.stored_bytes < one.num_bytes - 260 * 64 * 4  # two experts of four, and the embedding, are not read
    assert difference(run(one, SEQUENCES), run(other, SEQUENCES)) == 0


def test_names_without_the_prefix_of_the_causal_model_are_the_same_tensors(tmp_path):
    folder = make_loud_model(tmp_path / "whole", "llama")
    inner = copied(folder, tmp_path / "inner")
    tensors = load_file(inner / "model.safetensors")
    names = {name: name.removeprefix("model.") for name in tensors}
    save_file({names[name]: tensor for name, tensor in tensors.items()}, inner / "model.safetensors", {"format": "pt"})
    one, other = load_model(folder, backend="native"), load_model(inner, backend="native")
    assert difference(run(one, SEQUENCES), run(other, SEQUENCES)) == 0


@pytest.mark.parametrize(("head_dtype", "error"), [("int8", 0.02), ("int4", 0.3)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_rounded_head_is_close_and_smaller(tmp_path, head_dtype, error, tied):
    folder = make_loud_model(tmp_path, "llama", tie_word_embeddings=tied, dtype=torch.bfloat16)
    plain, rounded = (load_model(folder, dtype="bfloat16", head_dtype=name) for name in (None, head_dtype))
    assert plain.dtype == torch.bfloat16
    assert head_dtype in rounded.head.description
    assert 0 < difference(run(rounded, SEQUENCES), run(plain, SEQUENCES)) < error


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_are_those_of_the_weights(tmp_path, tied):
    sizes = {"vocab_size": 256, "intermediate_size": 128}  # whole panels of 64 outputs
    folder = make_loud_model(tmp_path, "llama", tie_word_embeddings=tied, **sizes)
    model, tensors = load_model(folder), load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"].nbytes
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert model.stored_bytes == (total if tied else total - embedding)
    assert model.num_bytes == total  # a head in panels replaces the table


@pytest.mark.skipif(cpu.library() is None, reason=cpu.status())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("computed", ["float32", "bfloat16"])
def test_a_tied_head_in_panels_serves_as_the_embedding(tmp_path, dtype, computed):
    folder = make_loud_model(tmp_path, "llama", tie_word_embeddings=True, vocab_size=260, dtype=dtype)
    model, table = load_model(folder, dtype=computed), load_file(folder / "model.safetensors")
    ids = torch.tensor([0, 259, 64, 63, 7])
    assert torch.equal(model.embed(ids), table["model.embed_tokens.weight"][ids].to(model.dtype))


@pytest.mark.skipif(cpu.library() is None, reason=cpu.status())
def test_bfloat16_weights_stay_so_in_a_float32_computation(tmp_path):
    folder = make_loud_model(tmp_path, "llama", dtype=torch.bfloat16)
    model = load_model(folder, dtype="float32")
    assert model.dtype == torch.float32
    assert model.num_bytes < 1.6 * sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert difference(run(model, SEQUENCES), reference_logits(folder, SEQUENCES)) < 1e-4


def test_what_the_engine_asks_of_a_model(llama):
    model = load_model(llama)
    assert isinstance(model, NativeModel)
    assert (model.vocab_size, model.max_length, model.eos_ids, model.paged) == (260, 512, (1,), True)
    assert [layout.num_heads for layout in model.layouts(None, 16)] == [2, 2]
    assert model.layouts(None, 16)[0].dtype == model.dtype == torch.float32


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(None, [3, 4], (3, 4)), ({"eos_token_id": [5, 6]}, 3, (5, 6)), ({}, 3, (3,)), (None, None, ())],
)
def test_end_tokens(llama, tmp_path, generation, config, expected):
    folder = copied(llama, tmp_path / "model")
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    edit_config(folder, eos_token_id=config)
    assert load_model(folder).eos_ids == expected


def test_dtypes_on_this_processor(tmp_path):
    cpu, fast = torch.device("cpu"), fast_cpu_dtype() == torch.bfloat16
    for stored in (torch.float32, torch.bfloat16, torch.float16):
        folder = make_loud_model(tmp_path / str(stored), "llama", dtype=stored)
        reader = CheckpointReader(folder)
        chosen, notes = pick_dtype("auto", reader, cpu)
        assert chosen == (torch.float32 if stored == torch.float32 or not fast else torch.bfloat16)
        assert len(notes) == (chosen != stored)
        edit_config(folder, dtype=None)
        assert pick_dtype("auto", CheckpointReader(folder), cpu)[0] == chosen
        assert pick_dtype("float16", reader, cpu) == (torch.float16, ())
        for short, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
            assert pick_dtype(short, reader, cpu) == (dtype, ())
        assert load_model(folder).notes == notes
        edit_config(folder, torch_dtype="float32")
        assert pick_dtype("auto", CheckpointReader(folder), cpu) == (torch.float32, ())


@pytest.mark.parametrize(
    ("stored", "asked", "rounds"),
    [(torch.bfloat16, "auto", True), (torch.bfloat16, "fp32", False), (torch.float32, "auto", False)],
)
def test_inputs_are_rounded_only_where_float32_stands_in(tmp_path, monkeypatch, stored, asked, rounds):
    monkeypatch.setattr("quantkit.runtime.model.loader.fast_cpu_dtype", lambda: torch.float32)
    head = load_model(make_loud_model(tmp_path / "model", "llama", dtype=stored), dtype=asked, head_dtype="int8").head
    if not isinstance(head, NativeLinear):
        pytest.skip("no C kernels")
    assert head.dtype == torch.float32
    assert (head.activation != 0) == rounds


@pytest.fixture
def unread(monkeypatch):
    """No weight may be read: checks come first."""

    def fail(self, name, *args):
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(CheckpointReader, "tensor", fail)
    monkeypatch.setattr(CheckpointReader, "rows", fail)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 100}, r"mlp.gate_proj.weight has shape \(96, 64\), but config.json says \(100, 64\)"),
        ({"vocab_size": 300}, r"embed_tokens.weight has shape \(260, 64\), but config.json says \(300, 64\)"),
        ({"num_key_value_heads": 4}, r"k_proj.weight has shape \(32, 64\), but config.json says \(64, 64\)"),
        ({"num_hidden_layers": 3}, r"tensor model.layers.2.input_layernorm.weight \(64,\) is missing"),
        ({"num_hidden_layers": 1}, r"that config.json describes has no tensor model.layers.1"),
        ({"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}, r"self_attn.q_norm.weight \(16,\) is missing"),
        ({"architectures": ["Gemma2ForCausalLM"], "head_dim": 16}, "pre_feedforward_layernorm.weight"),
        ({"hidden_size": "absent"}, "'hidden_size' is missing"),
    ],
)
def test_a_config_of_another_model_is_refused_first(llama, tmp_path, unread, changes, message):
    folder = copied(llama, tmp_path / "model")
    edit_config(folder, **{key: None if value == "absent" else value for key, value in changes.items()})
    with pytest.raises((CheckpointError, ModelError), match=message) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4


def test_a_quantized_shape_that_contradicts_is_refused(llama, tmp_path):
    quantkit.quantize(llama, "rtn-int4", tmp_path / "out", overrides=GROUPS)
    edit_config(tmp_path / "out", intermediate_size=128)
    with pytest.raises(CheckpointError, match=r"mlp.gate_proj has shape \(96, 64\), but config.json says \(128, 64\)"):
        load_model(tmp_path / "out")


def test_codes_without_their_description_are_refused(llama, tmp_path):
    quantkit.quantize(llama, "rtn-int8", tmp_path / "out")
    edit_config(tmp_path / "out", quantization_config=None)
    with pytest.raises(CheckpointError, match="weight_packed belongs to a quantized weight, but config"):
        load_model(tmp_path / "out")


def test_old_buffers_and_cache_scales_are_passed_over(llama, tmp_path):
    folder = copied(llama, tmp_path / "model")
    edit_tensors(
        folder,
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8),
        model__layers__0__self_attn__k_scale=torch.ones(1),
    )
    assert difference(run(load_model(folder), SEQUENCES), run(load_model(llama), SEQUENCES)) == 0


def test_a_model_too_large_for_memory_is_refused_with_both_figures(llama, unread, monkeypatch):
    monkeypatch.setattr("quantkit.runtime.model.expected_tensors.free_bytes", lambda device: 100_000)
    with pytest.raises(ResourceError, match=r"loading needs 4\d\d\.\d KiB on cpu, but 97.7 KiB are") as caught:
        load_model(llama)
    assert caught.value.exit_code == 5
    with pytest.raises(ResourceError):
        load_model(llama, backend="transformers")


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"backend": "vllm"}, {"head_dtype": "int3"}])
def test_unknown_options_are_refused(llama, unread, options):
    with pytest.raises(InputError, match=f"unknown (dtype|backend|head_dtype) '{next(iter(options.values()))}'; use"):
        load_model(llama, **options)


def test_the_backend_is_chosen_by_what_the_family_needs(llama, tmp_path):
    assert isinstance(load_model(llama, backend="transformers"), TransformersModel)
    other = make_loud_model(tmp_path / "other", "bloom")
    assert isinstance(load_model(other), TransformersModel)
    with pytest.raises(
        ModelError, match="'BloomForCausalLM' is not supported by quantkit's own layers; use backend='transformers'"
    ):
        load_model(other, backend="native")
    with pytest.raises(InputError, match="head_dtype is 'int8', but transformers runs this model"):
        load_model(other, head_dtype="int8")
    # A switch that the family has, but not here.
    clipped = make_loud_model(tmp_path / "clipped", "llama")
    edit_config(clipped, clip_qkv=0.5)
    model = load_model(clipped)
    assert isinstance(model, TransformersModel)
    assert difference(run(model, SEQUENCES), reference_logits(clipped, SEQUENCES)) < 1e-4


def test_shards_are_one_model(tmp_path):
    folder = make_model(tmp_path / "sharded", shards=4)
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert difference(run(load_model(folder), SEQUENCES), reference_logits(folder, SEQUENCES)) < 1e-4


def measure(small: Path, large: Path, dtype: str, result: Path) -> None:
    """Growth of the highest memory of this process while a model is loaded, and the model's bytes."""
    load_model(small, dtype=dtype)  # a small one first: libraries, kernels and thread pools
    before = peak_bytes()
    model = load_model(large, dtype=dtype)
    result.write_text(f"{peak_bytes() - before} {model.num_bytes}")


def write_int4(source: Path, target: Path) -> Path:
    """The same model rounded to 4 bits, quickly: linears of one shape all get the codes of the first."""
    target.mkdir()
    tensors, linears, made = load_file(source / "model.safetensors"), {}, {}
    scheme = LinearScheme(weight=WeightScheme(dtype=INT4, group_size=32))
    for name in [name for name in tensors if "_proj" in name]:
        weight = tensors.pop(name)
        if weight.shape not in made:
            rounded = round_to_nearest(weight.float(), WeightGrid(scheme.weight, weight.dtype))
            made[weight.shape] = compressed_tensors.FORMAT.encode(rounded, scheme)
        linears[name.removesuffix(".weight")] = scheme
        encoded = made[weight.shape].items()
        tensors |= {f"{name.removesuffix('weight')}{local}": value.clone() for local, value in encoded}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    added = compressed_tensors.FORMAT.config(linears, ["lm_head"])
    (target / "config.json").write_text(json.dumps({**config, **added}))
    return target


def write_constant(folder: Path, like: Path, dtype: torch.dtype, hidden: int, width: int, heads: int) -> Path:
    """A Llama of 20 layers whose weights are all one: quick to make, and sizes are all that matters here."""
    folder.mkdir()
    keys = hidden // heads * 2
    shapes = {
        **{f"self_attn.{name}_proj": (hidden, hidden) for name in "qo"},
        **{f"self_attn.{name}_proj": (keys, hidden) for name in "kv"},
        **{f"mlp.{name}_proj": (width, hidden) for name in ("gate", "up")},
        "mlp.down_proj": (hidden, width),
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,)),
    }
    tensors = {
        f"model.layers.{i}.{name}.weight": torch.ones(shape) for i in range(20) for name, shape in shapes.items()
    }
    tensors |= {f"{name}.weight": torch.ones(1000, hidden) for name in ("model.embed_tokens", "lm_head")}
    tensors["model.norm.weight"] = torch.ones(hidden)
    save_file(
        {name: value.to(dtype) for name, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "config.json").write_text((like / "config.json").read_text())
    sizes = {"hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": 20, "num_attention_heads": heads}
    edit_config(folder, **sizes, vocab_size=1000, head_dim=hidden // heads, dtype=str(dtype).removeprefix("torch."))
    return folder


@pytest.mark.parametrize(
    ("dtype", "quantized"),
    [
        pytest.param("float32", False, marks=pytest.mark.slow),
        pytest.param("bfloat16", False, marks=pytest.mark.slow),
        ("bfloat16", True),
    ],
)
def test_loading_never_holds_two_copies(llama, tmp_path, dtype, quantized):
    hidden, width, heads = 512, 1024, 8
    large = write_constant(tmp_path / "large", llama, getattr(torch, dtype), hidden, width, heads)
    small = llama
    if quantized:
        small, large = write_int4(llama, tmp_path / "small"), write_int4(large, tmp_path / "out")
    assert forked.run(measure, small, large, dtype, tmp_path / "result") == 0
    growth, num_bytes = map(int, (tmp_path / "result").read_text().split())
    layer = (hidden * hidden * 2 * (1 + 2 / heads) + hidden * width * 3) * 4
    assert num_bytes > 20 * 2**20
    assert growth < 1.25 * num_bytes + layer, (growth, num_bytes)
