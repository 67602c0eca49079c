"""What fits, floors, devices, conflicts, engines and units."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from quantkit.compress.recipe import load
from quantkit.compress.recipe.load import build
from quantkit.errors import InputError, ModelError, RecipeError
from quantkit.models.kv_sizes import BF16, FP8, INT4, INT8, find_kv_form
from quantkit.planning import DEVICES, estimate, find_device, make_device, to_document
from quantkit.planning.limits import RESERVE, decode_floor, device_fit
from quantkit.planning.memory import (
    BF16_WEIGHTS,
    INT4_WEIGHTS,
    everywhere,
    kv_allocated_bytes,
    kv_bytes,
    planned_activation_bytes,
    planned_weight_bytes,
)
from quantkit.planning.recipes import plan_recipe
from quantkit.planning.source import KEYS, from_parameters, from_shape_file
from quantkit.quantities import (
    parse_bytes,
    parse_flops,
    parse_parameters,
    parse_rate,
    parse_tokens,
)
from tests.planning.shapes import MODELS, shape_of

GIB = 2**30
LLAMA = shape_of("llama-3.1-8b")
STORED, W4 = everywhere(None), everywhere(INT4_WEIGHTS)


@pytest.mark.parametrize(("form", "scheme"), [(BF16, STORED), (INT8, W4), (INT4, W4)])
@pytest.mark.parametrize("gib", [18, 24, 80])
def test_the_largest_batch_and_context_fit_and_the_next_do_not(form, scheme, gib):
    memory = gib * GIB
    fit = device_fit(LLAMA, scheme, form, memory, context=3000, batch=4)
    available = memory - round(RESERVE * memory) - planned_weight_bytes(LLAMA, scheme).memory_bytes

    def needed(batch, context):
        return batch * kv_allocated_bytes(LLAMA, context, form) + planned_activation_bytes(LLAMA, 2048, batch)

    assert needed(fit.largest_batch, 3000) <= available < needed(fit.largest_batch + 1, 3000)
    assert needed(4, fit.largest_context) <= available
    assert fit.limited_by_model or available < needed(4, fit.largest_context + 1)
    assert fit.weight_bytes + fit.activation_bytes + fit.reserve_bytes + fit.cache_bytes == memory


def test_weights_that_do_not_fit_leave_less_than_nothing():
    fit = device_fit(LLAMA, STORED, BF16, 8 * GIB, context=1024, batch=1)
    assert fit.cache_bytes < 0
    assert (fit.largest_batch, fit.largest_context, fit.limited_by_model) == (0, 0, False)


def test_the_model_limits_the_context():
    fit = device_fit(shape_of("llama-1-7b"), STORED, BF16, 141 * GIB, context=128, batch=1)
    assert (fit.largest_context, fit.limited_by_model) == (2048, True)
    unknown = device_fit(from_parameters("7B"), everywhere(BF16_WEIGHTS), BF16, 24 * GIB, context=128, batch=1)
    assert (unknown.largest_batch, unknown.largest_context, unknown.limited_by_model) == (None, None, False)


def test_decode_becomes_compute_bound_with_the_batch():
    device = find_device("h200")
    bounds = [decode_floor(LLAMA, W4, INT4, device, context=16, batch=b).bound_by for b in (1, 64, 1024)]
    assert bounds == ["memory", "memory", "compute"]
    one, four = (decode_floor(LLAMA, W4, BF16, device, context=1024, batch=b) for b in (1, 4))
    assert four.bytes_read - one.bytes_read == 3 * kv_bytes(LLAMA, 1024, BF16)


def test_compressed_and_latent_attention_read_less_than_they_keep():
    v32 = shape_of("deepseek-v3.2").layers[0].attention
    assert v32.cached_bytes(100_000, BF16) == 100_000 * (1152 + 256)
    assert v32.read_bytes(100_000, BF16) == 2048 * 1152 + 100_000 * 256
    assert v32.read_bytes(1000, BF16) == v32.cached_bytes(1000, BF16)
    v3 = shape_of("deepseek-v3").layers[0].attention
    # Sparse prefill grows with the length, not with its square, but for the indexer's scan.
    assert v32.prefill_flops(1000) > v3.prefill_flops(1000)
    assert v32.prefill_flops(200_000) < v3.prefill_flops(200_000) / 4


def test_prefill_of_a_window_counts_its_pairs():
    window = next(x.attention for x in shape_of("gemma-3-27b").layers if x.attention.window)
    full = next(x.attention for x in shape_of("gemma-3-27b").layers if not x.attention.window)
    assert window.prefill_flops(1024) == full.prefill_flops(1024) == 2 * 32 * 256 * 1024**2 / 2
    tokens = 10_000
    exact = sum(min(t + 1, 1024) for t in range(tokens))
    assert window.prefill_flops(tokens) == pytest.approx(2 * 32 * 256 * exact, rel=0.001)


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_is_complete_and_plausible(name):
    device = find_device(name)
    assert device.name == name == name.lower()
    assert device.source and device.title
    assert 12 * GIB < device.memory_bytes < 300 * GIB
    assert 100e9 < device.bandwidth < 10e12
    assert 50e12 < device.peaks["bf16"] < 5e15
    ratios = {key: peak / device.peaks["bf16"] for key, peak in device.peaks.items() if key != "bf16"}
    assert all(1.9 < ratio < (8.1 if key == "fp4" else 4.1) for key, ratio in ratios.items())
    gigabytes = [int(word[:-2]) for word in device.title.split() if word.endswith("GB")]
    assert len(gigabytes) == 1
    assert gigabytes[0] * 0.9e9 < device.memory_bytes < gigabytes[0] * 1.08e9 * 1.01


@pytest.mark.parametrize("name", ["H200", "nvidia h200", "NVIDIA-H200"])
def test_a_device_has_many_spellings(name):
    assert find_device(name).name == "h200"
    assert find_device("RTX 4090").name == find_device("rtx4090").name == "4090"


def test_given_figures_replace_those_of_the_table():
    given = make_device("h200", 100 * GIB, 4.3e12, 780e12)
    assert (given.memory_bytes, given.bandwidth, given.peaks["bf16"]) == (100 * GIB, 4.3e12, 780e12)
    assert given.peaks["fp8"] == pytest.approx(1560e12)
    assert make_device(None, None, None, None) is None
    alone = make_device(None, GIB, None, None)
    assert (alone.memory_bytes, alone.bandwidth, alone.peaks) == (GIB, 0.0, {})
    with pytest.raises(InputError, match="give --device or --memory too"):
        make_device(None, None, 1e12, None)


@pytest.mark.parametrize(
    ("call", "text", "value"),
    [
        (parse_bytes, "24GiB", 24 * GIB),
        (parse_bytes, "24 gb", 24e9),
        (parse_bytes, "1.5G", 1.5e9),
        (parse_bytes, "1024", 1024),
        (parse_rate, "4.3TB/s", 4.3e12),
        (parse_rate, "900GB", 900e9),
        (parse_flops, "780TFLOP/s", 780e12),
        (parse_flops, "780T", 780e12),
        (parse_flops, "1.9Pflops", 1.9e15),
        (parse_tokens, "32k", 32768),
        (parse_tokens, "1M", 1 << 20),
        (parse_tokens, "4096", 4096),
        (parse_parameters, "7B", (7e9, 7e9)),
        (parse_parameters, "30b-a3b", (30e9, 3e9)),
        (parse_parameters, "350M", (350e6, 350e6)),
    ],
)
def test_amounts_are_read(call, text, value):
    assert call(text) == value


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (parse_bytes, "many"),
        (parse_bytes, "24GiB/s"),
        (parse_bytes, "-1GB"),
        (parse_rate, "fast"),
        (parse_flops, "780 GiB"),
        (parse_tokens, "0"),
        (parse_tokens, "1.0001k"),
        (parse_tokens, "32kB"),
        (parse_parameters, "7B-3B"),
        (parse_parameters, "3B-A30B"),
        (parse_parameters, "0"),
        (parse_parameters, "large"),
    ],
)
def test_other_amounts_are_refused_with_an_example(call, text):
    with pytest.raises(InputError, match=r"write (it|them) as") as caught:
        call(text)
    assert repr(text) in str(caught.value)


def recipe_of(**changes):
    base = {"name": "mine", "weights": {"dtype": "int4", "group_size": 128}, "format": "compressed-tensors"}
    return build({**base, **changes}, "mine.yaml")


def test_groups_that_do_not_divide_are_counted_as_they_will_be_written():
    odd = shape_of("gpt-oss-20b")  # 2,880 = 45 x 64
    plan = plan_recipe(odd, recipe_of())
    assert not plan.conflicts
    assert {form.name for form in plan.forms} == {"int4 g64", "int4 g128"}
    assert "group_size 128 does not divide 2880 inputs" in plan.notes[0]
    strict = plan_recipe(odd, recipe_of(weights={"dtype": "int4", "group_size": {"size": 128, "strict": True}}))
    assert any("128 does not divide 2880 inputs; set weights.group_size to 64 or 32 or" in t for t in strict.conflicts)
    assert all("96" not in text for text in strict.conflicts)
    assert not plan_recipe(LLAMA, recipe_of()).notes
    assert not plan_recipe(LLAMA, recipe_of()).conflicts
    rows = {row.scheme.name: row.problem for row in estimate(params=None, shape_file=None, model=None).weights}
    assert rows["int4 g128"] is None


def test_fused_linears_with_different_schemes_are_a_conflict():
    mixed = recipe_of(overrides=[{"modules": ["*.up_proj"], "weights": {"dtype": "int8", "group_size": "channel"}}])
    conflicts = plan_recipe(LLAMA, mixed).conflicts
    assert len(conflicts) == 32
    assert (
        "model.layers.0: mlp.gate_proj (int4 g128), mlp.up_proj (int8 channel) are fused by inference engines"
        in conflicts[0]
    )
    alone = plan_recipe(LLAMA, recipe_of(ignore=["*.layers.3.self_attn.q_proj"])).conflicts
    assert len(alone) == 1
    assert "model.layers.3: self_attn.q_proj (ignored), self_attn.k_proj (int4 g128)" in alone[0]
    whole = recipe_of(overrides=[{"modules": ["*.mlp.*"], "weights": {"dtype": "int8", "group_size": "channel"}}])
    assert not plan_recipe(LLAMA, whole).conflicts


def test_patterns_without_a_match_and_recipes_that_do_nothing_are_conflicts():
    assert "pattern '*.fc1' matches no linear" in plan_recipe(LLAMA, recipe_of(ignore=["*.fc1"])).conflicts[0]
    assert "quantizes no linear" in plan_recipe(LLAMA, recipe_of(ignore=["*"])).conflicts[0]


def test_mixed_schemes_are_added_up_layer_by_layer():
    half = recipe_of(ignore=["re:.*layers\\.(1[6-9]|2[0-9]|3[01])\\..*"])
    plan = plan_recipe(LLAMA, half)
    assert not plan.conflicts
    mixed_size, all_of_it, none = (
        planned_weight_bytes(LLAMA, scheme).memory_bytes for scheme in (plan.scheme, W4, STORED)
    )
    assert mixed_size == (all_of_it + none) / 2


def test_formats_take_different_bytes():
    sizes = {}
    for name in ("compressed-tensors", "gptq", "awq", "dense"):
        recipe = recipe_of(format=name, weights={"dtype": "int4", "group_size": 128, "symmetric": name != "awq"})
        plan = plan_recipe(LLAMA, recipe)
        assert not plan.conflicts
        sizes[name] = planned_weight_bytes(LLAMA, plan.scheme).disk_bytes
    assert sizes["compressed-tensors"] < sizes["awq"] < sizes["gptq"] < sizes["dense"]
    assert sizes["dense"] == planned_weight_bytes(LLAMA, STORED).disk_bytes


def answers(tmp_path, recipe, device=None, model="llama-3.1-8b", **options):
    """How each engine reads what a recipe makes of a model."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODELS[model]))
    planned = estimate(shape_file=path, recipe=recipe, device=device and find_device(device), **options)
    return {reading.engine: reading.reads for reading in planned.readings}


