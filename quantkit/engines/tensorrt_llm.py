"""TensorRT-LLM, main branch of 2026 (21156a7), PyTorch backend; from reading its sources, nothing was run."""

from functools import partial

from quantkit.engines.base import Engine, Reads, Rule

_GROUP = "models/quant_config_utils.py: _quant_config_from_config_group"
_CONFIG = "_torch/model_config.py: load_hf_quant_config"
_fast, _wrong, _no = (partial(Rule, reads=reads) for reads in (Reads.FAST, Reads.WRONG, Reads.NO))

_RULES = (
    _no(format=("gguf",), reason="it reads Hugging Face checkpoints only", source=_CONFIG),
    _fast(format=("modelopt", "mxfp4"), reason="NVIDIA's own format, and gpt-oss", source=_CONFIG),
    _fast(format=("fp8",), groups=("block",), reason="FP8_BLOCK_SCALES", source=_CONFIG),
    _no(
        format=("gptq", "gptq-v2", "awq", "bitsandbytes", "torchao", "fp8"),
        reason="no loader of {format} there; quantize with format=compressed-tensors and fp8 or nvfp4",
        source=_CONFIG,
    ),
    _fast(
        weights=("fp8",),
        inputs=("fp8",),
        groups=("channel",),
        static=False,
        capability=(89, 999),
        reason="FP8_PER_CHANNEL_PER_TOKEN",
        source=_GROUP,
    ),
    _fast(
        weights=("fp8",),
        inputs=("fp8",),
        groups=("block",),
        capability=(89, 999),
        reason="FP8_BLOCK_SCALES",
        source=_GROUP,
    ),
    _fast(weights=("nvfp4",), inputs=("nvfp4",), capability=(100, 999), reason="fp4 products", source=_GROUP),
    _fast(weights=("mxfp4",), reason="W4A16_MXFP4, activations in 16 bits", source=_GROUP),
    _wrong(
        weights=("int8",),
        inputs=("int8",),
        groups=("channel",),
        static=False,
        reason="8 bits per channel and token are taken for fp8, whatever their type: other numbers",
        source=_GROUP,
    ),
    _no(
        reason="of compressed-tensors it reads fp8 per channel and token or in blocks, nvfp4 with nvfp4 activations "
        "(Blackwell) and mxfp4, not {linear}",
        source=_GROUP,
    ),
)

ENGINE = Engine(
    title="TensorRT-LLM",
    release="main of 2026, 21156a7",
    rules=_RULES,
    ordinary=_fast(reason="an ordinary checkpoint, as large as the original", source=""),
    caches={"own": "the cache's own entry (quantkit_kv_cache) is ignored: 16-bit keys and values"},
)
