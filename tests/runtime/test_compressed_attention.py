"""DeepSeek-V4: compressed entries beside a window, whatever the chunks; bytes of its cache, names, what is kept."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.api import quantize
from quantkit.errors import InputError, ModelError, RequestError, SchemeError
from quantkit.kernels.layouts import EntryLayout, kv_scheme
from quantkit.models.config import NotNative
from quantkit.models.families import family_for_counting, find
from quantkit.models.families.deepseek_v4 import published_names
from quantkit.models.kv_sizes import KV_FORMS, find_kv_form
from quantkit.models.layer_state_sizes import AttentionShape
from quantkit.numerics.activation_quant import fake_quantize_inputs
from quantkit.numerics.dtype import FP8
from quantkit.numerics.kv_cache import INT3_CHANNEL, INT3_TOKEN
from quantkit.numerics.scheme import ActivationScheme, KVScheme
from quantkit.planning import estimate
from quantkit.planning.memory import kv_allocated_bytes, kv_bytes
from quantkit.planning.source import from_model
from quantkit.runtime.cache.non_paged import EntryPool
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.loader import load_model
from quantkit.runtime.types import SamplingParams
from tests.helpers import load_tensors, save_tokenizer, transformers_logits
from tests.planning.shapes import shape_of
from tests.runtime.helpers import difference, make_loud_model, prompts, reference_logits, run

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
KINDS = {"window": [WINDOW] * 2, "csa": [SPARSE] * 2, "hca": [HEAVY] * 2, "mixed": [HEAVY, SPARSE, WINDOW, SPARSE]}
# Around where entries are complete (4 and 16 tokens), the window (8) is full, and an indexer has to pick (4 entries).
LENGTHS = (1, 3, 4, 5, 8, 9, 15, 16, 17, 19, 20, 33, 60)
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
ASKED = prompts(40, 1, 7, 60, 23)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function that gives a model of a kind; each is made once."""
    made = {}

    def get(kind):
        if kind not in made:
            types = KINDS[kind]
            changes = {"layer_types": types, "num_hidden_layers": len(types)}
            hashed = ["hash_moe"] * (len(types) // 2) + ["moe"] * (len(types) - len(types) // 2)
            folder = tmp_path_factory.mktemp(kind) / "model"
            made[kind] = make_loud_model(folder, "deepseek_v4", **changes, mlp_layer_types=hashed)
            save_tokenizer(folder)
        return made[kind]

    return get


@pytest.fixture(scope="module")
def expected(models):
    """What transformers writes."""
    llm = LLM(models("mixed"), backend="transformers", dtype="float32")
    return [completion.token_ids for completion in llm.generate(ASKED, GREEDY)]


def greedy_texts(folder, asked):
    """What transformers itself writes, each token after the whole text before it."""
    from transformers import AutoModelForCausalLM

    model, texts = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), []
    for prompt in asked:
        text = list(prompt)
        for _ in range(GREEDY.max_tokens):
            with torch.inference_mode():
                text.append(int(model(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
        texts.append(tuple(text[len(prompt) :]))
    return texts


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers_whatever_the_chunks(models, kind):
    sequences = prompts(*LENGTHS)
    expected = reference_logits(models(kind), sequences)
    model = load_model(models(kind), dtype="float32", backend="native")
    for chunk, page_size in ((None, 16), (1, 16), (7, 8), (None, 64)):
        assert difference(run(model, sequences, chunk, page_size=page_size), expected) < 1e-4


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_sequences": 2, "token_budget": 33}, {"num_pages": 9, "page_size": 16, "token_budget": 64}],
    ids=["together", "two at a time", "few pages"],
)
def test_greedy_text_is_that_of_transformers(models, expected, settings):
    llm = LLM(models("mixed"), backend="native", dtype="float32", **settings)
    # The second time rows and pages hold what others left.
    for asked, texts in ((ASKED, expected), (ASKED[::-1], expected[::-1])):
        assert [completion.token_ids for completion in llm.generate(asked, GREEDY)] == texts
    assert (llm.stats()["preemptions"] > 0) == ("num_pages" in settings)
    assert llm.stats()["prefix_hit_tokens"] == 0
    llm.engine.check_integrity()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_plan_counts_the_bytes_of_the_pool(tmp_path, dtype):
    folder = make_loud_model(tmp_path / "model", "deepseek_v4", dtype=getattr(torch, dtype))
    for name in ("auto", *(form.name for form in KV_FORMS.values() if form.key.bits == form.value.bits)):
        settings = {"max_sequences": 3, "num_pages": 3 * 2}
        llm = LLM(folder, backend="native", dtype=dtype, kv_cache=name, **settings)
        form = find_kv_form(name, dtype)
        assert llm.stats()["kv_bytes"] == 3 * kv_allocated_bytes(from_model(folder), 128, form), name


@pytest.mark.parametrize("name", ["auto", "fp8", "int8", "int4"])
def test_bytes_of_a_token_at_the_published_sizes(name):
    """What 64 more tokens take of the pool and in the plan: in 16 bits 1024 B an entry, 256 B a key of its indexer."""
    shape, scheme = shape_of("deepseek-v4-pro"), kv_scheme(name)
    pages = sum(
        EntryLayout(shape=layer.attention, page_size=64, dtype=torch.bfloat16, scheme=scheme).page_bytes
        for layer in shape.layers
    )
    form, length = find_kv_form(name), 1 << 20
    assert pages == kv_bytes(shape, length, form) - kv_bytes(shape, length - 64, form)
    if name == "auto":
        assert pages == 30 * 16 * (1024 + 256) + 31 * 512


def test_fewer_than_4_bits_are_refused(tmp_path):
    folder = make_loud_model(tmp_path / "model", "deepseek_v4")
    with pytest.raises(SchemeError, match="entries and indexer keys cannot be stored as int2 per token"):
        LLM(folder, backend="native", kv_cache="k4v2", lazy=True)
    with pytest.raises(InputError, match=r"in k4v2; use one of bf16, fp8, int8"):
        estimate(folder, kv_cache="k4v2")
    shape = shape_of("deepseek-v4-pro").layers[0].attention
    threes = KVScheme(key=INT3_CHANNEL, value=INT3_TOKEN)
    with pytest.raises(SchemeError, match="cannot be stored as int3 per channel"):
        EntryLayout(shape=shape, page_size=64, dtype=torch.bfloat16, scheme=threes)


def test_odd_widths_are_refused_in_4_bits_before_anything_is_loaded(tmp_path):
    folder = make_loud_model(tmp_path / "model", "deepseek_v4", head_dim=33, partial_rotary_factor=8 / 33)
    with pytest.raises(SchemeError, match=r"even numbers of channels, not 25 and 16; use int8"):
        LLM(folder, backend="native", kv_cache="int4", lazy=True)
    with pytest.raises(InputError, match=r"in int4; use one of bf16, fp8, int8"):
        estimate(folder, kv_cache="int4")


@pytest.mark.parametrize(("name", "most"), [("fp8", 0.2), ("int8", 0.05), ("int4", 0.5)])
def test_quantized_entries_are_close(models, name, most):
    sequences = prompts(33, 60)
    model = load_model(models("hca"), dtype="float32", backend="native")
    exact, actual = (torch.cat(run(model, sequences, 7, kv=kv)) for kv in (None, name))
    assert 0 < (actual - exact).norm() / exact.norm() < most


@pytest.mark.parametrize("name", ["auto", "fp8", "int8", "int4"])
@pytest.mark.parametrize(("ratio", "page_size"), [(4, 16), (128, 64), (128, 48), (3, 64)])
def test_a_pool_gives_back_what_it_was_given(name, ratio, page_size):
    """At the published sizes, with entries inside a page and across several; a value is off by half a step at most."""
    shape = AttentionShape(
        num_heads=64, key_dim=512, rope_dim=64, window=128, ratio=ratio, index_dim=128, index_heads=64, top_k=512
    )
    layout = EntryLayout(shape=shape, page_size=page_size, dtype=torch.bfloat16, scheme=kv_scheme(name))
    pool = EntryPool(layout, 40, 2, torch.device("cpu"))
    assert (pool.num_page_bytes, pool.num_bytes) == (40 * layout.page_bytes, 2 * layout.residual_bytes)
    count = 20 * page_size // ratio
    generator = torch.Generator().manual_seed(0)
    pages = torch.randperm(40, generator=generator)[:20]
    entries, keys = (torch.randn(count, width, generator=generator).bfloat16().float() for width in (512, 128))
    for first in range(0, count, 3):
        pool.append(pages, first, (entries[first : first + 3], keys[first : first + 3]))
    read = pool.entries(pages, count, torch.float32)
    row = torch.tensor(1)
    pool.keep_window(row, count, entries)
    kept = min(count, 127)
    assert torch.equal(pool.window(row, count, torch.float32), read[0][count - kept :])
    assert torch.equal(read[0][:, 448:], entries[:, 448:])
    steps = {"auto": 0.0, "fp8": 2**-4, "int8": 1 / 127, "int4": 1 / 7}  # of the largest value, at most twice as wide
    for actual, expected in zip(read, (entries, keys), strict=True):
        assert (actual - expected).abs().max() <= steps[name] * expected.abs().max()
    assert layout.form.bits == 16 or shape.entry_bytes(layout.form) in (584, 360)


def test_published_and_own_names_are_one_model(models, tmp_path):
    from transformers import AutoModelForCausalLM

    folder, sequences = models("mixed"), prompts(33)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(
        tmp_path / "own", save_original_format=False
    )
    names = [set(load_tensors(path)) for path in (folder, tmp_path / "own")]
    assert any(name.endswith("attn.wq_a.weight") for name in names[0])
    assert any(name.endswith("self_attn.q_a_proj.weight") for name in names[1])
    actual, expected = (
        run(load_model(f, dtype="float32", backend="native"), sequences) for f in (tmp_path / "own", folder)
    )
    assert difference(actual, expected) == 0
    assert from_model(folder).num_parameters == from_model(tmp_path / "own").num_parameters


@pytest.mark.parametrize(
    "recipe",
    ["gptq-int4", "rtn-int8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp8-block", "awq-int4"))],
)
def test_a_quantized_checkpoint_runs_as_in_transformers(models, tmp_path, recipe):
    folder, sequences = models("mixed"), prompts(33)
    tensors = load_file(folder / "model.safetensors")
    drafts = {"mtp.0.attn.wq_a.weight": torch.randn(4, 4), "mtp.0.norm.weight": torch.randn(4)}
    source = tmp_path / "source"
    source.mkdir()
    for path in folder.glob("*.json"):
        (source / path.name).write_text(path.read_text())
    save_file({**tensors, **drafts}, source / "model.safetensors", {"format": "pt"})
    overrides = {"weights.group_size": 16} if recipe.endswith("int4") else {}
    if recipe == "fp8-block":  # whose experts transformers does not load
        overrides = {"weights.group_size": "16x16", "activations.group_size": 16, "ignore": ["*.experts.[0-9]*"]}
    if recipe in ("gptq-int4", "awq-int4"):
        overrides |= {"calibration.samples": 2, "calibration.sequence_length": 32}
    quantize(source, recipe, tmp_path / "q", overrides=overrides)
    written = load_tensors(tmp_path / "q")
    assert all(torch.equal(written[name], value) for name, value in drafts.items())
    codes = {name.rpartition(".")[0] for name in written if name.endswith(("_scale", "_packed", "scale_inv"))}
    kept = ("compressor.wkv", "compressor.wgate", "weights_proj", "wo_a", "gate")
    assert codes
    assert not any(name.endswith(kept) for name in codes)
    experts = {"w1", "w2", "w3"} if recipe != "fp8-block" else {"wq_b"}
    assert {"wq_a", "wq_b", "wkv", "wo_b", *experts} <= {name.rpartition(".")[2] for name in codes}
    expected = transformers_logits(tmp_path / "q", torch.tensor(sequences))[0]
    actual = run(load_model(tmp_path / "q", dtype="float32", backend="native"), sequences, 16)
    close = 1e-4 if recipe != "fp8-block" else 0.1  # with inputs rounded to 8 bits, each at its own edges
    assert difference(actual, [expected]) < close
    asked = prompts(40, 1, 15)
    llm = LLM(tmp_path / "q", backend="native", dtype="float32")
    assert [completion.token_ids for completion in llm.generate(asked, GREEDY)] == greedy_texts(tmp_path / "q", asked)


