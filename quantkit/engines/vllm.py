"""vLLM 0.32.0 on GPUs, from reading its sources; its CPU build has rules of its own.

`layers` is `vllm/model_executor/layers`, `kernels` is `vllm/model_executor/kernels/linear`.
"""

from functools import partial

from quantkit.engines._vllm_cpu import ON_CPU
from quantkit.engines.base import CPU, GPU, Engine, Groups, Reads, Rule

_CT = "layers/quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts"
_MOE = "layers/quantization/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe.py: get_moe_method"
_GPTQ = "layers/quantization/auto_gptq.py: AutoGPTQConfig.__init__"
_ORACLE = "layers/fused_moe/oracle/int_wna16.py: select_wna16_moe_backend"
_MARLIN = "layers/quantization/utils/marlin_utils.py: query_marlin_supported_quant_types, MARLIN_SUPPORTED_GROUP_SIZES"
_HUMMING = "kernels/mixed_precision/humming.py: can_implement; requirements/cuda.txt"

_MARLIN_GROUPS: tuple[Groups, ...] = ("channel", 32, 64, 128)
_INTEGERS = ("int2", "int3", "int4", "int5", "int6", "int8")

_fast, _slow = partial(Rule, reads=Reads.FAST), partial(Rule, reads=Reads.SLOW)
_wrong, _no = partial(Rule, reads=Reads.WRONG), partial(Rule, reads=Reads.NO)

_REFUSED = (
    _no(
        format=("gguf",),
        reason="it reads GGUF with the package vllm-gguf-plugin only",
        source="layers/quantization/__init__.py: QuantizationMethods; METADATA: extra-quant",
        capability=(CPU, 999),
    ),
    _no(
        format=("bitsandbytes",),
        reason="it has no bitsandbytes of its own",
        source="layers/quantization/__init__.py: QuantizationMethods",
        capability=(CPU, 999),
    ),
    _no(
        format=("gptq", "gptq-v2"),
        group_order=True,
        reason="groups in activation order (desc_act=true) are refused; set steps.gptq.act_order=weight",
        source="layers/quantization/utils/gptq_utils.py: normalize_and_validate_gptq_desc_act",
        capability=(CPU, 999),
    ),
    _no(
        format=("gptq", "gptq-v2"),
        zero_points=True,
        reason="GPTQ with zero points is refused (sym=false); set weights.symmetric=true, or format to awq or "
        "compressed-tensors",
        source=_GPTQ,
        error="sym=False",
        capability=(CPU, 999),
    ),
    _no(
        format=("gptq", "gptq-v2"),
        weights=("int2", "int3", "int5", "int6"),
        reason="GPTQ has 4 and 8 bits there; set format=compressed-tensors",
        source=_GPTQ,
        capability=(CPU, 999),
    ),
    _no(
        format=("awq",),
        weights=("int2", "int3", "int5", "int6", "int8"),
        reason="AWQ has 4 bits there; set format=compressed-tensors",
        source="layers/quantization/auto_awq.py: AutoAWQConfig.TYPE_MAP",
        capability=(CPU, 999),
    ),
    _no(
        format=("gptq", "gptq-v2"),
        experts=False,
        besides=_MARLIN_GROUPS,
        reason="GPTQ has groups of 32, 64 and 128, and channels; set weights.group_size, or format=compressed-tensors",
        source=_MARLIN,
        capability=(CPU, 999),
    ),
    _no(capability=(GPU, 74), reason="kernels of {linear} are for compute capability 7.5 and later", source=_CT),
)

