"""GGUF files read as models: each family computes what its original computes; damaged files are refused in one line."""

from __future__ import annotations

import json
import shutil
import time
import tracemalloc

import gguf
import pytest
import torch

from quantkit.api import quantize
from quantkit.checkpoints.dense_source import open_dense
from quantkit.checkpoints.folder import metadata_files, text_folder
from quantkit.checkpoints.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_files
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.checkpoints.tokenizer import load_tokenizer
from quantkit.compress.convert import convert
from quantkit.compress.convert.source import open_source
from quantkit.errors import CheckpointError, InputError, ModelError, SchemeError
from quantkit.formats.ggml.blocks import Block
from quantkit.planning.source import from_model
from quantkit.runtime.llm import LLM
from tests.compress.convert.test_gguf_files import BUILT, build
from tests.gguf_files import write_as_llama_cpp_does
from tests.helpers import load_tensors, make_model, transformers_logits

IDS = [0, *range(40, 72)]
FOREIGN = ["llama", "granite", "qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3"]
# llama.cpp's file of a Mixtral has no window, and that of a Qwen3-MoE always means normalized scores.
SETTINGS = {"mixtral": {"sliding_window": None}, "qwen3_moe": {"norm_topk_prob": True}}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("llama") / "m", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def file(llama, tmp_path_factory):
    return write_as_llama_cpp_does(llama, tmp_path_factory.mktemp("file") / "m.gguf", Block.Q8_0)


def distance(path, folder):
    """Largest difference of the log probabilities of next tokens between a GGUF file and its original."""
    expected = torch.log_softmax(transformers_logits(folder, torch.tensor([IDS]))[0], -1)
    actual = torch.log_softmax(LLM(path, dtype="float32").score([IDS])[0].float(), -1)
    return float((actual - expected).abs().max())


@pytest.mark.parametrize("family", FOREIGN)
def test_files_of_llama_cpp_compute_what_the_original_computes(family, tmp_path):
    folder = make_model(tmp_path / "m", family, **SETTINGS.get(family, {}))
    path = write_as_llama_cpp_does(folder, tmp_path / "m.gguf")
    dense, original = open_dense(path), load_tensors(folder)
    for name, tensor in original.items():
        if name in dense:
            torch.testing.assert_close(dense.tensor(name), tensor, rtol=0, atol=1e-6)
    assert set(original) <= set(dense.names) or family == "gpt_oss"  # which has its experts one by one here
    assert distance(path, folder) < 1e-5
    assert distance(write_as_llama_cpp_does(folder, tmp_path / "8.gguf", Block.Q8_0), folder) < 0.3


@pytest.mark.parametrize("family", BUILT)
def test_files_of_ours_come_back(family, tmp_path):
    build(tmp_path / "m", family)
    convert(tmp_path / "m", "gguf", tmp_path / "m.gguf")
    dense, original = open_dense(tmp_path / "m.gguf"), load_tensors(tmp_path / "m")
    assert set(dense.names) == set(original)
    for name, tensor in original.items():
        torch.testing.assert_close(dense.tensor(name), tensor, rtol=0, atol=1e-6)
    if family == "gpt2":
        with pytest.raises(ModelError, match="quantkit does not run GGUF files through transformers"):
            LLM(tmp_path / "m.gguf")
    else:
        assert distance(tmp_path / "m.gguf", tmp_path / "m") < 2e-5