@pytest.mark.parametrize("inputs", [16, pytest.param(None, marks=pytest.mark.slow)])
def test_experts_in_fp8_run_as_their_values_do_in_transformers(models, tmp_path, inputs):
    """It loads no codes of experts: their values stand for them, and what every product reads is rounded before it."""
    from transformers import AutoModelForCausalLM

    folder, sequences = models("mixed"), prompts(33)
    plain = {"weights.group_size": "16x16", "activations": None}
    quantize(folder, "fp8-block", tmp_path / "dense", overrides={**plain, "format": "dense"})
    if inputs is not None:
        plain = {**plain, "activations": {"dtype": "fp8", "group_size": inputs}}
    quantize(folder, "fp8-block", tmp_path / "q", overrides=plain)
    codes = {name for name, value in load_tensors(tmp_path / "q").items() if value.dtype == torch.float8_e4m3fn}
    assert sum(".experts." in name for name in codes) == 4 * 4 * 3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32, attn_implementation="eager")
    scheme = None if inputs is None else ActivationScheme(dtype=FP8, group_size=inputs)
    quantized = {own.removesuffix(".weight") for own in published_names([*codes]).tensors}

    def rounded(states):
        return states if scheme is None else fake_quantize_inputs(states, scheme)

    for name, module in model.named_modules():
        if name in quantized or name.endswith("mlp.experts"):
            module.register_forward_pre_hook(lambda _, given: (rounded(given[0]), *given[1:]))
        if name.endswith("mlp.experts"):
            module._apply_gate = lambda states, gate=module._apply_gate: rounded(gate(states))
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor(sequences)).logits[0]
    actual = run(load_model(tmp_path / "q", dtype="float32", backend="native"), sequences, 16)
    assert difference(actual, [expected]) < (1e-4 if inputs is None else 0.1)  # rounded each at its own edges