_OTHER_FORMATS = (
    _fast(
        format=("gptq", "gptq-v2", "awq"),
        groups=_MARLIN_GROUPS,
        experts=False,
        reason="Marlin kernels",
        source=_MARLIN,
    ),
    _fast(
        format=("gptq", "gptq-v2", "awq"),
        groups=_MARLIN_GROUPS,
        experts=True,
        hidden=128,
        reason="Marlin kernels for experts",
        source=_ORACLE,
    ),
    _slow(
        format=("awq",),
        experts=False,
        reason="its AWQ kernels in Triton",
        source="layers/quantization/auto_awq.py: get_quant_method",
    ),
    _slow(
        format=("gptq", "gptq-v2", "awq"),
        experts=True,
        reason="experts in Triton, the model's width or groups not being Marlin's",
        source="layers/quantization/moe_wna16.py: MoeWNA16Method",
    ),
    _fast(
        format=("fp8", "modelopt", "mxfp4"),
        reason="its loader of {format}",
        source="layers/quantization/__init__.py: QuantizationMethods",
    ),
    _slow(format=("torchao",), reason="torchao's own kernels", source="layers/quantization/torchao.py"),
)

_W4A4 = "layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_mxfp4.py; " + _CT
_FLOATS = (
    _no(
        weights=("mxfp4",),
        capability=(75, 79),
        reason="mxfp4 is for compute capability 8.0 and later",
        source=_W4A4,
    ),
    _wrong(
        weights=("mxfp4",),
        inputs=("",),
        capability=(100, 999),
        reason="loads, and activations become 4-bit too, as it takes input_activations null for W4A4; serve with "
        "--linear-backend marlin, or take nvfp4",
        source=_W4A4,
    ),
    _fast(weights=("mxfp4",), capability=(80, 99), reason="Marlin kernels, activations in 16 bits", source=_CT),
    _fast(weights=("mxfp4",), inputs=("mxfp4",), capability=(100, 999), reason="fp4 products", source=_W4A4),
    _wrong(
        weights=("mxfp8",),
        inputs=("",),
        capability=(100, 999),
        reason="loads, and activations become 8-bit too, as it takes input_activations null for W8A8; serve with "
        "--linear-backend marlin, or take fp8-dynamic",
        source=_CT,
    ),
    _fast(weights=("mxfp8",), capability=(75, 99), reason="Marlin kernels, activations in 16 bits", source=_CT),
    _fast(weights=("mxfp8",), inputs=("mxfp8",), capability=(100, 999), reason="fp8 products", source=_CT),
    _fast(
        weights=("nvfp4",),
        inputs=("nvfp4",),
        capability=(100, 999),
        reason="fp4 products",
        source="kernels/__init__.py: _POSSIBLE_NVFP4_KERNELS",
    ),
    _fast(
        weights=("nvfp4",),
        reason="Marlin kernels, activations in 16 bits",
        source="kernels/__init__.py: _POSSIBLE_NVFP4_KERNELS",
    ),
    _no(
        weights=("fp8",),
        inputs=("",),
        experts=True,
        reason="experts in fp8 with 16-bit activations are refused; set activations.dtype=fp8",
        source=_MOE,
    ),
    _fast(weights=("fp8",), inputs=("fp8",), capability=(89, 999), reason="fp8 products", source=_CT),
    _fast(weights=("fp8",), reason="Marlin kernels, activations in 16 bits", source=_CT),
)

