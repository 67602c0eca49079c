"""Checkpoints that are quantized already, and their dense twins, both made by the library that defines the format.

Each maker is given the tensors of a dense model and changes the weights of its linears to codes; the twin has what the
same library makes of those codes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.helpers import edit_config, load_tensors

Tensors = dict[str, Tensor]
Maker = Callable[[str, Tensor], tuple[Tensors, Tensor]]
"""From a name and a dense weight to what is stored in its place, and the values that this stands for."""


def is_linear(name: str) -> bool:
    return ("proj" in name and name.endswith(".weight")) or (".experts." in name and not name.endswith("bias"))


def write_pair(dense: Path, source: Path, maker: Maker, section: dict[str, Any]) -> tuple[Path, Path]:
    """The quantized checkpoint and its twin, beside each other."""
    codes, values = Tensors(), Tensors()
    for name, tensor in load_tensors(dense).items():
        codes[name] = values[name] = tensor
        if is_linear(name) and tensor.dim() > 1:
            stored, values[name] = maker(name, tensor)
            del codes[name]
            codes |= stored
    twin = source.with_name(f"{source.name}-twin")
    for folder, tensors in ((source, codes), (twin, values)):
        shutil.copytree(dense, folder)
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    edit_config(source, quantization_config=section)
    edit_config(twin)  # written alike
    return source, twin


def fp8(block: tuple[int, int] | None = (128, 128), scale_fmt: str = "float") -> tuple[Maker, dict[str, Any]]:
    """transformers' FineGrainedFP8."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    config = SimpleNamespace(weight_block_size=block, scale_fmt=scale_fmt)
    quantize = Fp8Quantize(SimpleNamespace(quantization_config=config))
    decode = Fp8Dequantize(SimpleNamespace(quantization_config=config))

    def maker(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        stored = quantize.convert({name: weight})
        if len(stored) == 1:  # no multiple of a block: the library leaves it
            return stored, weight
        codes, scale = stored[name], next(value for key, value in stored.items() if key != name)
        if block is None:
            stored[next(key for key in stored if key != name)] = scale.view(scale.shape[:-2])
        return stored, decode._dequantize_one(codes, scale, output_dtype=weight.dtype)

    size = None if block is None else list(block)
    return maker, {"quant_method": "fp8", "weight_block_size": size, "scale_fmt": scale_fmt}


def fp8_ragged(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """Blocks of 128 x 128 with narrower last ones, as DeepSeek writes and reads them (`fp8_cast_bf16.py`)."""
    rows, width = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -width % 128, 0, -rows % 128))
    blocks = padded.view(-(-rows // 128), 128, -(-width // 128), 128)
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :width]
    codes = (weight.float() / wide).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scale}, (codes.float() * wide).to(weight.dtype)


def mxfp4_stack(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """gpt-oss: experts (E, K, N) of the model, codes along K."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    if ".experts." not in name:
        return {name: weight}, weight
    groups = weight.transpose(1, 2).float().unflatten(2, (-1, 32))  # (E, N, G, 32)
    exponent = torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=2**-120))) - 2
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scaled = groups / torch.exp2(exponent)[..., None]
    nibbles = (scaled.abs()[..., None] - table).abs().argmin(-1) + 8 * (scaled < 0)
    pairs = nibbles.to(torch.uint8).unflatten(-1, (16, 2))
    blocks, scales = pairs[..., 0] | pairs[..., 1] << 4, (exponent + 127).to(torch.uint8)
    values = convert_moe_packed_tensors(blocks, scales, dtype=weight.dtype)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, values


def compressed(preset: str | dict[str, Any], *, where: str = "proj", **section: Any) -> tuple[Maker, dict[str, Any]]:
    """compressed-tensors' compressors, of a preset name or a config group."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    if isinstance(preset, str):
        scheme = preset_name_to_scheme(preset, ["Linear"])
    else:
        scheme = QuantizationScheme(targets=["Linear"], **preset)
    layout = infer_module_format(torch.nn.Linear, scheme)
    compressor = BaseCompressor.get_value_from_registry(layout.value)
    args = scheme.weights

    def maker(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        if where not in name:
            return {name: weight}, weight
        strategy, (rows, width) = getattr(args.strategy, "value", args.strategy), weight.shape
        size = {"channel": width, "tensor": width}.get(strategy, args.group_size)
        grouped = weight.view(rows, -1, size) if size else weight
        low, high = grouped.amin(-1), grouped.amax(-1)  # (N, G)
        if strategy == "tensor":
            low, high = weight.min().view(1), weight.max().view(1)
        if strategy == "block":
            blocks = weight.unflatten(0, (-1, args.block_structure[0])).unflatten(2, (-1, args.block_structure[1]))
            low, high = blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
        extra = Tensors()
        if strategy == "tensor_group":
            extra = {"weight_global_scale": (448 * 6 / weight.abs().max().float()).view(1)}
        scale, zero = calculate_qparams(low, high, args, global_scale=extra.get("weight_global_scale"))
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero, **extra}
        stored = compressor.compress(state, scheme)
        values = compressor.decompress(stored, scheme)["weight"].to(weight.dtype)
        module = name.removesuffix(".weight")
        if scheme.input_activations is not None and scheme.input_activations.dynamic is False:
            stored["input_scale"] = torch.tensor([0.02])
        return {f"{module}.{local}": tensor for local, tensor in stored.items()}, values

    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=layout.value, quantization_status="compressed", ignore=["lm_head"]
    )
    return maker, {**config.model_dump(mode="json"), **section}


