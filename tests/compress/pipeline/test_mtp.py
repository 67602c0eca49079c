"""MTP heads in quantized checkpoints: copied by default, and every loader is told so, for each of their modules.

vLLM asks for linears that it fuses, and for the container of experts, under names that no file has. Its rules are
restated here from `compressed_tensors/utils.py`, `utils/quant_utils.py` and `utils/gptq_utils.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.utils.match import is_match

import quantkit
from quantkit.compress.convert import convert
from tests.helpers import load_tensors
from tests.mtp_models import HEADS, make_mtp_model

FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
}
QUANTIZED = {  # per output format: recipe and changes
    "compressed-tensors": ("rtn-int8", ()),
    "gptq": ("rtn-int8", ("format=gptq",)),
    "awq": ("rtn-int4", ("format=awq", "weights.group_size=32", "weights.symmetric=false")),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_mtp_model(tmp_path_factory.mktemp(kind) / "model", kind)
        return made[kind]

    return get


def head_names(folder: Path) -> list[str]:
    """Names of the tensors of the head."""
    names = sorted(load_tensors(folder))
    return [name for name in names if name.startswith(("mtp.", "model.layers.2."))]


def asked(names: Iterable[str]) -> set[str]:
    """Names under which loaders ask for linears: as in the files, fused, and of the container of experts."""
    modules = {name.removesuffix(".weight") for name in names if not re.search(r"norm|bias", name)}
    fused = {
        f"{module.rpartition('.')[0]}.{one}"
        for module in modules
        for one, parts in FUSED.items()
        if module.rpartition(".")[2] in parts and ".experts." not in module
    }
    containers = {module.partition(".experts.")[0] + ".experts" for module in modules if ".experts." in module}
    experts = {f"{name}.{number}.{part}_proj" for name in containers for number in range(4) for part in ("up", "down")}
    return modules | fused | containers | experts


def vllm_compressed_tensors(name: str, section: dict[str, Any], fused: dict[str, list[str]]) -> bool:
    """Whether vLLM takes a module for quantized in format compressed-tensors."""

    def ignores(module: str) -> bool:
        entries = section["ignore"]
        return any(re.match(e[3:], module) if e.startswith("re:") else e == module for e in entries)

    owner, _, leaf = name.rpartition(".")
    if leaf == "experts":  # it asks for the first expert
        return not all(ignores(f"{name}.0.{part}") for part in ("gate_proj", "up_proj", "down_proj"))
    if leaf in fused and name not in section["ignore"]:
        return not all(ignores(f"{owner}.{part}") for part in fused[leaf])
    return not ignores(name)


def vllm_awq(name: str, section: dict[str, Any], fused: dict[str, list[str]]) -> bool:
    """Whether vLLM takes a module for quantized in format AWQ."""
    owner, _, leaf = name.rpartition(".")
    shards = [f"{owner}.{part}" for part in fused[leaf]] if leaf in fused else [name]
    return not all(any(entry in shard for entry in section["modules_to_not_convert"]) for shard in shards)


def vllm_gptq(name: str, section: dict[str, Any], fused: dict[str, list[str]]) -> bool:
    """Whether vLLM takes a module for quantized in format GPTQ; it matches a fused linear's own name."""
    rules = [key[2:] for key in section["dynamic"] if key.startswith("-:")]
    return not any(re.match(rule, name) for rule in rules)


VLLM = {"compressed-tensors": vllm_compressed_tensors, "awq": vllm_awq, "gptq": vllm_gptq}


def section_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def targeted(names: Iterable[str], section: dict[str, Any]) -> set[str]:
    """Those of these modules that compressed-tensors takes for quantized, were they linears."""
    targets = [target for group in section["config_groups"].values() for target in group["targets"]]
    return {name for name in names if is_match(name, torch.nn.Linear(1, 1), targets, section["ignore"])}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("format_", QUANTIZED)
def test_heads_are_copied_and_no_loader_takes_them_for_quantized(models, kind, format_, tmp_path):
    source, out = models(kind), tmp_path / "out"
    recipe, changes = QUANTIZED[format_]
    quantkit.quantize(source, recipe, out, overrides=changes)
    names, section, before, after = head_names(source), section_of(out), load_tensors(source), load_tensors(out)
    assert len(names) > 8
    for name in names:
        assert torch.equal(before[name].view(torch.int16), after[name].view(torch.int16)), name
    body = "model.layers.1.self_attn.o_proj"
    for fused in (FUSED, {}):  # the classes of some heads do not say which linears are fused
        taken = {name for name in asked(names) if VLLM[format_](name, section, fused)}
        assert not taken
        assert VLLM[format_](body, section, fused)
    if format_ == "compressed-tensors":
        assert targeted([*asked(names), "lm_head", body], section) == {body}


def test_convert_tells_loaders_too(models, tmp_path):
    source = models("deepseek_v3")
    quantkit.quantize(source, "rtn-int8", tmp_path / "out")
    convert(tmp_path / "out", "gptq", tmp_path / "gptq")
    convert(tmp_path / "gptq", "compressed-tensors", tmp_path / "back")
    names, before = head_names(source), load_tensors(source)
    for format_, folder in (("gptq", "gptq"), ("compressed-tensors", "back")):
        section, after = section_of(tmp_path / folder), load_tensors(tmp_path / folder)
        assert all(torch.equal(before[name].view(torch.int16), after[name].view(torch.int16)) for name in names)
        assert not [name for name in asked(names) if VLLM[format_](name, section, FUSED)]
    ignored = section["ignore"]
    assert len(ignored) == len(set(ignored))
    assert targeted([*asked(names), "model.layers.1.self_attn.o_proj"], section) == {"model.layers.1.self_attn.o_proj"}


def test_stacked_experts_are_named_under_all_their_names(models, tmp_path):
    quantkit.quantize(models("qwen3_5_moe_text"), "rtn-int8", tmp_path / "out")
    ignored = section_of(tmp_path / "out")["ignore"]
    experts = "mtp.layers.0.mlp.experts"
    assert {experts, f"{experts}.gate_up_proj", f"{experts}.3.up_proj", "mtp.fc"} <= set(ignored)
    assert not {"model.embed_tokens", "mtp.norm"} & set(ignored)