_INTEGER_PRODUCTS = (
    _fast(
        weights=("int4",),
        inputs=("fp8",),
        groups=(128,),
        experts=False,
        capability=(90, 90),
        multiples=(128, 128),
        reason="CUTLASS W4A8, in bfloat16 only; scales of groups as e4m3 under one of each output",
        source="kernels/mixed_precision/cutlass.py: CutlassW4A8LinearKernel.can_implement",
    ),
    _fast(
        weights=("int4",),
        inputs=("fp8",),
        groups=(128,),
        experts=True,
        capability=(90, 90),
        multiples=(256, 256),
        hidden=256,
        reason="CUTLASS W4A8 for experts, in bfloat16 only; scales of groups as e4m3",
        source="layers/quantization/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_w4a8_fp8.py",
    ),
    _no(
        weights=("int4",),
        inputs=("fp8",),
        reason="int4 with fp8 activations runs on compute capability 9.0 alone, in groups of 128 and matrices of "
        "multiples of 128 (experts: 256)",
        source="kernels/mixed_precision/cutlass.py: CutlassW4A8LinearKernel.can_implement; " + _CT,
    ),
    _no(
        weights=("int4",),
        inputs=("int8",),
        reason="int4 with int8 activations has CPU kernels only",
        source="kernels/mixed_precision/dynamic_4bit.py; layers/fused_moe/oracle/w4a8_int8.py",
    ),
    _no(
        weights=("int8",),
        inputs=("int8",),
        experts=True,
        static=True,
        reason="experts in int8 have scales of inputs per token only; set activations.dynamic=true",
        source="layers/quantization/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_w8a8_int8.py",
    ),
    _fast(
        weights=("int8",),
        inputs=("int8",),
        experts=True,
        reason="int8 products of experts in Triton",
        source="layers/fused_moe/oracle/int8.py",
    ),
    _fast(
        weights=("int8",),
        inputs=("int8",),
        capability=(75, 99),
        reason="int8 products",
        source="kernels/scaled_mm/cutlass.py: CutlassInt8ScaledMMLinearKernel",
    ),
    _no(
        weights=("int8",),
        inputs=("int8",),
        reason="CUTLASS has no int8 products on Blackwell: it loads and stops at the first token; serve with "
        "--linear-backend triton, or take fp8-dynamic",
        source="csrc/libtorch_stable/quantization/w8a8/cutlass/c3x/scaled_mm_helper.hpp: dispatch_scaled_mm",
    ),
)

_WEIGHTS_ONLY = (
    _no(
        weights=("int8",),
        zero_points=True,
        experts=True,
        reason="experts of 8 bits have no zero points there; set weights.symmetric=true",
        source="layers/fused_moe/experts/marlin_moe.py: _supports_quant_scheme",
    ),
    _fast(
        weights=("int4", "int8"),
        experts=True,
        groups=_MARLIN_GROUPS,
        hidden=128,
        reason="Marlin kernels for experts",
        source=_ORACLE,
    ),
    _no(
        experts=True,
        groups=("channel",),
        reason="experts with a scale per channel need a model whose width is a multiple of 128",
        source="layers/quantization/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_wna16.py",
    ),
    _slow(weights=("int4", "int8"), experts=True, reason="experts in Triton, slower than Marlin's", source=_ORACLE),
    _no(experts=True, reason="experts have 4 or 8 bits there", source=_ORACLE),
    _fast(
        weights=("int8",),
        zero_points=True,
        groups=("channel", 64, 128),
        capability=(90, 90),
        multiples=(128, 64),
        reason="Machete kernels",
        source="layers/quantization/utils/machete_utils.py: query_machete_supported_quant_types",
    ),
    _slow(
        weights=("int8",),
        zero_points=True,
        reason="Marlin has zero points with 4 bits only; Humming's kernels, where they are installed",
        source=_MARLIN + "; " + _HUMMING,
    ),
    _fast(
        weights=("int4", "int8"),
        groups=_MARLIN_GROUPS,
        reason="Marlin kernels (Machete's on 9.0); odd sizes are padded",
        source="kernels/mixed_precision/marlin.py: can_implement; machete.py",
    ),
    _slow(
        weights=("int4",),
        groups=(256,),
        multiples=(8, 1),
        reason="groups of 256 by a kernel in Triton, slower than Marlin's",
        source="kernels/mixed_precision/triton_w4a16.py: can_implement",
    ),
    _slow(
        weights=_INTEGERS,
        reason="Marlin has 4 and 8 bits in groups of 32, 64, 128 and channels; {linear} by Humming's kernels, where "
        "they are installed",
        source=_MARLIN + "; " + _HUMMING,
    ),
)

ENGINE = Engine(
    title="vLLM",
    release="0.32.0",
    rules=(*_REFUSED, *ON_CPU, *_OTHER_FORMATS, *_FLOATS, *_INTEGER_PRODUCTS, *_WEIGHTS_ONLY),
    ordinary=_fast(reason="an ordinary checkpoint, as large as the original", source="", capability=(CPU, 999)),
    caches={"own": "the cache's own entry (quantkit_kv_cache) is ignored without a word: 16-bit keys and values"},
)