def modelopt_nvfp4() -> tuple[Maker, dict[str, Any]]:
    """The layout of ModelOpt by its documented names; values as its own `NVFP4QTensor.dequantize` computes them."""
    ct, _ = compressed("NVFP4A16")

    def maker(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        stored, _ = ct(name, weight)
        module = name.removesuffix(".weight")
        packed, local = stored[f"{module}.weight_packed"], stored[f"{module}.weight_scale"]
        outer = 1 / stored[f"{module}.weight_global_scale"].view(())
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        codes = table[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).long()]
        values = codes.unflatten(1, (-1, 16)) * (local.float() * outer)[..., None]
        names = {"weight": packed, "weight_scale": local, "weight_scale_2": outer, "input_scale": torch.tensor(0.01)}
        return {f"{module}.{local}": tensor for local, tensor in names.items()}, values.flatten(1).to(weight.dtype)

    return maker, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}


def modelopt_mixed(num_layers: int = 2) -> tuple[Maker, dict[str, Any]]:
    """ModelOpt's MIXED_PRECISION: attention FP8 per tensor, the rest NVFP4, said of each linear by its name."""
    nvfp4, _ = modelopt_nvfp4()

    def maker(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        if "self_attn" not in name:
            return nvfp4(name, weight)
        scale = weight.abs().max().float() / 448
        codes = (weight.float() / scale).to(torch.float8_e4m3fn)
        values = (codes.float() * scale).to(weight.dtype)
        return {name: codes, f"{name}_scale": scale, name.replace("weight", "input_scale"): torch.tensor(0.01)}, values

    linears = [f"self_attn.{part}_proj" for part in "qkvo"], [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    kinds = ({"quant_algo": "FP8"}, {"quant_algo": "NVFP4", "group_size": 16})
    layers = {
        f"model.layers.{index}.{name}": kind
        for index in range(num_layers)
        for names, kind in zip(linears, kinds, strict=True)
        for name in names
    }
    return maker, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def nf4(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """bitsandbytes: blocks of 64 of the flattened weight, the first value in the high nibble."""
    table = torch.linspace(-1, 1, 16)
    flat = weight.float().view(-1, 64)
    absmax = flat.abs().amax(1)
    index = ((flat / absmax[:, None])[..., None] - table).abs().argmin(-1)
    pairs = index.to(torch.uint8).view(-1, 2)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    stored = {
        name: (pairs[:, :1] << 4 | pairs[:, 1:]),
        f"{name}.absmax": absmax,
        f"{name}.quant_map": table,
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return stored, (table[index] * absmax[:, None]).view(weight.shape).to(weight.dtype)


SMALL = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64}
LARGE = {"hidden_size": 256, "intermediate_size": 384}
MIXTURE = {**LARGE, "moe_intermediate_size": 128, "q_lora_rank": 128, "kv_lora_rank": 128}
MODELS = {
    "deepseek_v3": MIXTURE,
    "gpt_oss": {},
    "minimax_m2": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3": SMALL,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
# DeepSeek-V3, MiniMax-M2, gpt-oss and Kimi as they are published, and what else is read: model, maker and section.
KINDS = {
    "fp8 blocks": ("deepseek_v3", *fp8()),
    "fp8 of minimax": ("minimax_m2", *fp8()),
    "fp8 powers of two": ("deepseek_v3", *fp8(scale_fmt="ue8m0")),
    "fp8 ragged blocks": ("deepseek_v3", fp8_ragged, FP8),
    "fp8 per tensor": ("qwen3", *fp8(None)),
    "mxfp4 stacks": ("gpt_oss", mxfp4_stack, {"quant_method": "mxfp4"}),
    "int4 experts": ("deepseek_v3", *compressed("W4A16", where="experts")),
    "int4 zero points": ("qwen3", *compressed("W4A16_ASYM")),
    "int8": ("qwen3", *compressed("W8A8")),
    "fp8 channels": ("qwen3", *compressed("FP8_DYNAMIC")),
    "fp8 tensors": ("qwen3", *compressed("FP8")),
    "fp8 blocks of compressed-tensors": ("qwen3", *compressed("FP8_BLOCK")),
    "nvfp4": ("deepseek_v3", *compressed("NVFP4A16")),
    "nvfp4 of modelopt": ("deepseek_v3", *modelopt_nvfp4()),
    "modelopt of two kinds": ("qwen3", *modelopt_mixed()),
    "mxfp4": ("qwen3", *compressed("MXFP4A16")),
    "mxfp8": ("qwen3", *compressed("MXFP8A16")),
    "nf4": ("qwen3", nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
