"""Reading sizes out of a config.json: one line for each thing that is missing or is no number.

Not a model's config class: only what a count of bytes needs, and the defaults that its family has in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.errors import ModelError
from quantkit.planning.attention import Attention, compressed, grouped, latent

_FULL = ("full_attention", "attention", "global_attention", "indexed_attention")
_WINDOWED = ("sliding_attention", "chunked_attention", "local_attention")
# Every n-th layer sees everything, the others a window; said by newer configs in `layer_types`.
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2, "olmo3": 4}
_WINDOW_EVERYWHERE = ("mistral", "mixtral", "phi3", "starcoder2")
_RATIOS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
_V4_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128, "sliding_attention": 0}
_V4_TOP_K = 512


class Config:
    """A config.json, or the text part of one, with sizes that are checked when they are read.

    Args:
        data: contents of the file.
        where: what to call it in messages.
    """

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        inner = data.get("text_config")
        self.data: dict[str, Any] = {**data, **inner} if isinstance(inner, dict) else dict(data)
        self.has_more = isinstance(inner, dict)
        self.where = where
        self.family = str(self.data.get("model_type") or "llama")

    def get(self, *names: str, default: int | None = None) -> int:
        """The first of these entries that is there, a whole number of zero or more.

        Raises:
            ModelError: none is there and there is no default, or it is no such number.
        """
        for name in names:
            value = self.data.get(name)
            if value is None:
                continue
            if type(value) is not int or value < 0:
                raise ModelError(f"{self.where}: {name} is {value!r}, not a whole number; correct it")
            return value
        if default is None:
            raise ModelError(f"{self.where} has no {names[0]!r}, which a plan needs; add it, or give --params")
        return default

    def size(self, *names: str, default: int | None = None) -> int:
        """As `get`, and not zero.

        Raises:
            ModelError: as `get`, or it is zero.
        """
        value = self.get(*names, default=default)
        if value == 0:
            raise ModelError(f"{self.where}: {names[0]} is 0; correct it")
        return value

    def optional(self, name: str) -> int | None:
        """An entry that may be missing or null.

        Raises:
            ModelError: it is there and no whole number.
        """
        return None if self.data.get(name) is None else self.get(name)

    def flag(self, name: str, default: bool = False) -> bool:
        """A yes or no."""
        value = self.data.get(name)
        return default if value is None else bool(value)

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.size("hidden_size", "n_embd", "d_model")

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.size("num_hidden_layers", "n_layer", "num_layers")

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.size("num_attention_heads", "n_head")

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads; as many as query heads where nothing is said."""
        return self.size("num_key_value_heads", "num_kv_heads", default=self.num_heads)

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        found = self.optional("head_dim")
        if not found and self.hidden_size % self.num_heads:
            raise ModelError(
                f"{self.where}: hidden_size {self.hidden_size} is no multiple of num_attention_heads "
                f"{self.num_heads}, and there is no head_dim; add it"
            )
        return found or self.hidden_size // self.num_heads

    @property
    def is_latent(self) -> bool:
        """Whether keys and values are kept as one latent vector."""
        return self.optional("kv_lora_rank") is not None

    def layer_types(self) -> list[str]:
        """The kind of attention of each layer, in transformers' words.

        Raises:
            ModelError: a kind that plan does not know, or not one for each layer.
        """
        count = self.num_layers
        given = self.data.get("layer_types")
        ratios = self.data.get("compress_ratios")
        if isinstance(given, list):
            types = [str(item) for item in given[:count]]
        elif isinstance(ratios, list):
            types = [_RATIOS.get(ratio, f"compress ratio {ratio}") for ratio in ratios[:count]]
        else:
            types = self._default_types(count)
        if len(types) != count:
            raise ModelError(f"{self.where}: layer_types names {len(types)} layers, num_hidden_layers is {count}")
        for name in types:
            if name not in (*_FULL, *_WINDOWED, *_V4_RATES):
                raise ModelError(
                    f"{self.where}: layer type {name!r} is not one whose cache plan can count; "
                    "it counts full, sliding, chunked and compressed attention; give --params for the weights alone"
                )
        return types

    def _default_types(self, count: int) -> list[str]:
        if self.family == "deepseek_v4":
            # Two layers of 128, then 128 and 4 in turn; checkpoints say theirs in compress_ratios.
            return [_RATIOS[4 if index > 2 and index % 2 else 128] for index in range(count)]
        window = self.optional("sliding_window")
        period = self.optional("sliding_window_pattern") or _PATTERNS.get(self.family)
        if window and period:
            return ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(count)]
        if window and self.family in _WINDOW_EVERYWHERE:
            return ["sliding_attention"] * count
        if window and self.flag("use_sliding_window"):
            first = self.get("max_window_layers", default=count)
            return ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
        return ["full_attention"] * count

    def attentions(self) -> tuple[Attention, ...]:
        """The cache of each layer.

        Raises:
            ModelError: sizes are missing, or a kind of attention is unknown.
        """
        if self.family in _LINEAR or self.flag("is_attention_free"):
            raise ModelError(
                f"{self.where}: {self.family} keeps a state, not a cache of keys and values; "
                "plan counts attention layers only; give --params for the weights alone"
            )
        types = self.layer_types()
        if self.is_latent:
            return (self._latent(),) * len(types)
        return tuple(self._attention(name) for name in types)

    def _attention(self, name: str) -> Attention:
        if self.family == "deepseek_v4":
            return self._compressed(name)
        window = None
        if name in _WINDOWED:
            window = self.size("attention_chunk_size" if name == "chunked_attention" else "sliding_window")
        return grouped(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, window=window)

    def _latent(self) -> Attention:
        rope = self.size("qk_rope_head_dim")
        return latent(
            num_heads=self.num_heads,
            latent_dim=self.size("kv_lora_rank"),
            rope_dim=rope,
            head_dim=self.size("qk_nope_head_dim") + rope,
            value_dim=self.size("v_head_dim"),
            index_dim=self.get("index_head_dim", default=128 if self.family == "deepseek_v32" else 0),
            index_heads=self.get("index_n_heads", default=64),
            top_k=self.get("index_topk", default=2048),
        )

    def _compressed(self, name: str) -> Attention:
        rates = self.data.get("compress_rates")
        ratio = int((rates if isinstance(rates, dict) else _V4_RATES).get(name, _V4_RATES[name]))
        return compressed(
            num_heads=self.num_heads,
            head_dim=self.size("head_dim", default=512),
            rope_dim=self.get("qk_rope_head_dim", default=64),
            window=self.size("sliding_window", default=128),
            ratio=ratio,
            index_dim=self.get("index_head_dim", default=128) if name == "compressed_sparse_attention" else 0,
            index_heads=self.get("index_n_heads", default=64),
            top_k=self.get("index_topk", default=_V4_TOP_K),
        )


_LINEAR = ("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "jamba", "bamba", "zamba", "zamba2")
