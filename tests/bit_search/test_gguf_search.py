"""A search for a GGUF file of the demo model: its size, its entries, and that its recipe makes the same file again."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
import yaml
from click.testing import CliRunner

import quantkit
from quantkit.bit_search.candidates import gguf_candidates, read_candidates
from quantkit.bit_search.gguf_parts import embedding_type
from quantkit.bit_search.setup import start_recipe
from quantkit.cli import main
from quantkit.compress.recipe import load
from quantkit.compress.recipe.load import build
from quantkit.demo import DEMO_MODEL, DEMO_TEXT
from quantkit.errors import GateFailure, InputError, ModelError
from quantkit.formats.ggml.gguf_file import copy_with_entries, read_gguf
from quantkit.formats.gguf import MATRIX_BLOCKS
from quantkit.results import SearchResult
from quantkit.upload import hub_card

SIZE = 1_900_000
BLOCKS = {"q3_k": "Q3_K", "q6_k": "Q6_K"}
FEW = {"calibration.samples": 4, "calibration.sequence_length": 64}
GIVEN = {"candidates": tuple(BLOCKS), "max_tokens": 200, "rounds": 1, "device": "cpu"}
ENGINE = {"dtype": "float32", "threads": 1}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("work") / "trials"


@pytest.fixture(scope="module")
def search(work):
    def run(output, size=SIZE, **changes):
        given = {**GIVEN, "engine": ENGINE, "work": work, **changes}
        return quantkit.search(None, None, output, format="gguf", num_bytes=size, overrides=FEW, **given)

    return run


@pytest.fixture(scope="module")
def searched(search, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    return search(folder / "mine.yaml", checkpoint=folder / "mine.gguf"), folder


def test_the_file_has_at_most_the_size_and_uses_it(searched):
    result, folder = searched
    assert result.reached
    assert result.output_bytes == (folder / "mine.gguf").stat().st_size
    assert 0.96 * SIZE < result.output_bytes <= SIZE


def test_every_tensor_has_the_type_that_was_chosen(searched):
    result, folder = searched
    of_embedding, *linears = result.groups
    assert [group.group for group in linears[:7]] == ["q", "k", "v", "o", "gate", "up", "down"]
    assert {group.choice for group in result.groups} == set(BLOCKS)
    names = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
    names |= {name: f"ffn_{name}" for name in ("gate", "up", "down")}
    tensors = read_gguf(folder / "mine.gguf").tensors
    assert of_embedding.group == "embedding"
    assert tensors["token_embd.weight"].block.name == BLOCKS[of_embedding.choice]
    stored = {
        (group.layer, group.group): tensors[f"blk.{group.layer}.{names[group.group]}.weight"] for group in linears
    }
    assert {key: tensor.block.name for key, tensor in stored.items()} == {
        (group.layer, group.group): BLOCKS[group.choice] for group in linears
    }


def test_the_recipe_makes_the_same_file_again(searched, tmp_path):
    _, folder = searched
    quantkit.quantize(None, folder / "mine.yaml", tmp_path / "again.gguf", device="cpu")
    assert (tmp_path / "again.gguf").read_bytes() == (folder / "mine.gguf").read_bytes()


def test_the_file_says_how_it_was_made_and_what_it_is_worth(searched):
    result, folder = searched
    entries = read_gguf(folder / "mine.gguf").metadata
    recipe = load(folder / "mine.yaml")
    assert build(yaml.safe_load(entries["quantkit.recipe"]), "entry").source == recipe.source
    assert entries["quantkit.calibration.sha256"] == hashlib.sha256(DEMO_TEXT.read_bytes()).hexdigest()
    assert entries["quantkit.measured.kl"] == pytest.approx(result.measured_kl, rel=1e-3)
    assert entries["quantkit.measured.text"] == "demo"
    assert recipe.measured["text_sha256"] == entries["quantkit.measured.text_sha256"]


def test_inspect_and_the_card_show_the_entries(searched):
    _, folder = searched
    summary = quantkit.inspect(folder / "mine.gguf")
    assert summary.recipe == "mine"
    shown = CliRunner().invoke(main, ["inspect", str(folder / "mine.gguf")]).output
    assert "quantkit.measured.kl" in shown
    card = hub_card(folder / "mine.gguf", "someone/mine", {})
    assert f"```yaml\n{summary.made_by['quantkit.recipe'].strip()}\n```" in card
    assert summary.made_by["quantkit.calibration.sha256"] in card


def test_a_recipe_names_no_folders_of_its_author(text_file, tmp_path):
    recipe = load("gguf-q4_k", {"calibration.data": str(text_file), **FEW})
    quantkit.quantize(None, recipe, tmp_path / "made.gguf", device="cpu")
    entries = read_gguf(tmp_path / "made.gguf").metadata
    assert yaml.safe_load(entries["quantkit.recipe"])["calibration"]["data"] == text_file.name
    assert entries["quantkit.calibration.sha256"] == hashlib.sha256(text_file.read_bytes()).hexdigest()
    assert "quantkit.measured.kl" not in entries


def test_a_second_size_measures_nothing_twice_and_the_largest_is_noted(searched, search, tmp_path):
    first, _ = searched
    lines = []
    largest = search(tmp_path / "large.yaml", size=1 << 30, progress=lines.append)
    assert not any("group 1 of" in line for line in lines)
    assert {group.choice for group in largest.groups} == {"q6_k"}
    assert largest.measured_kl < first.measured_kl
    assert largest.notes[0].startswith("--size allows 1.0 GiB, but the largest choice takes 2.7 MiB")


def test_the_same_search_again_makes_the_same_choice(searched, search, tmp_path):
    first, _ = searched
    again = search(tmp_path / "again.yaml")
    assert again.measured_kl == first.measured_kl
    assert again.groups == first.groups


@pytest.mark.parametrize(("size", "reason"), [(1000, "linears alone; raise --size"), (1_400_000, "never compressed")])
def test_a_size_below_the_smallest_file_is_refused(searched, search, tmp_path, size, reason):
    with pytest.raises(GateFailure, match=f"bytes<={size} cannot be reached: the smallest .*{reason}"):
        search(tmp_path / "small.yaml", size=size)
    assert not (tmp_path / "small.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["--format", "ggug", "--size", "1MiB"], 4, "unknown format 'ggug' (did you mean 'gguf'?)"),
        (["--format", "gguf", "--size", "1zb"], 4, "size '1zb' is not an amount"),
        (["--format", "gguf", "--size", "1GB", "--bits", "4"], 2, "one of --bits, --size, --kl and --recovery"),
        (["--format", "gguf", "--size", "1GB", "--recipe", "gguf-q3_k"], 4, "has overrides"),
        (["--format", "gguf", "--size", "1GB", "--recipe", "rtn-int4"], 4, "'rtn-int4' has no calibration"),
        (["--format", "gguf", "--size", "1GB", "--candidates", "q7_k"], 4, "unknown number type 'q7_k'"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments, code, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["search", "--quiet", *arguments])
    assert done.exit_code == code
    assert reason in done.output
    assert "Traceback" not in done.output


def test_a_model_that_gguf_cannot_hold_is_refused_before_it_is_compressed(tmp_path):
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({**config, "architectures": ["OlmoForCausalLM"]}))
    with pytest.raises(ModelError, match=r"GGUF export of .*Olmo.* is not supported"):
        quantkit.search(tmp_path / "model", None, tmp_path / "x.yaml", format="gguf", num_bytes=SIZE)


def test_the_default_start_is_a_gguf_recipe_without_what_the_search_sets():
    recipe = start_recipe(None, "gguf", ["calibration.samples=8"])
    assert (recipe.format, recipe.source["overrides"], recipe.gates) == ("gguf", [], ())
    assert recipe.calibration.samples == 8
    assert start_recipe(None).name == "gptq-int4"
    assert start_recipe("gptq-int4", "dense").format == "dense"
    with pytest.raises(InputError, match="unknown format"):
        start_recipe(None, "ggml")


def test_every_candidate_has_a_type_for_the_embedding():
    names = ("int3", "int5", "int6", "int8", "mxfp4", "q5_1")
    assert all(embedding_type(candidate) in MATRIX_BLOCKS for candidate in read_candidates(names, 32))
    assert [embedding_type(candidate) for candidate in gguf_candidates()][-2:] == ["q6_k", "q8_0"]


def test_a_copy_of_a_file_differs_only_in_its_entries(searched, tmp_path):
    _, folder = searched
    copy_with_entries(folder / "mine.gguf", tmp_path / "same.gguf", {})
    assert (tmp_path / "same.gguf").read_bytes() == (folder / "mine.gguf").read_bytes()
    copy_with_entries(folder / "mine.gguf", tmp_path / "other.gguf", {"quantkit.measured.kl": 0.5})
    before, after = (read_gguf(path) for path in (folder / "mine.gguf", tmp_path / "other.gguf"))
    assert after.metadata == {**before.metadata, "quantkit.measured.kl": 0.5}
    assert [b"".join(after.chunks(name)) for name in after.tensors] == [
        b"".join(before.chunks(name)) for name in before.tensors
    ]


def test_a_result_is_json(searched):
    result, _ = searched
    assert SearchResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result