def test_who_reads_a_recipe_on_a_device(tmp_path):
    assert answers(tmp_path, "rtn-int4", "a100")["vLLM"] == "fast"
    assert answers(tmp_path, "w4a8-fp8", "h100", engine="vllm") == {"vLLM": "fast"}
    assert answers(tmp_path, "w4a8-fp8", "4090", engine="vllm") == {"vLLM": "no"}
    assert answers(tmp_path, "mxfp4", "b200", engine="vllm") == {"vLLM": "wrong"}
    assert answers(tmp_path, "w8a8-int8", "5090", engine="vllm") == {"vLLM": "no"}
    asymmetric = ["weights.symmetric=false"]
    assert answers(tmp_path, "rtn-int8", "l40s", overrides=["weights.group_size=128", *asymmetric])["SGLang"] == "no"
    assert answers(tmp_path, "rtn-int4", "h100", overrides=["format=gguf", "weights.group_size=32"])["vLLM"] == "no"
    # Dense layers of odd sizes are padded, so those of gpt-oss (2880) do not stand in the way.
    assert answers(tmp_path, "rtn-int4", "h100", "gpt-oss-20b", overrides=["weights.group_size=32"])["vLLM"] == "slow"
    assert answers(tmp_path, "w8a8-int8", "h100", engine="vllm:5090") == {"vLLM": "no"}
    amd = answers(tmp_path, "rtn-int4", "mi300x")
    assert (amd["vLLM"], amd["SGLang"], amd["transformers"], amd["llama.cpp"]) == ("unknown", "unknown", "slow", "no")
    with pytest.raises(InputError, match="unknown engine 'trt'"):
        answers(tmp_path, "rtn-int4", engine="trt")
    with pytest.raises(RecipeError, match="--engine checks the result of a recipe; give --recipe too"):
        estimate(engine="vllm")