@pytest.mark.parametrize("family", FOREIGN)
def test_llama_cpp_takes_these_files_too(family, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    settings = SETTINGS.get(family, {})
    if family == "deepseek_v2":  # of groups of experts llama.cpp takes those that are best by V3's rule
        settings = {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
    folder = make_model(tmp_path / "m", family, **settings)
    path = write_as_llama_cpp_does(folder, tmp_path / "m.gguf")
    loaded = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, logits_all=True, verbose=False)
    loaded.eval(IDS)
    expected = transformers_logits(folder, torch.tensor([IDS]))[0]
    assert (torch.tensor(loaded.scores[: len(IDS)]) - expected).abs().max() < 0.02 * expected.std()


def test_rows_come_in_the_order_of_the_model(file, llama):
    reader, original = open_dense(file), load_tensors(llama)
    name = "model.layers.0.self_attn.q_proj.weight"
    whole = reader.tensor(name)
    assert (whole - original[name]).abs().max() < 0.02 * original[name].abs().max()
    rows = torch.tensor([[17, 3], [3, 60]])
    assert torch.equal(reader.gather_rows(name, rows), whole[rows])
    assert torch.equal(reader.rows(name, 5, 9), whole[5:9])
    assert b"".join(map(bytes, reader.chunks(name))) == whole.view(torch.uint8).numpy().tobytes()
    embedding = reader.tensor("model.embed_tokens.weight")
    assert torch.equal(reader.gather_rows("model.embed_tokens.weight", torch.tensor([7, 7])), embedding[[7, 7]])


def test_a_tied_head_is_multiplied_as_codes(file):
    llm = LLM(file, dtype="float32")
    assert "int8 g32" in llm.model.head.description
    assert llm.notes == ()


def test_types_without_codes_are_decoded_and_that_is_said(tmp_path):
    folder = make_model(tmp_path / "m", hidden_size=256, intermediate_size=256, head_dim=16)
    path = tmp_path / "m.gguf"
    write_as_llama_cpp_does(folder, path, Block.TQ2_0)
    assert "linears of GGUF types TQ2_0 are decoded to float32" in LLM(path).notes


def test_a_split_file_is_one_model(file, tmp_path):
    parts = split(file, tmp_path, 3)
    whole, reader = CheckpointReader(file), CheckpointReader(parts[0])
    assert reader.names == whole.names
    assert reader.files == tuple(parts)
    name = "model.layers.1.mlp.down_proj.weight_q8_0"
    assert torch.equal(reader.tensor(name), whole.tensor(name))
    with pytest.raises(CheckpointError, match="give the first part"):
        CheckpointReader(parts[1])
    parts[1].rename(tmp_path / "x")
    parts[2].rename(parts[1])
    (tmp_path / "x").rename(parts[2])
    with pytest.raises(CheckpointError, match="is not part 2 of"):
        CheckpointReader(parts[0])
    parts[2].unlink()
    parts[1].unlink()
    with pytest.raises(CheckpointError, match="00002-of-00003"):
        CheckpointReader(parts[0])


def split(path, folder, count):
    """Divide a file as llama-gguf-split does."""
    reader, parts = gguf.GGUFReader(path), []
    for number in range(count):
        parts.append(folder / f"m-{number + 1:05d}-of-{count:05d}.gguf")
        writer = gguf.GGUFWriter(parts[-1], "llama")
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                kind = field.types[0]
                sub = field.types[1] if kind == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), kind, sub)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts


# Configuration


def test_the_divisors_of_llama_3_become_its_scaling(tmp_path):
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    folder = make_model(
        tmp_path / "m", rope_parameters=rope, hidden_size=128, head_dim=64, max_position_embeddings=16384
    )
    convert(folder, "gguf", tmp_path / "m.gguf")
    config = CheckpointReader(tmp_path / "m.gguf").config
    assert config["rope_scaling"] == {key: value for key, value in rope.items() if key != "rope_theta"}
    assert distance(tmp_path / "m.gguf", folder) < 1e-5


