"""Models of a known shape with random weights, built layer by layer on the device: no checkpoint, no download."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from linears import SCHEMES, random_weight
from timing import dtype_on
from torch import Tensor
from torch.nn.functional import embedding as look_up

from quantkit.kernels.ops.linear import build_linear
from quantkit.kernels.types import Linear
from quantkit.models.families import find
from quantkit.runtime.model.cache_schemes import StoredCache
from quantkit.runtime.model.config import ModelConfig, read_config
from quantkit.runtime.model.layers import Norm, RMSNorm
from quantkit.runtime.model.model import NativeModel
from quantkit.runtime.model.weights import build_block

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
_EXPERTS = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
SHAPES: dict[str, dict[str, Any]] = {
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "8x1B": {
        **_EXPERTS,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    },
}
SHAPES["tiny experts"] = {**SHAPES["tiny"], **_EXPERTS, "num_local_experts": 4, "num_experts_per_tok": 2}  # of a test
# Linears of the blocks, and of the head, by name of the whole; None = bf16.
WEIGHTS: dict[str, tuple[str | None, str | None]] = {
    "bf16": (None, None),
    "w8a8": ("quantkit w8a8 int8", None),
    "fp8": ("quantkit w8a8 fp8", None),
    "w4a16": ("quantkit w4a16 g128", None),
    "w4a16 head8": ("quantkit w4a16 g128", "quantkit w8a16"),
}


def settings(shape: str) -> dict[str, Any]:
    """config.json of a shape."""
    return {**_LLAMA, **SHAPES[shape]}


@dataclass(kw_only=True)
class RandomWeights:
    """Stands where `runtime._weights.Weights` reads a checkpoint."""

    config: ModelConfig
    kind: str | None
    device: torch.device
    dtype: torch.dtype
    num_bytes: int = 0
    stored_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Random numbers of about the size that trained ones have."""
        value = torch.randn(shape, device=self.device, dtype=self.dtype) * shape[-1] ** -0.5
        self.num_bytes += value.nbytes
        return value

    def norm(self, name: str) -> Norm:
        """A norm with weights around one."""
        weight = torch.rand(self.config.hidden_size, device=self.device, dtype=self.dtype) + 0.5
        self.num_bytes += weight.nbytes
        self.stored_bytes += weight.nbytes
        return RMSNorm(weight, self.config.norm_eps, 0.0)

    def linear(self, names: Sequence[str], order: Tensor | None = None, read_share: float = 1.0) -> Linear:
        """One linear out of modules that read the same input."""
        shapes = [self._shape(name.rsplit(".", 1)[1]) for name in names]
        is_router = names[0].endswith(".gate")  # which nobody quantizes
        return self.linear_of(
            sum(rows for rows, _ in shapes), shapes[0][1], None if is_router else self.kind, read_share
        )

    def linear_of(self, rows: int, width: int, kind: str | None, read_share: float = 1.0) -> Linear:
        """A linear of random weights; a decode step reads this much of it."""
        if kind is None:
            weight = torch.randn(rows, width, device=self.device, dtype=self.dtype) * width**-0.5
            result = build_linear(weight, dtype=self.dtype, device=self.device)
        else:
            scheme, activation = SCHEMES[kind]
            codes = random_weight(rows, width, scheme, self.device)
            result = build_linear(codes, activation=activation, dtype=self.dtype, device=self.device)
        self.num_bytes += result.stored_bytes
        self.stored_bytes += round(result.stored_bytes * read_share)
        return result

    def _shape(self, name: str) -> tuple[int, int]:
        config = self.config
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        rows = {"q_proj": query, "k_proj": key, "v_proj": key, "gate_proj": config.width, "up_proj": config.width}
        widths = {"o_proj": query, "down_proj": config.width}
        if config.experts is not None:
            expert = config.experts.width
            rows |= {"w1": expert, "w3": expert, "gate": config.experts.num_experts}
            widths |= {"w2": expert}
        return rows.get(name, config.hidden_size), widths.get(name, config.hidden_size)


def make_model(shape: str, weights: str, device: torch.device) -> NativeModel:
    """A Llama of this shape, or a Mixtral."""
    read = settings(shape)
    config = read_config(read, find(read))
    kind, head_kind = WEIGHTS[weights]
    source = RandomWeights(config=config, kind=kind, device=device, dtype=dtype_on(device.type))
    ropes = list(dict.fromkeys(filter(None, config.ropes)))
    table = source.tensor("embedding", (config.vocab_size, config.hidden_size))
    blocks = [build_block(source, index, ropes) for index in range(config.num_layers)]  # type: ignore[arg-type]
    head = source.linear_of(config.vocab_size, config.hidden_size, head_kind)
    return NativeModel(
        config=config,
        vocab_size=config.vocab_size,
        max_length=config.max_length,
        embedding=partial(look_up, weight=table),
        blocks=blocks,
        ropes=ropes,
        final_norm=source.norm("norm"),
        head=head,
        num_bytes=source.num_bytes,
        stored_bytes=source.stored_bytes,
        eos_ids=(),
        dtype=source.dtype,
        device=device,
        notes=tuple(source.notes),
        stored_cache=StoredCache(scales=(None,) * len(blocks)),
    )