def test_a_shape_file_is_a_config_in_yaml(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join(f"{key}: {value}" for key, value in MODELS["llama-3.1-8b"].items()))
    shape = from_shape_file(path)
    assert (shape.num_parameters, shape.name, shape.counted_from) == (8_030_261_248, "mine", "shape file")
    path.write_text(json.dumps({**MODELS["llama-3.1-8b"], "architectures": ["X"], "rope_theta": 1.0}))
    assert from_shape_file(path).num_parameters == 8_030_261_248  # a whole config.json, and JSON is YAML


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hidden_sizes: 64", "unknown entry 'hidden_sizes' \\(did you mean 'hidden_size'\\?\\)"),
        ("hidden_size: 64", "'vocab_size' is missing"),
        ("- 1", "is not a mapping of names"),
        ("a: [", "not valid YAML"),
        (None, "cannot be read .*No such file"),
    ],
)
def test_a_bad_shape_file_says_what_is_wrong(text, message, tmp_path):
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ModelError, match=message) as caught:
        from_shape_file(path)
    assert "\n" not in str(caught.value)


def test_every_entry_that_the_published_shapes_use_may_stand_in_a_shape_file():
    for name, data in MODELS.items():
        assert set(data) - {"text_config"} <= set(KEYS), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": "7B", "shape_file": "x.yaml"}, "--shape and --params both name a model"),
        ({"params": "7B", "recipe": "rtn-int8"}, "a recipe needs the model's layers"),
        ({"kv_cache": "fp9"}, "unknown KV cache type 'fp9' \\(did you mean 'fp8'\\?\\)"),
        ({"head": "int7"}, "unknown head type 'int7'"),
        ({"model": "/nowhere/at all"}, "no such model directory or config file"),
    ],
)
def test_bad_options_are_one_line(options, message):
    with pytest.raises(InputError, match=message):
        estimate(**options)


