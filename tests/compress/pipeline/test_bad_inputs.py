"""Bad inputs end in one clear line and the right exit code, through the command line, and leave nothing behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.cli import main
from quantkit.errors import CheckpointError
from tests.helpers import edit_config, edit_tensors, load_tensors, make_model

RECIPE = """
name: mine
description: For tests.
weights: {dtype: int4, group_size: 32}
format: compressed-tensors
"""


def invoke(*arguments: str | Path) -> tuple[int, str]:
    """Exit code and stderr."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return result.exit_code, result.stderr


def drop_shard(model: Path) -> None:
    next(model.glob("model-00002*.safetensors")).unlink()


def truncate(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def cut_header(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:40])


def escape_index(model: Path) -> None:
    path = model / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    path.write_text(json.dumps(index))


def only_pickle(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def nan_weights(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def integer_weights(model: Path) -> None:
    edit_tensors(model, model__layers__0__mlp__up_proj__weight=torch.zeros(96, 64, dtype=torch.int8))


def no_layers(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if ".layers." not in name}
    save_file(kept, model / "model.safetensors", {"format": "pt"})


def missing_norm(model: Path) -> None:
    edit_tensors(model, model__layers__1__input_layernorm__weight=None)


def wrong_shape(model: Path) -> None:
    edit_config(model, intermediate_size=128)


def broken_config(model: Path) -> None:
    (model / "config.json").write_text('{"architectures": [')


def other_family(model: Path) -> None:
    edit_config(model, architectures=["NoSuchForCausalLM"], model_type="no_such")


def other_config(model: Path) -> None:
    edit_config(model, quantization_config={"quant_method": "gptq", "bits": 4})


def no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def endless_tokenizer(model: Path) -> None:
    """Not read by a recipe without calibration, but carried into the output."""
    os.truncate(model / "tokenizer_config.json", 1 << 40)


def small_vocabulary(model: Path) -> None:
    """The tokenizer has 258 ids, the model 100."""
    tensors = load_file(model / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:100].clone()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    edit_config(model, vocab_size=100)


MODELS: list[tuple[str, Callable[[Path], None], str]] = [
    ("missing shard", drop_shard, r"model-00002-of-\d+\.safetensors"),
    ("truncated safetensors", truncate, r"model\.safetensors.*(truncated|bytes)"),
    ("truncated header", cut_header, r"model\.safetensors.*header"),
    ("index points outside its folder", escape_index, r"\.\./elsewhere\.safetensors"),
    ("pickle checkpoint", only_pickle, r"pickle"),
    ("NaN weights", nan_weights, r"model\.layers\.1\.mlp\.up_proj\.weight holds 1 NaN"),
    ("weights that are not floats", integer_weights, r"up_proj\.weight is torch\.int8"),
    ("a model without decoder layers", no_layers, r"no decoder layers"),
    ("missing tensor", missing_norm, r"model\.layers\.1\.input_layernorm\.weight .*is missing"),
    ("shape against config", wrong_shape, r"has shape \(96, 64\), but config\.json says \(128, 64\)"),
    ("config that is not JSON", broken_config, r"config\.json"),
    ("unknown architecture", other_family, r"no_such"),
    ("a config of codes and weights without", other_config, r"says gptq, but no weight has tensors of that format"),
    ("no tokenizer", no_tokenizer, r"cannot load the tokenizer"),
    ("tokenizer of a terabyte", endless_tokenizer, r"tokenizer_config\.json has 1\.0 TiB, too much for a tokenizer"),
    ("tokenizer of another vocabulary", small_vocabulary, r"outside the model's vocabulary of 100"),
]


@pytest.mark.parametrize(("what", "spoil", "message"), MODELS, ids=[entry[0] for entry in MODELS])
def test_bad_models(tmp_path, text_file, what, spoil, message):
    model = make_model(tmp_path / "model", shards=3 if spoil in (drop_shard, escape_index) else 1)
    spoil(model)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        RECIPE.replace("format:", "steps: [gptq]\ncalibration: {samples: 4, sequence_length: 32}\nformat:")
    )
    code, error = invoke("quantize", model, "--recipe", recipe, "--calibration", text_file, "-o", tmp_path / "out")
    check(code, error, message, tmp_path)


RECIPES: list[tuple[str, str, str]] = [
    (
        "group size that does not divide",
        RECIPE.replace("32", "{size: 48, strict: true}"),
        "group_size 48 does not divide 64 inputs.*32",
    ),
    ("unknown step", RECIPE + "steps: [gtpq]\n", r"'gtpq'.*did you mean 'gptq'"),
    ("misspelt key", RECIPE.replace("format:", "formt:"), r"formt.*did you mean 'format'"),
    ("misspelt option", RECIPE + "steps:\n  - gptq: {dampning: 0.1}\n", r"dampning.*did you mean 'damping'"),
    ("wrong type of option", RECIPE + "steps:\n  - gptq: {damping: much}\n", r"steps.*damping"),
    (
        "option out of range",
        RECIPE + "steps:\n  - smoothquant: {alpha: 2}\n",
        r"alpha: .* from 0 to 1, found 2",
    ),
    ("unknown number type", RECIPE.replace("int4", "int7"), r"int7"),
    ("unknown format", RECIPE.replace("compressed-tensors", "compresed-tensors"), r"compressed-tensors"),
    ("not YAML", "name: [", r"mine\.yaml"),
    ("empty recipe", "", r"mine\.yaml.*empty"),
    ("calibration without steps", RECIPE + "calibration: {samples: 4}\n", r"no effect without steps"),
    ("pattern that matches nothing", RECIPE + 'ignore: ["*.w1"]\n', r"'\*\.w1' matches no linear"),
    ("half of a fused set", RECIPE + 'ignore: ["*.k_proj"]\n', r"are fused by inference engines and need one scheme"),
    ("everything ignored", RECIPE + 'ignore: ["*"]\n', r"quantizes no linear"),
    (
        "zero points beside others",
        RECIPE.replace("32}", "32, symmetric: false}")
        + 'overrides: [{modules: "*.down_proj", weights: {dtype: int8}}]\n',
        r"set weights\.symmetric=true",
    ),
    ("groups in activation order", RECIPE + "steps:\n  - gptq: {act_order: group}\n", r"act_order=weight"),
    ("sequences too short", RECIPE + "steps: [gptq]\ncalibration: {sequence_length: 1}\n", r"sequence_length"),
    ("a format that cannot hold it", RECIPE.replace("int4", "int5") + "activations: {dtype: int8}\n", r"int5"),
]


@pytest.mark.parametrize(("what", "text", "message"), RECIPES, ids=[entry[0] for entry in RECIPES])
def test_bad_recipes(tiny_llama, tmp_path, what, text, message):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(text)
    code, error = invoke("quantize", tiny_llama, "--recipe", recipe, "-o", tmp_path / "out")
    check(code, error, message, tmp_path)


def test_other_bad_arguments(tiny_llama, tmp_path):
    quantize = ("quantize", "-o", tmp_path / "out", "--recipe")
    gptq = (*quantize, "gptq-int4", "--set", "weights.group_size=32", tiny_llama, "--calibration")
    (tmp_path / "empty.txt").write_text("")
    cases = [
        ((*quantize, "awq-int5"), 4, r"awq-int5.*did you mean 'awq-int4'"),
        ((*quantize, "rtn-int4", tmp_path / "nowhere"), 4, r"nowhere"),
        ((*quantize, "rtn-int4", "--set", "weights.group_sise=32"), 4, r"did you mean 'weights.group_size'"),
        ((*gptq, tmp_path / "empty.txt"), 4, r"empty\.txt is empty"),
        ((*gptq, tmp_path / "nothing.jsonl"), 4, r"nothing\.jsonl does not exist"),
        ((*quantize, "rtn-int4", tiny_llama, "--device", "cuda:99"), 4, r"'cuda:99' does not exist"),
        ((*quantize, "rtn-int4", tiny_llama, "--device", "tpu"), 4, r"device 'tpu'"),
        ((*quantize, "rtn-int4", tiny_llama, "--device", "meta"), 4, r"device 'meta'"),
        (("quantize", "-o", tmp_path / "out"), 2, r"--recipe"),
        ((*quantize, "rtn-int4", "--sampels", "3"), 2, r"--samples"),
        (("quantise",), 2, r"quantize"),
    ]
    for arguments, expected, message in cases:
        code, error = invoke(*arguments)
        check(code, error, message, tmp_path, expected)


def check(code: int, error: str, message: str, folder: Path, expected: int = 4) -> None:
    """One line, the right code, and neither a half checkpoint nor a traceback."""
    import re

    assert code == expected, error
    assert re.search(message, error), error
    assert "Traceback" not in error
    if expected == 4:
        last = [line for line in error.splitlines() if line.startswith("error:")]
        assert len(last) == 1, error
    assert not (folder / "out").exists()


def test_an_output_that_exists(tiny_llama, tmp_path):
    (tmp_path / "out").mkdir()
    code, error = invoke("quantize", tiny_llama, "--recipe", "rtn-int8", "-o", tmp_path / "out")
    assert code == 4
    assert "exists already" in error


def test_errors_are_json_when_asked_for(tiny_llama, tmp_path):
    (tmp_path / "out").mkdir()
    result = CliRunner().invoke(
        main, ["quantize", str(tiny_llama), "--recipe", "rtn-int8", "-o", str(tmp_path / "out"), "--json"]
    )
    answer = json.loads(result.stdout)
    assert answer["exit_code"] == result.exit_code == 4
    assert "exists already" in answer["error"]


def test_a_full_disk_can_be_resumed_from(tiny_llama, tmp_path, text_file, monkeypatch):
    """Writes fail with ENOSPC after the first layer: exit code 5, one line; the same command then finishes."""
    from quantkit.output import writer

    command = (
        "quantize",
        tiny_llama,
        "--recipe",
        "gptq-int4",
        "-o",
        tmp_path / "out",
        "--set",
        "weights.group_size=32",
    )
    command += ("--calibration", text_file, "--samples", "4", "--sequence-length", "32")
    original, progress = writer.os.fsync, tmp_path / "out.partial" / "progress.json"

    def full(descriptor):
        if progress.exists() and json.loads(progress.read_text())["records"]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(descriptor)

    monkeypatch.setattr(writer.os, "fsync", full)
    code, error = invoke(*command)
    assert code == 5, error
    assert "no space left" in error
    assert "same command again to resume" in error
    monkeypatch.setattr(writer.os, "fsync", original)
    assert list((tmp_path / "out.partial" / "checkpoint").glob(".*.tmp")) == []
    assert invoke(*command)[0] == 0
    assert json.loads((tmp_path / "out" / "quantkit-run.json").read_text())["resumed_layers"] == 1


def can_mount() -> bool:
    """Whether this process may mount a small file system, as root in its own namespace."""
    probe = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    return os.geteuid() == 0 and probe.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux") or not can_mount(), reason="needs the right to mount a tmpfs")
def test_a_really_full_disk(tiny_llama, tmp_path):
    """A tmpfs of 128 KiB, too small for the checkpoint; then the same command after it was enlarged."""
    (tmp_path / "disk").mkdir()
    quantize = f"{sys.executable} -m quantkit quantize {tiny_llama} --recipe rtn-int8 -o {tmp_path}/disk/out --quiet"
    script = f"""
        mount -t tmpfs -o size=128k none {tmp_path}/disk || exit 99
        {quantize}; echo "first $?"
        mount -o remount,size=8m {tmp_path}/disk
        {quantize}; echo "second $?"
        ls {tmp_path}/disk
    """
    done = subprocess.run(["unshare", "-m", "bash", "-c", script], capture_output=True, text=True, timeout=240)
    assert "first 5" in done.stdout, done.stdout + done.stderr
    assert "second 0" in done.stdout, done.stdout + done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("error:")]) == 1
    assert "no space left" in done.stderr
    assert done.stdout.splitlines()[-1] == "out"