def test_what_the_files_are_for_transformers(file, llama):
    config = json.loads((text_folder(file) / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert "quantization_config" not in config
    assert [path.name for path in metadata_files(file)] == ["tokenizer.json", "tokenizer_config.json"]
    ours, theirs = load_tokenizer(file), load_tokenizer(llama)
    text = "Grüße, 123 \t🦊  x\n"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.decode(ours(text)["input_ids"], skip_special_tokens=True) == text
    assert (ours.bos_token, ours.eos_token) == ("<s>", "</s>")


# Tokenizers


def sentencepiece(**changes):
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "b", "ab", "▁ab", "<x>"]
    entries = {"model": "llama", "tokens": tokens, "token_type": [2, 3, 3, 6, 1, 1, 1, 1, 1, 4]}
    entries |= {"scores": [0.0] * 4 + [-9.0, -8.0, -7.0, -2.0, -1.0, 0.0], "bos_token_id": 1, "eos_token_id": 2}
    return {f"tokenizer.ggml.{key}": value for key, value in {**entries, **changes}.items() if value is not None}


def encoded(entries, text):
    from tokenizers import Tokenizer

    data = tokenizer_files(entries, "m.gguf", 10)["tokenizer.json"]
    tokenizer = Tokenizer.from_str(json.dumps(data))
    ids = tokenizer.encode(text).ids
    return ids, tokenizer.decode(ids)


def test_scores_become_merges():
    assert encoded(sentencepiece(), "ab ab") == ([1, 8, 8], "ab ab")
    assert encoded(sentencepiece(add_space_prefix=False, add_bos_token=False), "ab ab\n<x>b") == (
        [7, 8, 3, 9, 6],
        "ab ab\n<x>b",
    )
    assert encoded(sentencepiece(add_eos_token=True), "b")[0] == [1, 4, 6, 2]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_is_one(name):
    tokens = ["<s>", "1", "2", "a", "Ġ", "Ġa", "é", "!", "12", "aa"]
    entries = {"model": "gpt2", "pre": name, "tokens": tokens, "merges": ["Ġ a", "1 2", "a a"], "bos_token_id": 0}
    entries = {f"tokenizer.ggml.{key}": value for key, value in entries.items()}
    ids, text = encoded(entries, "12 a!")
    assert text.removeprefix("<s>") == "12 a!"
    assert ids[-2:] == [5, 7]


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"model": "bert"}, ModelError, "tokenizer 'bert' is not supported"),
        ({"model": "gpt2"}, ModelError, "pre-tokenizer None is not supported"),
        ({"tokens": ["a"]}, CheckpointError, "has 1 tokens, but the embedding has 10 rows"),
        ({"tokens": None}, CheckpointError, "not a list of texts"),
        ({"tokens": [1] * 10}, CheckpointError, "not a list of texts"),
        ({"token_type": [1]}, CheckpointError, "has 1 entries, but there are 10 tokens"),
        ({"scores": None}, CheckpointError, "must have an entry for each"),
        ({"bos_token_id": 10}, CheckpointError, "bos_token_id is 10, but the tokenizer has 10 tokens"),
        ({"eos_token_id": "x"}, CheckpointError, "eos_token_id is 'x'"),
    ],
)
def test_damaged_tokenizers_are_refused(changes, kind, message):
    with pytest.raises(kind, match=message) as error:
        tokenizer_files(sentencepiece(**changes), "m.gguf", 10)
    assert "\n" not in str(error.value)


def test_a_file_without_a_tokenizer_has_none():
    assert tokenizer_files({}, "m.gguf", 10) == {}


# Damaged files


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture"),
        ({"llama.block_count": None}, "llama.block_count is None, not a whole number"),
        ({"llama.block_count": 3}, "9 tensors are missing, for example the one for model.layers.2"),
        ({"llama.block_count": 1}, "blk.1.* does not belong to a model with this metadata"),
        ({"llama.block_count": 1 << 31}, "num_hidden_layers is 2147483648"),
        ({"llama.embedding_length": 32}, "but the metadata requires"),
        ({"llama.attention.head_count": 0}, "head_count is 0, not a whole number above zero"),
        ({"llama.attention.head_count": 3}, "num_attention_heads 3 is not a multiple"),
        ({"llama.attention.head_count_kv": [2, 1]}, "differs between layers"),
        ({"llama.expert_count": 4, "llama.expert_used_count": 2}, "does not belong to a model|are missing"),
        ({"llama.attention.key_length": 32}, "but the metadata requires"),
        ({"llama.rope.scaling.type": "su"}, "RoPE scaling 'su' is not supported"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "has 2 tokens, but the embedding has 260 rows"),
        ({"tokenizer.ggml.eos_token_id": 1000}, "eos_token_id is 1000"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, "rms_norm_eps is 'x'"),
    ],
)
def test_metadata_that_fits_no_model_is_refused(llama, tmp_path, changes, message):
    changes = {key.replace("llama.", "", 0): value for key, value in changes.items()}
    path = write_as_llama_cpp_does(llama, tmp_path / "m.gguf", **changes)
    with pytest.raises(InputError, match=message) as error:
        LLM(path)
    assert "\n" not in str(error.value)


