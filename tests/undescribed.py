"""Small models of families that no file in quantkit/models/families describes, and multimodal wrappers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.helpers import SIZES, save_tokenizer, tiny_config

# Persimmon: one projection for q, k and v head by head, squared ReLU. DiffLlama: differences of attentions.
# LFM2: convolutions in place of attention in some layers. BioGPT: learned positions, biases everywhere.
UNDESCRIBED: dict[str, dict[str, Any]] = {
    "biogpt": {"hidden_act": "gelu"},
    "diffllama": {},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "persimmon": {},
}
# A mixture of experts without and with dense layers before it; LFM2's experts are called w1, w2, w3.
MIXTURES: dict[str, dict[str, Any]] = {
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "lfm2_moe": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}

# Files whose tensors transformers renames or joins: modules, experts under a renamed module, convolutions of three.
RENAMED: dict[str, dict[str, Any]] = {
    "lfm3": {"num_hidden_layers": 2, "layer_types": ["full_attention", "full_attention"]},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "head_dim": 16},
    "exaone": {},  # run by Llama's class
    # One stored tensor becomes weights of several modules.
    "hrm_text": {"num_layers_per_stack": 2, "num_hidden_layers": 16, "head_dim": 16, "num_key_value_heads": 4},
    "mamba": {"state_size": 8, "conv_kernel": 4, "expand": 2, "time_step_rank": 4},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe"],
        "num_hidden_layers": 3,
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "moe_latent_size": 32,
        "n_group": 1,
        "topk_group": 1,
    },
}

# Every second layer has heads of another width.
UNEVEN: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {"1": {"head_dim": 32}},
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 260,
        "num_kv_shared_layers": 0,
    }
}

_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
_QWEN_VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
_QWEN_NEWER_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": 14,
}
_QWEN_TOKENS = {"image_token_id": 258, "video_token_id": 257, "vision_start_token_id": 256, "vision_end_token_id": 255}
IMAGE_TOKEN = 258
WRAPPERS: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **SIZES},
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **_VISION},
        "image_token_index": IMAGE_TOKEN,
    },
    "gemma3": {
        "text_config": {
            "model_type": "gemma3_text",
            "head_dim": 16,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"],
            **SIZES,
        },
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE_TOKEN,
        "boi_token_index": 256,
        "eoi_token_index": 257,
    },
    "qwen2_vl": {
        "text_config": {**SIZES, "rope_parameters": _ROPE, "rope_scaling": {**_ROPE, "type": "mrope"}},
        "vision_config": _QWEN_VISION,
        **_QWEN_TOKENS,
    },
    "qwen2_5_vl": {
        "text_config": {**SIZES, "rope_parameters": _ROPE, "rope_scaling": {**_ROPE, "type": "mrope"}},
        "vision_config": {**_QWEN_NEWER_VISION, "fullatt_block_indexes": [1], "window_size": 56},
        **_QWEN_TOKENS,
    },
    "qwen3_vl": {
        "text_config": {**SIZES, "head_dim": 16, "rope_parameters": _ROPE, "rope_scaling": _ROPE},
        "vision_config": {
            **_QWEN_NEWER_VISION,
            "patch_size": 16,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
        **_QWEN_TOKENS,
    },
}


def make_undescribed(folder: Path, family: str) -> Path:
    """Write a random model of one of `UNDESCRIBED`, `MIXTURES`, `RENAMED` or `UNEVEN`, with a tokenizer."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    changes = {**UNDESCRIBED, **MIXTURES, **RENAMED, **UNEVEN}[family]
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    return _save(model, folder)


def make_wrapper(folder: Path, family: str) -> Path:
    """Write a random model of one of `WRAPPERS`, in the names that transformers writes, with a tokenizer."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    return _save(AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **WRAPPERS[family])), folder)


CHAT = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endfor %}"
)


def save_processor(folder: Path, family: str) -> None:
    """Give a wrapper the files of a processor: of LLaVA with a chat template, of Gemma 3 without one."""
    from transformers import AutoTokenizer

    if family == "llava":
        from transformers import CLIPImageProcessorPil, LlavaProcessor

        tokenizer = AutoTokenizer.from_pretrained(folder, extra_special_tokens={"image_token": "<image>"})
        images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
        numbers = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        LlavaProcessor(images, tokenizer, **numbers, chat_template=CHAT).save_pretrained(folder)
        return
    from transformers import Gemma3ImageProcessorPil, Gemma3Processor

    begin, end = AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens([256, 257])
    tokens = {"image_token": "<image_soft_token>", "boi_token": begin, "eoi_token": end}
    tokenizer = AutoTokenizer.from_pretrained(folder, extra_special_tokens=tokens)
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    Gemma3Processor(images, tokenizer, image_seq_length=4).save_pretrained(folder)


class QwenProcessor:
    """Stands in for that of Qwen-VL, which is not to be had without torchvision: the library's patches, its tokens."""

    image_token, chat_template = "<|image_pad|>", None

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

        patch = json.loads((folder / "config.json").read_text())["vision_config"]["patch_size"]
        size = {"shortest_edge": (2 * patch) ** 2, "longest_edge": (4 * patch) ** 2}
        self.image_processor = Qwen2VLImageProcessorPil(patch_size=patch, size=size)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, extra_special_tokens={"image_token": self.image_token})

    def __call__(self, text: list[str], images: list[Any], return_tensors: str) -> dict[str, torch.Tensor]:
        """One text and its images."""
        made = self.image_processor(images[0], return_tensors=return_tensors)
        before, after = text[0].split(self.image_token)
        tokens = self.image_token * int(made["image_grid_thw"].prod() // 4)
        ids = self.tokenizer(f"{before}{tokens}{after}", return_tensors=return_tensors)
        return {**ids, **made, "mm_token_type_ids": (ids["input_ids"] == IMAGE_TOKEN).int()}


def _save(model: Any, folder: Path) -> Path:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif parameter.dim() == 2 and "embed" not in name:
                parameter.mul_(4)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [type(model).__name__]  # transformers 4.57 forgets it for some wrappers
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder)
    return folder
