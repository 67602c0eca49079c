"""SGLang 0.5.23, from reading its sources; nothing was run. `quantization` is `sglang/srt/layers/quantization`."""

from quantkit.engines.base import Engine, read_rules

_RULES = read_rules("""
slow format=gguf
    its GGUF kernels
    quantization/gguf.py
fast format=gptq,gptq-v2 weights=int4,int8 groups=channel,32,64,128 zero_points=no multiples=64,64 capability=80,999
    Marlin kernels
    quantization/gptq/gptq.py: GPTQConfig, GPTQMarlinConfig.TYPE_MAP
slow format=gptq,gptq-v2 weights=int2,int3,int4,int8 experts=no
    its GPTQ kernels (float16), slower than Marlin's
    quantization/gptq/gptq.py: GPTQConfig, GPTQMarlinConfig.TYPE_MAP
no format=gptq,gptq-v2
    its GPTQ kernels do not take {linear}
    quantization/gptq/gptq.py: GPTQConfig, GPTQMarlinConfig.TYPE_MAP
fast format=awq groups=channel,32,64,128 multiples=64,64 capability=80,999
    Marlin kernels
    quantization/awq/awq.py: AWQMarlinConfig.get_quant_method
slow format=awq capability=75,999
    its AWQ kernels, slower than Marlin's
    quantization/awq/awq.py: AWQMarlinConfig.get_quant_method
fast format=fp8,modelopt,mxfp4
    its loader of {format}
    quantization/__init__.py
slow format=bitsandbytes
    bitsandbytes' kernels
    quantization/bitsandbytes.py
no format=torchao
    it reads no torchao checkpoints of this form
    quantization/__init__.py
no weights=mxfp4,mxfp8
    no scheme for {linear} there; take nvfp4 or fp8-dynamic
    quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts
no capability=10,79
    its kernels for compressed-tensors are for compute capability 8.0 and later
    quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py: get_min_capability
fast weights=nvfp4 inputs=nvfp4 capability=100,999
    fp4 products
    quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts
fast weights=nvfp4
    Marlin kernels, activations in 16 bits
    quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts
no weights=fp8 inputs=16-bit experts=yes
    experts in fp8 with 16-bit activations are refused; set activations.dtype=fp8
    quantization/compressed_tensors/compressed_tensors.py: get_moe_scheme
no weights=fp8 inputs=16-bit groups=block
    fp8 in blocks goes with fp8 activations there
    quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts
fast weights=fp8 inputs=fp8 capability=89,999
    fp8 products
    quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts
no weights=fp8 groups=block
    fp8 in blocks needs fp8 products, from compute capability 8.9 on
    quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts
fast weights=fp8
    Marlin kernels, activations in 16 bits
    quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts
fast weights=int4 inputs=fp8 experts=yes capability=90,999
    W4A8 products of experts
    quantization/compressed_tensors/compressed_tensors.py: get_moe_scheme
no weights=int4 inputs=fp8,int8
    no scheme for {linear} there; leave activations out
    quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts
no weights=int8 inputs=int8 experts=yes
    experts in int8 with int8 activations are for NPUs there; take rtn-int8 or fp8-dynamic
    quantization/compressed_tensors/compressed_tensors.py: get_moe_scheme
fast weights=int8 inputs=int8 capability=80,90
    int8 products
    sgl-kernel/csrc/gemm/int8_gemm_kernel.cu: int8_scaled_mm
no weights=int8 inputs=int8
    no int8 products on Blackwell: it stops at the first token; take fp8-dynamic there
    sgl-kernel/csrc/gemm/int8_gemm_kernel.cu: int8_scaled_mm
no weights=int8 zero_points=yes
    Marlin has zero points with 4 bits only; set weights.symmetric=true
    quantization/marlin_utils.py: query_marlin_supported_quant_types
fast weights=int4,int8 groups=channel,32,64,128 experts=yes hidden=128 multiples=64,64
    Marlin kernels for experts
    quantization/compressed_tensors/compressed_tensors.py: get_moe_scheme
fast weights=int4,int8 groups=channel,32,64,128 experts=no multiples=64,128
    Marlin kernels
    quantization/marlin_utils.py: check_marlin_supports_shape, MARLIN_SUPPORTED_GROUP_SIZES
no weights=int4,int8 groups=channel,32,64,128
    Marlin wants matrices of multiples of 64 x 128, and pads none there
    quantization/marlin_utils.py: check_marlin_supports_shape, MARLIN_SUPPORTED_GROUP_SIZES
no weights=int4,int8
    Marlin has groups of 32, 64, 128 and channels; {linear} has others
    quantization/marlin_utils.py: check_marlin_supports_shape, MARLIN_SUPPORTED_GROUP_SIZES
no
    4 and 8 bits alone have a kernel there, not {linear}
    quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py: WNA16_SUPPORTED_BITS
""")

ENGINE = Engine(
    title="SGLang",
    release="0.5.23",
    rules=_RULES,
    caches={"own": "the cache's own entry (quantkit_kv_cache) is ignored without a word: 16-bit keys and values"},
)