def test_tensors_beyond_the_file_and_unknown_ones_are_refused(file, tmp_path):
    data = file.read_bytes()
    for name, damaged, message in (
        ("cut", data[:-100], "truncated"),
        ("short", data[:3000], "are left|more than fit"),
        (
            "name",
            data.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"),
            "does not belong to a model of this architecture",
        ),
        ("layer", data.replace(b"blk.1.attn_q.weight", b"blk.7.attn_q.weight"), "does not belong to a model"),
        ("twice", data.replace(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight"), "two tensors have the name"),
        ("empty", b"", "are left"),
    ):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=message) as error:
            CheckpointReader(path)
        assert "\n" not in str(error.value)


def test_mutations_end_in_one_line_soon_and_in_little_memory(file, tmp_path):
    """Every byte of counts, types and offsets at the beginning, and some of all others, set to extreme values."""
    data, generator = file.read_bytes(), torch.manual_seed(0)
    end = data.index(b"output_norm.weight") + 4000
    places = [*range(24), *torch.randint(24, end, (150,), generator=generator).tolist()]
    tracemalloc.start()
    begun = time.monotonic()
    for number, at in enumerate(places):
        damaged = bytearray(data)
        damaged[at] = (255, 0, 128, 1)[number % 4]
        path = tmp_path / "m.gguf"
        path.write_bytes(damaged)
        try:
            reader = open_dense(path)
            for name in reader.names[:3]:
                reader.tensor(name)
        except InputError as error:
            assert "\n" not in str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.monotonic() - begun < 120
    assert peak < 64 << 20


def test_values_that_are_no_numbers_are_refused(file, tmp_path):
    reader = open_dense(file)
    info = reader.info("model.layers.0.self_attn.v_proj.weight")
    shutil.copy(file, tmp_path / "m.gguf")
    with (tmp_path / "m.gguf").open("r+b") as damaged:
        damaged.seek(info.offset)
        damaged.write(b"\x00\x7e")
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_v\.weight holds NaN"):
        open_dense(tmp_path / "m.gguf").tensor("model.layers.0.self_attn.v_proj.weight")
    with pytest.raises(CheckpointError, match="Q8_0 blocks is not finite"):
        LLM(tmp_path / "m.gguf")


# Used as a source


def test_values_are_written_exactly_and_codes_where_a_format_holds_them(llama, tmp_path):
    path = write_as_llama_cpp_does(llama, tmp_path / "1.gguf", Block.Q4_1)
    convert(path, "dense", tmp_path / "dense")
    expected, written = open_dense(path), load_tensors(tmp_path / "dense")
    assert set(written) == set(expected.names)
    assert all(torch.equal(written[name], expected.tensor(name)) for name in written)
    assert load_tokenizer(tmp_path / "dense")("a b")["input_ids"] == load_tokenizer(path)("a b")["input_ids"]
    with pytest.raises(SchemeError, match="only GGUF can store minimums"):
        convert(path, "compressed-tensors", tmp_path / "ct")
    with pytest.raises(SchemeError, match="is a GGUF file already"):
        convert(path, "gguf", tmp_path / "again.gguf")
    symmetric = write_as_llama_cpp_does(llama, tmp_path / "0.gguf", Block.Q4_0)
    convert(symmetric, "compressed-tensors", tmp_path / "ct")
    name = "model.layers.1.self_attn.k_proj"
    written, stored = (open_source(source).weight(name).dequantize() for source in (tmp_path / "ct", symmetric))
    assert torch.equal(written, stored)


def test_a_file_is_quantized_again_as_its_values_are(llama, tmp_path):
    path = write_as_llama_cpp_does(llama, tmp_path / "m.gguf", Block.Q5_1)
    convert(path, "dense", tmp_path / "dense")
    for source, output in ((path, "a"), (tmp_path / "dense", "b")):
        quantize(source, "rtn-int4", tmp_path / output, overrides={"weights.group_size": 32})
    first, second = load_tensors(tmp_path / "a"), load_tensors(tmp_path / "b")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_plan_counts_the_file(file):
    shape = from_model(file)
    assert shape.quantized
    assert shape.stored_bytes == CheckpointReader(file).num_bytes
