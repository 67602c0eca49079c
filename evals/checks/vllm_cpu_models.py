"""What vllm_cpu.py serves: tiny models of several families, their checkpoints by every recipe, and planted breaches."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from make_random_llama import write_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.engine_rules import StoredModel, judge
from quantkit.planning import estimate
from quantkit.results import EngineReading

_SIZES = {
    "vocab_size": 384,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
MODELS: dict[str, dict[str, Any]] = {
    "demo": {},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {
        "sliding_window": 32,
        "query_pre_attn_scalar": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "norm_topk_prob": True},
}
EXPORTS = {"gptq-int4": ("gptq", "gptq-v2"), "awq-int4": ("awq", "gptq-v2"), "rtn-int4": ("awq",)}
SAMPLES = {"calibration.samples": 16, "calibration.sequence_length": 64}
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def write_source(name: str, folder: Path) -> Path:
    """A model of the list: the demo model as it is, others with random weights large enough to matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from quantkit.demo import DEMO_MODEL

    if name == "demo":
        return DEMO_MODEL
    if not (folder / "config.json").exists():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**_SIZES, **MODELS[name]}))
        _fill(model)
        model.to(torch.bfloat16).save_pretrained(folder)
        write_tokenizer(folder)
    return folder


def write_config(name: str, file: Path) -> Path | None:
    """A model's config.json alone, for those who plan; None for the demo model."""
    if name == "demo":
        return None
    title = "".join(part.capitalize() for part in name.removesuffix("_text").split("_"))
    config = {"model_type": name, "architectures": [f"{title}ForCausalLM"], **_SIZES, **MODELS[name]}
    file.write_text(json.dumps(config))
    return file


def _fill(model: Any) -> None:
    """Weights whose logits tell tokens apart: a deviation of about 3."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            else:
                loud = 3.0 if "lm_head" in name or "gate.weight" in name else 1.0
                parameter.copy_(loud * noise / parameter.shape[-1] ** 0.5)


def make_checkpoint(source: Path, recipe: str, folder: Path) -> str:
    """Quantize; why it was refused, or "". A checkpoint that is there is kept."""
    from quantkit import api

    steps = {"steps": [{"autoround": {"iterations": 100}}]} if recipe == "autoround-int4" else {}
    changes = SAMPLES if api.load_recipe(recipe).calibration else {}
    overrides = {**changes, **steps}
    return _refusal(folder, lambda: api.quantize(source, recipe, folder, overrides=overrides, device="cpu"))


def convert_to(checkpoint: Path, name: str, folder: Path) -> str:
    """The same codes in another format; why it was refused, or ""."""
    from quantkit.compress.convert import convert

    return _refusal(folder, lambda: convert(str(checkpoint), name, str(folder)))


def _refusal(folder: Path, make: Callable[[], object]) -> str:
    from quantkit.errors import QuantkitError

    try:
        if not (folder / "config.json").exists():
            make()
    except QuantkitError as error:
        return " ".join(str(error).split())
    return ""


def checkpoints(source: Path, recipe: str, folder: Path) -> Iterator[tuple[str, Path, str]]:
    """What a recipe makes and its exports: name of the case, folder, and why it was refused, or ""."""
    why = make_checkpoint(source, recipe, folder)
    yield recipe, folder, why
    for export in EXPORTS.get(recipe, ()) if not why else ():
        copy = folder.with_name(f"{folder.name}-as-{export}")
        yield f"{recipe} as {export}", copy, convert_to(folder, export, copy)


def digest(checkpoint: Path, texts: Path) -> str:
    """Of all that an answer of vLLM rests on."""
    files = [*sorted(checkpoint.glob("*.safetensors")), checkpoint / "config.json", texts]
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()[:10]


def foretold(config: Path | None, case: str, engine: str = "vllm:cpu") -> EngineReading:
    """What the rules say of a case before anything is made.

    Args:
        config: the model's config.json; None = the demo model.
        case: a recipe, `RECIPE as FORMAT`, or "" of the model itself.
        engine: who is asked.
    """
    return judge(engine, _stored(config, case))


@functools.cache
def _stored(config: Path | None, case: str) -> StoredModel:
    recipe, _, export = case.partition(" as ")
    if not recipe or export == "dense":
        return StoredModel(format="dense")
    planned = estimate(shape_file=config, recipe=recipe).recipe
    assert planned is not None
    return replace(planned.stored, format=export or planned.format)


def file_faults(checkpoint: Path) -> list[str]:
    """What engines suppose of NVFP4 files and do not check: no negative scales, one global scale per fused set."""
    tensors = {
        name: tensor for file in sorted(checkpoint.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }
    faults = []
    ends = ("weight_global_scale", "input_global_scale")
    for name, scale in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight_scale" and f"{module}.weight_global_scale" in tensors and bool((scale.float() < 0).any()):
            faults.append(f"{name} has negative scales")
        parent, _, member = module.rpartition(".")
        for fused in FUSED if leaf in ends else ():
            first = tensors.get(f"{parent}.{fused[0]}.{leaf}")
            if member in fused[1:] and first is not None and not torch.equal(first, scale):
                faults.append(
                    f"{name} is {scale.item():.6g}, but that of {fused[0]}, which is fused with it, {first.item():.6g}"
                )
    return faults


def break_copy(checkpoint: Path, folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a checkpoint with something changed in its tensors."""
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(checkpoint, folder)
    files = {file: load_file(file) for file in sorted(folder.glob("*.safetensors"))}
    tensors = {name: tensor for held in files.values() for name, tensor in held.items()}
    change(tensors)
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, file, {"format": "pt"})
    return folder


