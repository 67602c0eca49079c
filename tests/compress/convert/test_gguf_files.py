"""GGUF files of whole models: tensors, entries, tokenizers; with llama.cpp's own reading where it is installed."""

from __future__ import annotations

import json
import re

import pytest
import torch

from quantkit.api import quantize
from quantkit.compress.convert import convert
from quantkit.compress.convert.gguf_contents import interleave, read_vocab
from quantkit.compress.convert.source import open_source
from quantkit.errors import ModelError, SchemeError
from quantkit.formats.ggml.blocks import dequantize_blocks
from quantkit.formats.ggml.gguf_file import read_gguf
from quantkit.inspection import inspect
from quantkit.models.families import supported
from tests.helpers import edit_config, load_tensors, make_model, save_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "m", dtype=torch.bfloat16)


def values(path, name):
    file = read_gguf(path)
    info = file.tensors[name]
    return dequantize_blocks(
        info.block, torch.frombuffer(bytearray().join(file.chunks(name)), dtype=torch.uint8), info.shape
    )


def test_interleaving_puts_the_halves_of_a_head_side_by_side():
    rows = torch.arange(8).view(8, 1)
    assert interleave(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert interleave(rows, 0) is rows


@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_of_a_whole_model(model, tmp_path, symmetric):
    overrides = {"weights.group_size": 32, "weights.symmetric": symmetric, "format": "gptq-v2"}
    quantize(model, "rtn-int4", tmp_path / "q", overrides=overrides)
    result = convert(tmp_path / "q", "gguf", tmp_path / "q.gguf")
    assert result.num_linears == 14
    source, file = open_source(tmp_path / "q"), read_gguf(tmp_path / "q.gguf")
    for ours, theirs, heads in [("self_attn.q_proj", "attn_q", 4), ("mlp.down_proj", "ffn_down", 0)]:
        weight, info = source.weight(f"model.layers.1.{ours}"), file.tensors[f"blk.1.{theirs}.weight"]
        data = torch.frombuffer(bytearray().join(file.chunks(f"blk.1.{theirs}.weight")), dtype=torch.uint8)
        assert torch.equal(dequantize_blocks(info.block, data, info.shape), interleave(weight.dequantize(), heads))
    embedding = load_tensors(tmp_path / "q")["model.embed_tokens.weight"]
    assert torch.equal(values(tmp_path / "q.gguf", "token_embd.weight"), embedding)
    assert inspect(tmp_path / "q.gguf").format == "gguf"


def test_quantize_writes_the_file(model, tmp_path):
    result = quantize(model, "rtn-int8", tmp_path / "a.gguf", overrides={"format": "gguf"})
    assert result.output == str(tmp_path / "a.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]
    assert read_gguf(tmp_path / "a.gguf").tensors["blk.0.ffn_up.weight"].block.name == "Q8_0"
    assert result.output_bytes == (tmp_path / "a.gguf").stat().st_size


def test_a_note_says_which_matrices_get_a_different_type_than_asked(model, tmp_path):
    notes = convert(model, "gguf", tmp_path / "k.gguf", type_name="q4_k").notes  # widths of 64 and 96
    assert notes == (
        "Rows of 64, 96 values are not whole blocks of q4_k (256 values each), so some of the 16 matrices get a "
        "different type: Q8_0 (1, such as output.weight), Q5_0 (15, such as token_embd.weight)",
    )
    assert convert(model, "gguf", tmp_path / "8.gguf", type_name="q8_0").notes == ()


@pytest.mark.parametrize("type_name", ["f32", "bf16", "q8_0", "q4_0", "q4_k"])
def test_an_ordinary_model_rounded_to_a_type(model, tmp_path, type_name):
    convert(model, "gguf", tmp_path / "a.gguf", type_name=type_name)
    expected = load_tensors(model)["model.layers.0.mlp.down_proj.weight"].float()
    actual = values(tmp_path / "a.gguf", "blk.0.ffn_down.weight").float()
    error = float((actual - expected).norm() / expected.norm())
    assert error < {"f32": 1e-9, "bf16": 1e-9, "q8_0": 0.01, "q4_0": 0.15, "q4_k": 0.08}[type_name]


def test_metadata(model, tmp_path):
    convert(model, "gguf", tmp_path / "a.gguf")
    entries = read_gguf(tmp_path / "a.gguf").metadata
    expected = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.embedding_length": 64,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }
    assert {key: entries.get(key) for key in expected} == expected
    assert entries["tokenizer.ggml.tokens"][-2:] == ["[PAD258]", "[PAD259]"]
    assert entries["tokenizer.ggml.token_type"][:3] == [3, 3, 1]
    assert entries["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)


SMALL = {"intermediate_size": 96, "num_key_value_heads": 2}
BUILT = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32}),
    "gemma": ("GemmaForCausalLM", {"head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", {"head_dim": 16, "query_pre_attn_scalar": 16}),
    "gemma3_text": ("Gemma3ForCausalLM", {"head_dim": 16, "query_pre_attn_scalar": 16}),
    "phi3": ("Phi3ForCausalLM", {"pad_token_id": 1}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}),
}