def test_a_cache_that_no_engine_offers_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODELS["deepseek-v3"]))
    with pytest.raises(
        InputError, match=r"no engine stores this model's cache \(MLA 512\+64\) in int4; use one of bf16, fp8, int8"
    ):
        estimate(path, kv_cache="int4")
    assert [row.form.name for row in estimate(path).caches] == ["bf16", "fp8", "int8"]


def test_an_impossible_recipe_is_one_line(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODELS["gpt-oss-20b"]))
    strict = {"weights.group_size": {"size": 128, "strict": True}}
    with pytest.raises(RecipeError, match=r"recipe 'rtn-int4' cannot be used .* group_size 128 .* \(and \d+ more"):
        estimate(path, recipe="rtn-int4", overrides=strict)
    rows = {row.scheme.name: row for row in estimate(path).weights}
    assert rows["int4 g128"].problem is rows["int8 channel"].problem is None
    recipe = estimate(path, recipe="rtn-int4")
    assert recipe.weights[-1].size == rows["int4 g128"].size  # both with groups of 64 where 128 does not divide
    assert any("groups of 64 instead" in text for text in recipe.remarks)
    assert load("rtn-int4").scheme.default.weight.group_size == 128


def test_auto_is_what_the_model_computes_in():
    assert find_kv_form("auto").name == "bf16"
    assert find_kv_form("auto", "float32").name == "fp32"
    assert find_kv_form("fp8") is FP8