def _only(tensors: dict[str, Tensor], *parts: str) -> str:
    return next(name for name in sorted(tensors) if all(part in name for part in parts))


def double_scales(tensors: dict[str, Tensor]) -> None:
    """One linear's scales, twice as large."""
    tensors[_only(tensors, "down_proj", "weight_scale")] *= 2


def unshare_scales(tensors: dict[str, Tensor]) -> None:
    """One of q, k and v under another global scale."""
    tensors[_only(tensors, "k_proj", "weight_global_scale")] *= 2


def shift_zero_points(tensors: dict[str, Tensor]) -> None:
    """Zero points of all linears one higher, but those of 15: of one linear alone that is less than noise."""
    shifts = torch.arange(8) * 4
    for name in tensors:
        if name.endswith("weight_zero_point"):
            nibbles = tensors[name].unsqueeze(-1) >> shifts & 15
            codes = ((nibbles + 1).clamp(max=15).to(torch.int64) << shifts).sum(-1)
            tensors[name] = _as_int32(codes)


def _as_int32(codes: Tensor) -> Tensor:
    """The same 32 bits, signed."""
    return torch.where(codes >= 1 << 31, codes - (1 << 32), codes).to(torch.int32)


def shrink_kv_scales(tensors: dict[str, Tensor]) -> None:
    """Scales of all keys and values, 50 times smaller."""
    for name in tensors:
        if name.endswith((".k_scale", ".v_scale")):
            tensors[name] = tensors[name] * 0.02


def swap_nibbles(tensors: dict[str, Tensor]) -> None:
    """Codes of one AWQ linear in the order of GPTQ: neighbours exchanged."""
    name = _only(tensors, "down_proj", "qweight")
    codes = tensors[name]
    tensors[name] = ((codes & 0x0F0F0F0F) << 4) | ((codes >> 4) & 0x0F0F0F0F)


BREACHES: dict[str, tuple[str, Callable[[dict[str, Tensor]], None]]] = {
    "scales of one linear x 2": ("gptq-int4", double_scales),
    "q/k/v under different global scales": ("nvfp4", unshare_scales),
    "zero points off by one": ("awq-int4", shift_zero_points),
    "KV scales x 0.02": ("kv-fp8", shrink_kv_scales),
    "neighbouring codes exchanged": ("awq-int4 as awq", swap_nibbles),
}
"""What is planted in which checkpoint of the demo model."""
