"""vLLM 0.32.0 on GPUs, from reading its sources; its CPU build has rules of its own.

`layers` is `vllm/model_executor/layers`, `kernels` is `vllm/model_executor/kernels/linear`.
"""

from dataclasses import replace

from quantkit.engines._vllm_cpu import ON_CPU
from quantkit.engines.base import CPU, ORDINARY, Engine, read_rules

_REFUSED = read_rules(
    """
no format=gguf
    it reads GGUF with the package vllm-gguf-plugin only
    layers/quantization/__init__.py: QuantizationMethods; METADATA: extra-quant
no format=bitsandbytes
    it has no bitsandbytes of its own
    layers/quantization/__init__.py: QuantizationMethods
no format=gptq,gptq-v2 group_order=yes
    groups in activation order (desc_act=true) are refused; set steps.gptq.act_order=weight
    layers/quantization/utils/gptq_utils.py: normalize_and_validate_gptq_desc_act
no format=gptq,gptq-v2 zero_points=yes
    GPTQ with zero points is refused (sym=false); set weights.symmetric=true, or format to awq or compressed-tensors
    layers/quantization/auto_gptq.py: AutoGPTQConfig.__init__
    sym=False
no format=gptq,gptq-v2 weights=int2,int3,int5,int6
    GPTQ has 4 and 8 bits there; set format=compressed-tensors
    layers/quantization/auto_gptq.py: AutoGPTQConfig.__init__
no format=awq weights=int2,int3,int5,int6,int8
    AWQ has 4 bits there; set format=compressed-tensors
    layers/quantization/auto_awq.py: AutoAWQConfig.TYPE_MAP
no format=gptq,gptq-v2 besides=channel,32,64,128 experts=no
    GPTQ has groups of 32, 64 and 128, and channels; set weights.group_size, or format=compressed-tensors
    layers/quantization/utils/marlin_utils.py: query_marlin_supported_quant_types, MARLIN_SUPPORTED_GROUP_SIZES
no capability=10,74
    kernels of {linear} are for compute capability 7.5 and later
    layers/quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts
""",
    capability=(CPU, 999),
)