@pytest.mark.slow
def test_a_folder_without_write_permission(tiny_llama, tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    command = [sys.executable, "-m", "quantkit", "quantize", str(tiny_llama), "--recipe", "rtn-int8"]
    command += ["-o", str(folder / "out"), "--quiet"]
    if os.geteuid() == 0:  # permissions do not bind root: give the right to ignore them away
        command = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all", "--ambient-caps", "-all", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 4, done.stderr
    assert [line for line in done.stderr.splitlines() if line] == [done.stderr.strip()]
    assert "cannot write" in done.stderr
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("model.layers.1.mlp.gate_proj.weight", r"model\.layers\.1: the input of mlp\.down_proj is not finite"),
        ("model.embed_tokens.weight", "hidden states after the embedding are not finite"),
    ],
)
def test_broken_weights_are_found_before_a_step_works_on_them(tiny_llama, tmp_path, text_file, tensor, message):
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    weight = load_tensors(model)[tensor]
    weight[:, :4] = float("nan") if "embed" in tensor else 3e38  # NaN in a layer is refused as it is read
    edit_tensors(model, **{tensor.replace(".", "__"): weight})
    changes = {"calibration.data": str(text_file), "calibration.samples": 4, "calibration.sequence_length": 32}
    with pytest.raises(CheckpointError, match=message):
        quantkit.quantize(model, "gptq-int8", tmp_path / "out", overrides=changes)