def build(folder, family):
    """A random float32 model of the family."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name, changes = BUILT[family]
    settings = {"vocab_size": 260, "bos_token_id": 0, "eos_token_id": 1, **changes}
    if family != "gpt2":
        settings |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **SMALL}
        settings |= {"max_position_embeddings": 256}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    assert type(model).__name__ == name
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model.eval()


def test_every_family_is_built():
    llamas = {"InternLM3ForCausalLM", "IQuestCoderForCausalLM"}  # written by others; transformers makes them Llamas
    expected = {name for name, family in supported().items() if family.gguf and family.gguf.is_written}
    assert {name for name, _ in BUILT.values()} == expected - llamas


@pytest.mark.parametrize("family", BUILT)
def test_llama_cpp_computes_the_same(family, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    reference = build(tmp_path / "m", family)
    convert(tmp_path / "m", "gguf", tmp_path / "m.gguf")
    ids = [0, *range(40, 72)]
    loaded = llama_cpp.Llama(str(tmp_path / "m.gguf"), n_ctx=64, n_threads=1, logits_all=True, verbose=False)
    loaded.eval(ids)
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([ids])).logits[0]
    actual = torch.tensor(loaded.scores[: len(ids)])
    # llama.cpp keeps keys and values in float16 and takes activations through tables of float16.
    assert (actual - expected).abs().max() < 0.02 * expected.std()


@pytest.mark.parametrize("family", [family for family in BUILT if family != "gpt2"])
def test_every_tensor_of_a_family_has_a_place(family, tmp_path):
    build(tmp_path / "m", family)
    convert(tmp_path / "m", "gguf", tmp_path / "m.gguf")
    file, tensors = read_gguf(tmp_path / "m.gguf"), load_tensors(tmp_path / "m")
    assert len(file.tensors) == len(tensors)
    total = sum(tensor.double().sum() for name, tensor in tensors.items() if "norm" not in name)
    actual = sum(values(tmp_path / "m.gguf", name).double().sum() for name in file.tensors if "norm" not in name)
    assert actual == pytest.approx(float(total), abs=1e-3)


def test_text_becomes_the_same_tokens_in_llama_cpp(tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    from transformers import AutoTokenizer

    from quantkit.demo import DEMO_MODEL, DEMO_TEXT

    convert(DEMO_MODEL, "gguf", tmp_path / "m.gguf")
    loaded = llama_cpp.Llama(str(tmp_path / "m.gguf"), vocab_only=True, verbose=False)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    text = DEMO_TEXT.read_text()[:3000]
    assert loaded.tokenize(text.encode()) == tokenizer(text)["input_ids"]


# Vocabularies


def byte_fallback(folder):
    """A tokenizer.json as converted from SentencePiece."""
    vocab = {"<unk>": 0, "<s>": 1, "<0x0A>": 2, "▁": 3, "a": 4, "b": 5, "ab": 6, "▁ab": 7}
    data = {
        "added_tokens": [{"id": 0, "content": "<unk>", "special": True}, {"id": 1, "content": "<s>", "special": True}],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}]},
        "model": {"type": "BPE", "byte_fallback": True, "vocab": vocab, "merges": ["a b", ["▁", "ab"]]},
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}]},
    }
    folder.joinpath("tokenizer.json").write_text(json.dumps(data))
    folder.joinpath("tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": "{{x}}"}))


def test_byte_fallback_becomes_scores(tmp_path):
    byte_fallback(tmp_path)
    actual = read_vocab(tmp_path, {"eos_token_id": [5, 6], "pad_token_id": -1}, 9)
    assert "tokenizer.ggml.padding_token_id" not in actual
    assert actual["tokenizer.ggml.model"] == "llama"
    assert actual["tokenizer.ggml.token_type"] == [2, 3, 6, 1, 1, 1, 1, 1, 5]
    scores = actual["tokenizer.ggml.scores"]
    assert scores[6] > scores[7] > max(scores[2:6])
    assert actual["tokenizer.ggml.add_space_prefix"] is True
    assert actual["tokenizer.ggml.add_bos_token"] is True
    assert actual["tokenizer.ggml.eos_token_id"] == 5
    assert actual["tokenizer.chat_template"] == "{{x}}"


def change_tokenizer(folder, **changes):
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("model", [{"merges": ["a b", 1]}, {"merges": [["a", 1]]}, {}])
def test_what_is_no_text_is_no_token(tmp_path, model):
    byte_fallback(tmp_path)
    built = json.loads((tmp_path / "tokenizer.json").read_text())
    change_tokenizer(
        tmp_path, model={**built["model"], **model}, added_tokens=[{"id": 1, "content": "a" if model else 1}]
    )
    with pytest.raises(ModelError, match="is not a valid tokenizer"):
        read_vocab(tmp_path, {}, 9)


def test_what_cannot_be_said_is_refused_before_anything_is_written(model, tmp_path):
    import shutil

    shutil.copytree(model, tmp_path / "m")
    out = tmp_path / "out.gguf"
    change_tokenizer(tmp_path / "m", pre_tokenizer={"type": "Whitespace"})
    with pytest.raises(ModelError, match=r"which is not supported in GGUF"):
        convert(tmp_path / "m", "gguf", out)
    with pytest.raises(ModelError, match=r"which is not supported in GGUF"):
        quantize(tmp_path / "m", "rtn-int8", out, overrides={"format": "gguf"})
    change_tokenizer(tmp_path / "m", model={"type": "Unigram"})
    with pytest.raises(ModelError, match="Unigram"):
        convert(tmp_path / "m", "gguf", out)
    edit_config(tmp_path / "m", architectures=["MambaForCausalLM"])
    with pytest.raises(ModelError, match=r"GGUF export of .* is not supported"):
        convert(tmp_path / "m", "gguf", out)
    with pytest.raises(SchemeError, match="GGUF type 'q9' is not supported"):
        convert(model, "gguf", out, type_name="q9")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("value", [[["a"]], "wide", True, {}, 1e999])
def test_a_number_of_another_type_is_refused(tmp_path, value):
    path = make_model(tmp_path / "m")
    edit_config(path, rms_norm_eps=value, model_type="unknown")  # transformers' own checks need a known one
    with pytest.raises(ModelError, match=r"'?rms_norm_eps'?.* is "):
        convert(path, "gguf", tmp_path / "a.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("heads", [8, 1 << 31])
def test_heads_that_the_rows_do_not_bear_out_are_refused(tmp_path, heads):
    path = make_model(tmp_path / "m", head_dim=16)
    edit_config(path, num_attention_heads=heads, model_type="unknown")
    with pytest.raises(ModelError, match=f"q_proj.weight has 64 rows, but config.json says {heads} heads of width 16"):
        convert(path, "gguf", tmp_path / "a.gguf")


def test_unfit_codes_are_refused_with_what_holds_them(model, tmp_path):
    quantize(model, "rtn-int4", tmp_path / "q", overrides={"weights.group_size": 16})
    with pytest.raises(SchemeError, match=r"scale per 32 inputs.*formats that can store it: awq, gptq"):
        convert(tmp_path / "q", "gguf", tmp_path / "out.gguf")
    with pytest.raises(SchemeError, match="its codes are copied unchanged"):
        convert(tmp_path / "q", "gguf", tmp_path / "out.gguf", type_name="q4_k")


def test_what_a_file_leaves_out_and_what_grows_is_said(tmp_path):
    folder, notes = make_model(tmp_path / "half", dtype=torch.float16), {}
    for name, recipe, changes in (
        ("sym", "rtn-int4", []),
        ("asym", "rtn-int4", ["weights.symmetric=false"]),
        ("cache", "rtn-int8", ["kv_cache={dtype: int8, granularity: token, outliers: 'off'}"]),
    ):
        quantize(folder, recipe, tmp_path / name, overrides=["weights.group_size=32", *changes])
        notes[name] = convert(tmp_path / name, "gguf", tmp_path / f"{name}.gguf").notes
    assert notes["sym"] == ()
    growth = r"The quantized linears grow by \d+ %. They are stored as Q5_0 \(5.5 bits per weight\)"
    assert re.match(growth, notes["asym"][0])
    assert notes["cache"][0].startswith("A GGUF file cannot store the KV cache settings of the checkpoint")