_ON_GPUS = read_rules("""
fast format=gptq,gptq-v2,awq groups=channel,32,64,128 experts=no
    Marlin kernels
    layers/quantization/utils/marlin_utils.py: query_marlin_supported_quant_types, MARLIN_SUPPORTED_GROUP_SIZES
fast format=gptq,gptq-v2,awq groups=channel,32,64,128 experts=yes hidden=128
    Marlin kernels for experts
    layers/fused_moe/oracle/int_wna16.py: select_wna16_moe_backend
slow format=awq experts=no
    its AWQ kernels in Triton
    layers/quantization/auto_awq.py: get_quant_method
slow format=gptq,gptq-v2,awq experts=yes
    experts in Triton, the model's width or groups not being Marlin's
    layers/quantization/moe_wna16.py: MoeWNA16Method
fast format=fp8,modelopt,mxfp4
    its loader of {format}
    layers/quantization/__init__.py: QuantizationMethods
slow format=torchao
    torchao's own kernels
    layers/quantization/torchao.py
no weights=mxfp4 capability=75,79
    mxfp4 is for compute capability 8.0 and later
    layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_mxfp4.py;
        layers/quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts
wrong weights=mxfp4 inputs=16-bit capability=100,999
    loads, and activations become 4-bit too, as it takes input_activations null for W4A4; serve with
        --linear-backend marlin, or take nvfp4
    layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_mxfp4.py;
        layers/quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts
fast weights=mxfp4 capability=80,99
    Marlin kernels, activations in 16 bits
    layers/quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts
fast weights=mxfp4 inputs=mxfp4 capability=100,999
    fp4 products
    layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_mxfp4.py;
        layers/quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts
wrong weights=mxfp8 inputs=16-bit capability=100,999
    loads, and activations become 8-bit too, as it takes input_activations null for W8A8; serve with
        --linear-backend marlin, or take fp8-dynamic
    layers/quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts
fast weights=mxfp8 capability=75,99
    Marlin kernels, activations in 16 bits
    layers/quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts
fast weights=mxfp8 inputs=mxfp8 capability=100,999
    fp8 products
    layers/quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts
fast weights=nvfp4 inputs=nvfp4 capability=100,999
    fp4 products
    kernels/__init__.py: _POSSIBLE_NVFP4_KERNELS
fast weights=nvfp4
    Marlin kernels, activations in 16 bits
    kernels/__init__.py: _POSSIBLE_NVFP4_KERNELS
no weights=fp8 inputs=16-bit experts=yes
    experts in fp8 with 16-bit activations are refused; set activations.dtype=fp8
    layers/quantization/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe.py: get_moe_method
fast weights=fp8 inputs=fp8 capability=89,999
    fp8 products
    layers/quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts
fast weights=fp8
    Marlin kernels, activations in 16 bits
    layers/quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts
fast weights=int4 inputs=fp8 groups=128 experts=no multiples=128,128 capability=90,90
    CUTLASS W4A8, in bfloat16 only; scales of groups as e4m3 under one of each output
    kernels/mixed_precision/cutlass.py: CutlassW4A8LinearKernel.can_implement
fast weights=int4 inputs=fp8 groups=128 experts=yes hidden=256 multiples=256,256 capability=90,90
    CUTLASS W4A8 for experts, in bfloat16 only; scales of groups as e4m3
    layers/quantization/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_w4a8_fp8.py
no weights=int4 inputs=fp8
    int4 with fp8 activations runs on compute capability 9.0 alone, in groups of 128 and matrices of multiples of
        128 (experts: 256)
    kernels/mixed_precision/cutlass.py: CutlassW4A8LinearKernel.can_implement;
        layers/quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts
no weights=int4 inputs=int8
    int4 with int8 activations has CPU kernels only
    kernels/mixed_precision/dynamic_4bit.py; layers/fused_moe/oracle/w4a8_int8.py
no weights=int8 inputs=int8 experts=yes static=yes
    experts in int8 have scales of inputs per token only; set activations.dynamic=true
    layers/quantization/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_w8a8_int8.py
fast weights=int8 inputs=int8 experts=yes
    int8 products of experts in Triton
    layers/fused_moe/oracle/int8.py
fast weights=int8 inputs=int8 capability=75,99
    int8 products
    kernels/scaled_mm/cutlass.py: CutlassInt8ScaledMMLinearKernel
no weights=int8 inputs=int8
    CUTLASS has no int8 products on Blackwell: it loads and stops at the first token; serve with --linear-backend
        triton, or take fp8-dynamic
    csrc/libtorch_stable/quantization/w8a8/cutlass/c3x/scaled_mm_helper.hpp: dispatch_scaled_mm
no weights=int8 zero_points=yes experts=yes
    experts of 8 bits have no zero points there; set weights.symmetric=true
    layers/fused_moe/experts/marlin_moe.py: _supports_quant_scheme
fast weights=int4,int8 groups=channel,32,64,128 experts=yes hidden=128
    Marlin kernels for experts
    layers/fused_moe/oracle/int_wna16.py: select_wna16_moe_backend
no groups=channel experts=yes
    experts with a scale per channel need a model whose width is a multiple of 128
    layers/quantization/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_wna16.py
slow weights=int4,int8 experts=yes
    experts in Triton, slower than Marlin's
    layers/fused_moe/oracle/int_wna16.py: select_wna16_moe_backend
no experts=yes
    experts have 4 or 8 bits there
    layers/fused_moe/oracle/int_wna16.py: select_wna16_moe_backend
fast weights=int8 groups=channel,64,128 zero_points=yes multiples=128,64 capability=90,90
    Machete kernels
    layers/quantization/utils/machete_utils.py: query_machete_supported_quant_types
slow weights=int8 zero_points=yes
    Marlin has zero points with 4 bits only; Humming's kernels, where they are installed
    layers/quantization/utils/marlin_utils.py: query_marlin_supported_quant_types, MARLIN_SUPPORTED_GROUP_SIZES;
        kernels/mixed_precision/humming.py: can_implement; requirements/cuda.txt
fast weights=int4,int8 groups=channel,32,64,128
    Marlin kernels (Machete's on 9.0); odd sizes are padded
    kernels/mixed_precision/marlin.py: can_implement; machete.py
slow weights=int4 groups=256 multiples=8,1
    groups of 256 by a kernel in Triton, slower than Marlin's
    kernels/mixed_precision/triton_w4a16.py: can_implement
slow weights=int2,int3,int4,int5,int6,int8
    Marlin has 4 and 8 bits in groups of 32, 64, 128 and channels; {linear} by Humming's kernels, where they are
        installed
    layers/quantization/utils/marlin_utils.py: query_marlin_supported_quant_types, MARLIN_SUPPORTED_GROUP_SIZES;
        kernels/mixed_precision/humming.py: can_implement; requirements/cuda.txt
""")

ENGINE = Engine(
    title="vLLM",
    release="0.32.0",
    rules=(*_REFUSED, *ON_CPU, *_ON_GPUS),
    ordinary=replace(ORDINARY, capability=(CPU, 999)),
    caches={"own": "the cache's own entry (quantkit_kv_cache) is ignored without a word: 16-bit keys and values"},
)
