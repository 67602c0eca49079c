"""The plan reproduces figures that others published; each test names its source."""

from __future__ import annotations

import pytest

from quantkit.engine_rules.data_sheets import find_device, make_device
from quantkit.models.families.deepseek_v4 import published_names
from quantkit.models.kv_sizes import BF16, FP8, INT4, INT8, KVForm, Side
from quantkit.planning.limits import decode_floor, prefill_floor, step_bytes
from quantkit.planning.memory import (
    BF16_WEIGHTS,
    FP32_WEIGHTS,
    INT4_WEIGHTS,
    INT8_WEIGHTS,
    UNSCALED_WEIGHTS,
    WeightForm,
    everywhere,
    kv_allocated_bytes,
    kv_bytes,
    kv_bytes_per_token,
    kv_read_bytes,
    planned_weight_bytes,
)
from quantkit.planning.source import from_parameters
from tests.planning.shapes import shape_of

GIB = 2**30
H200 = make_device("h200", None, 4.3e12, 780e12)  # what a copy and a large product reach there, not the data sheet
LLAMA = shape_of("llama-3.1-8b")
STORED = everywhere(None)


@pytest.mark.parametrize(
    ("form", "gigabytes"),
    [(FP32_WEIGHTS, 28), (BF16_WEIGHTS, 14), (UNSCALED_WEIGHTS[0], 7), (UNSCALED_WEIGHTS[1], 3.5)],
    ids=lambda x: str(x),
)
def test_seven_billion_parameters(form, gigabytes):
    """Textbook: parameters times bytes, e.g. Hugging Face `docs/transformers/llm_tutorial_optimization`."""
    assert planned_weight_bytes(from_parameters("7B"), everywhere(form)).memory_bytes == gigabytes * 1e9


# Total and per-token parameters: the models' own papers and model cards.
PARAMETERS = {
    "llama-1-7b": (6_738_415_616, None),  # LLaMA paper: 6.7B; the exact count of its checkpoint
    "llama-1-13b": (13_015_864_320, None),
    "llama-3.1-8b": (8_030_261_248, None),  # the hub's count of meta-llama/Llama-3.1-8B
    "llama-2-70b": (68_976_648_192, None),
    "qwen3-0.6b": (596_049_920, None),  # the hub: 0.6B with shared embeddings
    "mixtral-8x7b": (46_702_792_704, 12.9e9),  # Mixtral paper: 47B, 13B active
    "qwen3-30b-a3b": (30_532_122_624, 3.3e9),  # Qwen3 model card: 30.5B, 3.3B active
    "gpt-oss-20b": (20_914_757_184, None),  # gpt-oss model card: 20.91B
    "deepseek-v2": (235_741_434_880, 21e9),  # DeepSeek-V2 paper: 236B, 21B active
    "deepseek-v3": (671_026_419_200, 37e9),  # DeepSeek-V3 paper: 671B, 37B active
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name):
    shape, (total, active) = shape_of(name), PARAMETERS[name]
    balance = 256 * 58 if name == "deepseek-v3" else 0  # the routers' bias, a buffer that some counts leave out
    assert shape.num_parameters in (total, total + balance)
    if active is not None:
        assert shape.active_parameters == pytest.approx(active, rel=0.03)


def test_parameters_of_gemma_and_deepseek_v4():
    """Gemma 3 report, table 1 (27B: 25,600M and 1,416M of embedding); DeepSeek-V4: 284B-A13B and 1.6T-A49B."""
    gemma = shape_of("gemma-3-27b")
    assert gemma.embedding == pytest.approx(1416e6, rel=0.005)
    assert gemma.num_parameters - gemma.embedding == pytest.approx(25_600e6, rel=0.005)
    flash, pro = shape_of("deepseek-v4-flash"), shape_of("deepseek-v4-pro")
    assert flash.num_parameters == pytest.approx(284e9, rel=0.005)
    assert flash.active_parameters == pytest.approx(13e9, rel=0.07)
    assert pro.num_parameters == pytest.approx(1.6e12, rel=0.02)
    assert pro.active_parameters == pytest.approx(49e9, rel=0.02)


def test_llama_13b_keeps_0_8_megabytes_per_token():
    """vLLM paper (Kwon et al. 2023, section 3): 800 KB per token for 13B; OPT's and LLaMA's have equal caches."""
    assert kv_bytes(shape_of("llama-1-13b"), 1, BF16) == 819_200 == 800 * 1024


