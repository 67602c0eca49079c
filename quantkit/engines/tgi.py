"""Text Generation Inference 3.3.7 (in maintenance mode), from reading its sources; nothing was run.

`layers` is `server/text_generation_server/layers`.
"""

from quantkit.engines.base import Engine, read_rules

_RULES = read_rules("""
no format=gguf
    it reads Hugging Face checkpoints only
    utils/quantization.py
no format=modelopt,torchao,mxfp4
    no loader of {format} there
    utils/quantization.py
fast format=gptq,gptq-v2 weights=int4,int8 groups=channel,32,64,128 zero_points=no capability=80,999
    Marlin kernels
    layers/marlin/gptq.py: can_use_gptq_marlin
fast format=awq weights=int4 groups=channel,32,64,128 capability=80,999
    Marlin kernels
    layers/marlin/gptq.py: can_use_gptq_marlin
no format=gptq-v2
    it reads zero points as version 1 stores them
    layers/gptq/__init__.py
slow format=gptq,awq,bitsandbytes
    kernels slower than Marlin's
    layers/gptq
fast weights=fp8 groups=channel,tensor
    fp8 products from compute capability 8.9 on; before, Marlin kernels
    layers/compressed_tensors/w8an_fp.py
fast weights=int4,int8 inputs=16-bit groups=channel,32,64,128 zero_points=no capability=80,999
    Marlin kernels
    layers/compressed_tensors/wna16_int.py
slow weights=int4 inputs=16-bit groups=channel,32,64,128 zero_points=yes capability=80,999
    kernels slower than Marlin's
    layers/compressed_tensors/wna16_int.py
fast weights=int8 inputs=int8 static=no capability=75,90
    int8 products
    layers/compressed_tensors/w8a8_int.py
no
    no loader for {linear} there
    layers/compressed_tensors/loader.py: _create_loader_for_group
""")

ENGINE = Engine(
    title="TGI",
    release="3.3.7",
    rules=_RULES,
    caches={"own": "the cache's own entry (quantkit_kv_cache) is ignored: 16-bit keys and values"},
)