def test_a_published_config_says_the_same(tmp_path):
    """The published names of keys, with YaRN around one base of wavelengths and without it around the other."""
    types, yarn = [HEAVY, SPARSE, WINDOW], {"factor": 8.0, "original_max_position_embeddings": 64}
    rates = {SPARSE: 4, HEAVY: 128}
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, **yarn}
    folder, sequences = tmp_path / "model", prompts(150)
    make_loud_model(folder, "deepseek_v4", layer_types=types, compress_rates=rates, rope_parameters=rope)
    expected = reference_logits(folder, sequences)
    assert difference(run(load_model(folder, dtype="float32", backend="native"), sequences, 33), expected) < 1e-4
    config = json.loads((folder / "config.json").read_text())
    for key in ("layer_types", "compress_rates", "mlp_layer_types", "rope_parameters", "partial_rotary_factor"):
        del config[key]
    config |= {"compress_ratios": [128, 4, 0], "num_hash_layers": 1, "rope_scaling": {"type": "yarn", **yarn}}
    (folder / "config.json").write_text(json.dumps(config))
    assert difference(run(load_model(folder, dtype="float32", backend="native"), sequences, 33), expected) < 1e-4


def test_codes_as_published_are_left_to_transformers(models, tmp_path):
    tensors = load_tensors(models("csa"))
    name = next(name for name in tensors if name.endswith("wq_a.weight"))
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), name.replace(".weight", ".scale"): torch.ones(1, 1)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((models("csa") / "config.json").read_text())
    section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    with pytest.raises(NotNative, match="fp8, with scales under unusual names"):
        load_model(tmp_path, dtype="float32", backend="native")


def test_drafts_and_eviction_are_refused(models):
    with pytest.raises(RequestError, match=r"the model keeps a recurrent state, .* leave speculate out"):
        LLM(models("csa"), lazy=True, speculate="ngram")
    with pytest.raises(RequestError, match=r"kv_budget does not work .* entries that each stand for several tokens"):
        LLM(models("csa"), lazy=True, kv_budget=128)


def test_its_successor_is_refused_by_name(models, tmp_path):
    config = json.loads((models("csa") / "config.json").read_text())
    config |= {"model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"]}
    for ask in (find, family_for_counting):
        with pytest.raises(ModelError, match=r"deepseek_v41' is not supported: unlike DeepSeek-V4"):
            ask(config)