@pytest.mark.parametrize(
    ("name", "bytes_per_token"), [("deepseek-v3", 70_272), ("qwen2.5-72b", 327_680), ("llama-3.1-405b", 516_096)]
)
def test_cache_per_token_of_mla_and_gqa(name, bytes_per_token):
    """Insights into DeepSeek-V3 (Zhao et al. 2025), table 1: 70.272, 327.680 and 516.096 KB."""
    assert kv_bytes(shape_of(name), 1, BF16) == bytes_per_token


def test_deepseek_v4_at_a_million_tokens():
    """DeepSeek-V4 report: 9.62 GiB of cache at 1M tokens; 83.9 GiB for its predecessor V3.2, 8.7 times as much."""
    pro, before = shape_of("deepseek-v4-pro"), shape_of("deepseek-v3.2")
    tokens = 1 << 20
    kinds = [layer.attention.kind for layer in pro.layers]
    assert (kinds.count("csa"), kinds.count("hca")) == (30, 31)
    by_kind = {
        kind: sum(x.attention.cached_bytes(tokens, BF16) for x in pro.layers if x.attention.kind == kind) / GIB
        for kind in ("csa", "hca")
    }
    assert by_kind == {"csa": pytest.approx(9.38, abs=0.005), "hca": pytest.approx(0.25, abs=0.005)}
    new, old = kv_bytes(pro, tokens, BF16) / GIB, kv_bytes(before, tokens, BF16) / GIB
    assert new == pytest.approx(9.62, abs=0.005)
    # With what the next entries are made of, in whole pages.
    assert kv_allocated_bytes(pro, tokens, BF16) / GIB == pytest.approx(9.62, rel=0.002)
    assert old == pytest.approx(83.9, abs=0.05)
    assert old / new == pytest.approx(8.7, abs=0.05)


# Shapes as in the shard headers of deepseek-ai/DeepSeek-V4-Pro, codes of FP4 counted one by one, scales left out.
V4_LAYER = {
    "attn_norm.weight": (7168,),
    "ffn_norm.weight": (7168,),
    **{f"hc_{part}_fn": (24, 28672) for part in ("attn", "ffn")},
    **{f"hc_{part}_base": (24,) for part in ("attn", "ffn")},
    **{f"hc_{part}_scale": (3,) for part in ("attn", "ffn")},
    "attn.attn_sink": (128,),
    "attn.kv_norm.weight": (512,),
    "attn.q_norm.weight": (1536,),
    "attn.wkv.weight": (512, 7168),
    "attn.wq_a.weight": (1536, 7168),
    "attn.wq_b.weight": (65536, 1536),
    "attn.wo_a.weight": (16384, 4096),
    "attn.wo_b.weight": (7168, 16384),
    "attn.compressor.norm.weight": (512,),
    "ffn.gate.weight": (384, 7168),
    **{f"ffn.{owner}.w{n}.weight": (3072, 7168) for owner in ("experts.0", "shared_experts") for n in (1, 3)},
    **{f"ffn.{owner}.w2.weight": (7168, 3072) for owner in ("experts.0", "shared_experts")},
}
V4_HEAVY = {
    "attn.compressor.ape": (128, 512),
    **{f"attn.compressor.{part}.weight": (512, 7168) for part in ("wgate", "wkv")},
}
V4_SPARSE = {
    "attn.compressor.ape": (4, 1024),
    **{f"attn.compressor.{part}.weight": (1024, 7168) for part in ("wgate", "wkv")},
    "attn.indexer.compressor.ape": (4, 256),
    "attn.indexer.compressor.norm.weight": (128,),
    **{f"attn.indexer.compressor.{part}.weight": (256, 7168) for part in ("wgate", "wkv")},
    "attn.indexer.weights_proj.weight": (64, 7168),
    "attn.indexer.wq_b.weight": (8192, 1536),
}
V4_HASHED, V4_LEARNED = {"ffn.gate.tid2eid": (129280, 6)}, {"ffn.gate.bias": (384,)}


