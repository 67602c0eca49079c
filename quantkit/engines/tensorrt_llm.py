"""TensorRT-LLM, main branch of 2026 (21156a7), PyTorch backend; from reading its sources, nothing was run."""

from quantkit.engines.base import Engine, read_rules

_RULES = read_rules("""
no format=gguf
    it reads Hugging Face checkpoints only
    _torch/model_config.py: load_hf_quant_config
fast format=modelopt,mxfp4
    NVIDIA's own format, and gpt-oss
    _torch/model_config.py: load_hf_quant_config
fast format=fp8 groups=block
    FP8_BLOCK_SCALES
    _torch/model_config.py: load_hf_quant_config
no format=gptq,gptq-v2,awq,bitsandbytes,torchao,fp8
    no loader of {format} there; quantize with format=compressed-tensors and fp8 or nvfp4
    _torch/model_config.py: load_hf_quant_config
fast weights=fp8 inputs=fp8 groups=channel static=no capability=89,999
    FP8_PER_CHANNEL_PER_TOKEN
    models/quant_config_utils.py: _quant_config_from_config_group
fast weights=fp8 inputs=fp8 groups=block capability=89,999
    FP8_BLOCK_SCALES
    models/quant_config_utils.py: _quant_config_from_config_group
fast weights=nvfp4 inputs=nvfp4 capability=100,999
    fp4 products
    models/quant_config_utils.py: _quant_config_from_config_group
fast weights=mxfp4
    W4A16_MXFP4, activations in 16 bits
    models/quant_config_utils.py: _quant_config_from_config_group
wrong weights=int8 inputs=int8 groups=channel static=no
    8 bits per channel and token are taken for fp8, whatever their type: other numbers
    models/quant_config_utils.py: _quant_config_from_config_group
no
    of compressed-tensors it reads fp8 per channel and token or in blocks, nvfp4 with nvfp4 activations (Blackwell)
        and mxfp4, not {linear}
    models/quant_config_utils.py: _quant_config_from_config_group
""")

ENGINE = Engine(
    title="TensorRT-LLM",
    release="main of 2026, 21156a7",
    rules=_RULES,
    caches={"own": "the cache's own entry (quantkit_kv_cache) is ignored: 16-bit keys and values"},
)