def test_the_head_may_be_quantized_when_it_is_loaded():
    plain, small = (planned_weight_bytes(LLAMA, everywhere(INT4_WEIGHTS, head)) for head in (None, INT4_WEIGHTS))
    assert plain.disk_bytes == small.disk_bytes
    assert (
        plain.memory_bytes - small.memory_bytes
        == plain.read_bytes_per_token - small.read_bytes_per_token
        == LLAMA.head * 2 - LLAMA.head * 4.125 / 8
    )
    tied = shape_of("qwen3-0.6b")
    plain, small = (planned_weight_bytes(tied, everywhere(None, head)) for head in (None, INT4_WEIGHTS))
    assert small.memory_bytes > plain.memory_bytes  # the embedding stays, the head becomes a copy
    assert small.read_bytes_per_token < plain.read_bytes_per_token


def test_the_document_is_plain_data_without_infinities():
    plan = estimate(device=find_device("4090"), recipe="rtn-int8", context=100, batch=3)
    text = json.dumps(to_document(plan), allow_nan=False)
    data = json.loads(text)
    assert data["computed_not_measured"] is True
    assert data["model"]["parameters"] == 3_410_176
    assert [row["scheme"] for row in data["weights"]] == ["as stored", "rtn-int8"]
    assert {row["kv_cache"] for row in data["fits"]} == {"bf16", "fp8", "int8", "int4"}
    assert data["fits"][0]["decode_floor"]["tokens_per_s"] > 0


def test_nothing_of_it_needs_torch():
    code = "import sys\nfrom quantkit.planning import estimate, find_device, to_document\n"
    code += "to_document(estimate(device=find_device('h200')))\nto_document(estimate(params='7B'))\n"
    code += "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'heavy'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_remarks_say_what_a_device_lacks_and_what_windows_assume(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODELS["gemma-3-27b"]))
    plan = estimate(path, recipe="fp8-dynamic", device=find_device("a100"))
    assert any("has no fp8 units" in text for text in plan.remarks)
    assert any("runtime keeps all tokens, which takes 507,904 B per token" in text for text in plan.remarks)
    assert any("without vision and audio towers" in text for text in plan.remarks)
    assert not estimate(recipe="fp8-dynamic", device=find_device("h100")).remarks
    assert to_document(plan)["remarks"] == list(plan.remarks)