@pytest.mark.parametrize(
    ("index", "own"),
    [(0, V4_HEAVY | V4_HASHED), (1, V4_HEAVY | V4_HASHED), (2, V4_SPARSE | V4_HASHED), (60, V4_SPARSE | V4_LEARNED)],
)
def test_tensors_of_deepseek_v4_are_those_of_the_published_files(index, own):
    layer = shape_of("deepseek-v4-pro").layers[index]
    counted = {f"{matrix.first}.weight": (matrix.out_features, matrix.in_features) for matrix in layer.matrices}
    published = {f"layers.{index}.{name}": size for name, size in (V4_LAYER | own).items()}
    stored = published_names([*published]).tensors
    assert counted | dict(layer.vectors) == {
        name.removeprefix(f"model.layers.{index}."): published[file] for name, file in stored.items()
    }
    assert {m.copies for m in layer.matrices} == {1, 384}


def test_what_a_token_reads_in_deepseek_v4():
    """DeepSeek-V4 at 1M tokens: 640 entries and a scan of 67 MB in csa (top 512), 8,320 entries in hca."""
    flash = shape_of("deepseek-v4-flash")
    csa = next(layer.attention for layer in flash.layers if layer.attention.kind == "csa")
    hca = next(layer.attention for layer in flash.layers if layer.attention.kind == "hca")
    window = flash.layers[0].attention
    tokens = 1 << 20
    scan = tokens // 4 * 256
    assert scan == 67_108_864
    assert csa.read_bytes(tokens, BF16) == (512 + 128) * 1024 + scan
    assert hca.read_bytes(tokens, BF16) == 8320 * 1024
    assert window.cached_bytes(tokens, BF16) == 128 * 1024


def test_latent_caches_in_8_bits():
    """FlashMLA README: 656 bytes (512 fp8, 4 float32 scales, 64 bf16); vLLM: 132 per indexer key, 584 in V4."""
    v3, v32, v4 = (shape_of(name).layers[-1].attention for name in ("deepseek-v3", "deepseek-v3.2", "deepseek-v4-pro"))
    assert v3.entry_bytes(FP8) == 576
    assert (v32.entry_bytes(FP8), v32.index_bytes(FP8)) == (656, 132)
    assert v4.entry_bytes(FP8) == 448 + 2 * 64 + 8 == 584
    assert (v4.entry_bytes(INT8), v4.entry_bytes(INT4)) == (584, 360)
    # int8 and int4 are offered by the bundled runtime alone, which does not have the second of them.
    offered = [[form.name for form in (FP8, INT8, INT4) if item.offers(form)] for item in (v3, v32, v4)]
    assert offered == [["fp8", "int8"], ["fp8"], ["fp8", "int8", "int4"]]


def test_sliding_windows_bound_the_cache():
    """Gemma 3 report, section 2: five layers of 1,024 tokens for each that sees everything."""
    gemma = shape_of("gemma-3-27b")
    kinds = [layer.attention.kind for layer in gemma.layers]
    assert (kinds.count("window"), kinds.count("full")) == (52, 10)
    layer = 16 * 128 * 2 * 2
    assert kv_bytes(gemma, 32768, BF16) == 10 * 32768 * layer + 52 * 1024 * layer
    assert kv_bytes(gemma, 1000, BF16) == 62 * 1000 * layer
    gpt = shape_of("gpt-oss-20b")
    assert [layer.attention.window for layer in gpt.layers[:4]] == [128, None, 128, None]


# With zero points that are packed like the codes: 4 + (16 + 4) / 64 and 2 + (16 + 2) / 64 bits per weight.
W4_64, W2_64 = (WeightForm(name=f"W{b}", bits=b, group_size=64, symmetric=False) for b in (4, 2))
# Llama-3.1-8B on an H200 whose copies reach 4.3 TB/s: bytes per token, floor, tokens per second (derived figures of
# the project's kernel notes).
STEPS = [
    (STORED, 15.0, 3.49, 286),
    (everywhere(INT8_WEIGHTS), 8.0, 1.87, 535),
    (everywhere(INT8_WEIGHTS, INT8_WEIGHTS), 7.5, 1.75, 573),
    (everywhere(INT4_WEIGHTS), 4.65, 1.08, 925),
    (everywhere(INT4_WEIGHTS, INT8_WEIGHTS), 4.12, 0.96, 1043),
    (everywhere(W4_64), 4.81, 1.12, 893),
    (everywhere(W2_64), 3.04, 0.707, 1414),
]


