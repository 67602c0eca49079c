"""transformers 5.23.0 with compressed-tensors 0.20, and GPTQModel for GPTQ and AWQ; run on CPUs.

`integrations` and `quantizers` are transformers' own. It decodes weights and keeps activations as they are.
"""

from dataclasses import replace

from quantkit.engines.base import CPU, ORDINARY, Engine, Reads, read_rules

_RULES = read_rules(
    """
slow format=gptq,gptq-v2,awq
    with gptqmodel installed
    quantizers/quantizer_gptq.py, quantizer_awq.py: validate_environment
slow format=gguf
    decoded to 16 bits while loading
    modeling_gguf_pytorch_utils.py
slow format=bitsandbytes,torchao,fp8,mxfp4
    with the library of {format} installed
    quantizers/auto.py: AUTO_QUANTIZER_MAPPING
no format=modelopt
    it has no loader of {format}
    quantizers/auto.py
no format=compressed-tensors zero_points=yes experts=yes
    its decoder is not given zero points of experts and stops; set weights.symmetric=true, or format=dense
    integrations/compressed_tensors.py: CompressedTensorsDequantize.convert
no format=compressed-tensors experts=yes compressed_experts=no
    it does not load compressed experts of this family, whoever wrote them; set format=dense
    conversion_mapping.py; integrations/compressed_tensors.py: CompressedTensorsDequantize.convert
no format=compressed-tensors weights=int8,int4 inputs=int8 experts=yes
    INT8 experts with INT8 activations: it has no rule that joins them; take rtn-int8 or fp8-dynamic
    integrations/compressed_tensors.py: CompressedTensorsDequantize.convert
wrong format=compressed-tensors weights=nvfp4 experts=yes
    it decodes NVFP4 experts without their global scale, to other numbers
    integrations/compressed_tensors.py: CompressedTensorsDequantize.convert
no format=compressed-tensors weights=fp8,mxfp8 groups=block,32 experts=yes
    FP8 experts with scales of blocks or groups are not decoded
    integrations/compressed_tensors.py: CompressedTensorsDequantize.convert
slow format=compressed-tensors experts=yes static=yes
    with compressed-tensors installed; input scales of experts are dropped, activations stay as they are
    integrations/compressed_tensors.py: CompressedTensorsDequantize.convert
slow weights=fp8,nvfp4,mxfp4,mxfp8
    with compressed-tensors installed, decoded to bfloat16
    quantizers/quantizer_compressed_tensors.py
slow
    with compressed-tensors installed
    quantizers/quantizer_compressed_tensors.py
""",
    capability=(CPU, 999),
)

ENGINE = Engine(
    title="transformers",
    release="5.23.0",
    rules=_RULES,
    ordinary=replace(ORDINARY, reads=Reads.SLOW, capability=(CPU, 999)),
    caches={"own": "the cache's own entry (quantkit_kv_cache) is ignored: 16-bit keys and values"},
    devices=False,
)