@pytest.mark.parametrize(("scheme", "gigabytes", "milliseconds", "rate"), STEPS, ids=lambda x: getattr(x, "name", x))
def test_bytes_per_token_and_floor_of_llama_8b(scheme, gigabytes, milliseconds, rate):
    floor = decode_floor(LLAMA, scheme, BF16, H200, context=0, batch=1)
    assert floor.bytes_read / 1e9 == pytest.approx(gigabytes, rel=0.006)
    assert floor.seconds * 1e3 == pytest.approx(milliseconds, rel=0.006)
    assert 1 / floor.seconds == pytest.approx(rate, rel=0.006)
    assert floor.bound_by == "memory"


def test_only_what_is_read_counts():
    """6.98 G of linears and 0.525 G of head are read per token; the embedding is gathered."""
    linears = sum(m.num_parameters for layer in LLAMA.layers for m in layer.matrices)
    assert linears == pytest.approx(6.98e9, rel=0.001)
    assert LLAMA.head == pytest.approx(0.525e9, rel=0.001)
    norms = 65 * 4096
    assert planned_weight_bytes(LLAMA, STORED).read_bytes_per_token == 2 * (linears + LLAMA.head + norms)


def both(bits, granularity="token", **scales):
    side = Side(bits=bits, granularity=granularity, **scales)
    return KVForm(name="", key=side, value=side)


@pytest.mark.parametrize(
    ("form", "bytes_per_token", "compression"),
    [
        (BF16, 131_072, 1.00),
        (FP8, 65_536, 2.00),
        (both(8, scale_bytes=2), 66_560, 1.97),
        (both(8, scale_bytes=4), 67_584, 1.94),
        (both(4, scale_bytes=2, zero_bytes=2), 34_816, 3.76),
        (both(4, group_size=32, scale_bytes=2), 36_864, 3.56),
        (both(4, group_size=64, scale_bytes=2, zero_bytes=2), 36_864, 3.56),
        (both(4, group_size=32, scale_bytes=2, zero_bytes=2), 40_960, 3.20),
        (INT8, 68_096, 1.92),  # keys per channel over pages of 64, values per token
        (INT4, 35_840, 3.66),
    ],
)
def test_cache_forms_of_llama_8b(form, bytes_per_token, compression):
    assert kv_bytes_per_token(LLAMA, form) == bytes_per_token
    assert 131_072 / bytes_per_token == pytest.approx(compression, abs=0.005)


@pytest.mark.parametrize(
    ("batch", "context", "ratios"),
    [
        (1, 2, (3.11, 3.19, 3.24)),
        (1, 32, (2.16, 2.81, 3.33)),
        (8, 8, (1.78, 2.60, 3.40)),
        (32, 8, (1.27, 2.21, 3.58)),
        (64, 32, (1.04, 1.98, 3.73)),
    ],
)
def test_where_quantized_weights_and_caches_win(batch, context, ratios):
    """Step-time ratios to 16 bits at the memory roofline: W4, W4 with int8 (fp32 scales), W4 with int4 per token."""
    forms = (BF16, both(8, scale_bytes=4), both(4, scale_bytes=2, zero_bytes=2))

    def read(scheme, form):
        return step_bytes(LLAMA, scheme, form, context=context * 1024, batch=batch)

    step_ratios = [read(STORED, BF16) / read(everywhere(INT4_WEIGHTS), form) for form in forms]
    assert step_ratios == [pytest.approx(ratio, abs=0.011) for ratio in ratios]


def test_a_thousand_tokens_of_cache_take_0_03_ms():
    assert kv_read_bytes(LLAMA, 1000, BF16) / H200.bandwidth * 1e3 == pytest.approx(0.0305, abs=0.0001)


@pytest.mark.parametrize(("prompt", "milliseconds"), [(512, 9.3), (2048, 38), (8192, 169), (32768, 947)])
def test_prefill_floor_of_llama_8b(prompt, milliseconds):
    """780 TFLOP/s, causal attention counted."""
    assert prefill_floor(LLAMA, STORED, H200, prompt=prompt).seconds * 1e3 == pytest.approx(milliseconds, rel=0.01)


def test_products_in_8_bits_halve_the_prefill_floor_where_there_are_units():
    fp8 = everywhere(WeightForm(name="fp8 channel", bits=8, compute="fp8"))
    h200, a100 = find_device("h200"), find_device("a100")

    def ratio(device):
        return (
            prefill_floor(LLAMA, STORED, device, prompt=512).seconds
            / prefill_floor(LLAMA, fp8, device, prompt=512).seconds
        )

    assert ratio(h200) == pytest.approx(1.98, abs=0.01)  # attention stays in 16 bits
    assert ratio(a100) == pytest.approx(1.0)
