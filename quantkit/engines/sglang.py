"""SGLang 0.5.23, from reading its sources; nothing was run. `quantization` is `sglang/srt/layers/quantization`."""

from functools import partial

from quantkit.engines.base import GPU, Engine, Groups, Reads, Rule

_CT = "quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts"
_MOE = "quantization/compressed_tensors/compressed_tensors.py: get_moe_scheme"
_WNA16 = "quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py"
_MARLIN = "quantization/marlin_utils.py: check_marlin_supports_shape, MARLIN_SUPPORTED_GROUP_SIZES"
_GPTQ = "quantization/gptq/gptq.py: GPTQConfig, GPTQMarlinConfig.TYPE_MAP"
_AWQ = "quantization/awq/awq.py: AWQMarlinConfig.get_quant_method"
_INT8 = "sgl-kernel/csrc/gemm/int8_gemm_kernel.cu: int8_scaled_mm"

_MARLIN_GROUPS: tuple[Groups, ...] = ("channel", 32, 64, 128)
_PACKED = ("gptq", "gptq-v2", "awq")

_fast, _slow, _no = (partial(Rule, reads=reads) for reads in (Reads.FAST, Reads.SLOW, Reads.NO))

_OTHER_FORMATS = (
    _slow(format=("gguf",), reason="its GGUF kernels", source="quantization/gguf.py"),
    _fast(
        format=("gptq", "gptq-v2"),
        weights=("int4", "int8"),
        zero_points=False,
        groups=_MARLIN_GROUPS,
        capability=(80, 999),
        multiples=(64, 64),
        reason="Marlin kernels",
        source=_GPTQ,
    ),
    _slow(
        format=("gptq", "gptq-v2"),
        weights=("int2", "int3", "int4", "int8"),
        experts=False,
        reason="its GPTQ kernels (float16), slower than Marlin's",
        source=_GPTQ,
    ),
    _no(format=("gptq", "gptq-v2"), reason="its GPTQ kernels do not take {linear}", source=_GPTQ),
    _fast(
        format=("awq",),
        groups=_MARLIN_GROUPS,
        capability=(80, 999),
        multiples=(64, 64),
        reason="Marlin kernels",
        source=_AWQ,
    ),
    _slow(format=("awq",), capability=(75, 999), reason="its AWQ kernels, slower than Marlin's", source=_AWQ),
    _fast(format=("fp8", "modelopt", "mxfp4"), reason="its loader of {format}", source="quantization/__init__.py"),
    _slow(format=("bitsandbytes",), reason="bitsandbytes' kernels", source="quantization/bitsandbytes.py"),
    _no(format=("torchao",), reason="it reads no torchao checkpoints of this form", source="quantization/__init__.py"),
)

_COMPRESSED_TENSORS = (
    _no(
        weights=("mxfp4", "mxfp8"),
        reason="no scheme for {linear} there; take nvfp4 or fp8-dynamic",
        source=_CT,
    ),
    _no(
        capability=(GPU, 79),
        reason="its kernels for compressed-tensors are for compute capability 8.0 and later",
        source=_WNA16 + ": get_min_capability",
    ),
    _fast(weights=("nvfp4",), inputs=("nvfp4",), capability=(100, 999), reason="fp4 products", source=_CT),
    _fast(weights=("nvfp4",), reason="Marlin kernels, activations in 16 bits", source=_CT),
    _no(
        weights=("fp8",),
        inputs=("",),
        experts=True,
        reason="experts in fp8 with 16-bit activations are refused; set activations.dtype=fp8",
        source=_MOE,
    ),
    _no(
        weights=("fp8",),
        groups=("block",),
        inputs=("",),
        reason="fp8 in blocks goes with fp8 activations there",
        source=_CT,
    ),
    _fast(weights=("fp8",), inputs=("fp8",), capability=(89, 999), reason="fp8 products", source=_CT),
    _no(
        weights=("fp8",),
        groups=("block",),
        reason="fp8 in blocks needs fp8 products, from compute capability 8.9 on",
        source=_CT,
    ),
    _fast(weights=("fp8",), reason="Marlin kernels, activations in 16 bits", source=_CT),
    _fast(
        weights=("int4",),
        inputs=("fp8",),
        experts=True,
        capability=(90, 999),
        reason="W4A8 products of experts",
        source=_MOE,
    ),
    _no(
        weights=("int4",),
        inputs=("fp8", "int8"),
        reason="no scheme for {linear} there; leave activations out",
        source=_CT,
    ),
    _no(
        weights=("int8",),
        inputs=("int8",),
        experts=True,
        reason="experts in int8 with int8 activations are for NPUs there; take rtn-int8 or fp8-dynamic",
        source=_MOE,
    ),
    _fast(weights=("int8",), inputs=("int8",), capability=(80, 90), reason="int8 products", source=_INT8),
    _no(
        weights=("int8",),
        inputs=("int8",),
        reason="no int8 products on Blackwell: it stops at the first token; take fp8-dynamic there",
        source=_INT8,
    ),
    _no(
        weights=("int8",),
        zero_points=True,
        reason="Marlin has zero points with 4 bits only; set weights.symmetric=true",
        source="quantization/marlin_utils.py: query_marlin_supported_quant_types",
    ),
    _fast(
        weights=("int4", "int8"),
        groups=_MARLIN_GROUPS,
        experts=True,
        hidden=128,
        multiples=(64, 64),
        reason="Marlin kernels for experts",
        source=_MOE,
    ),
    _fast(
        weights=("int4", "int8"),
        groups=_MARLIN_GROUPS,
        experts=False,
        multiples=(64, 128),
        reason="Marlin kernels",
        source=_MARLIN,
    ),
    _no(
        weights=("int4", "int8"),
        groups=_MARLIN_GROUPS,
        reason="Marlin wants matrices of multiples of 64 x 128, and pads none there",
        source=_MARLIN,
    ),
    _no(
        weights=("int4", "int8"),
        reason="Marlin has groups of 32, 64, 128 and channels; {linear} has others",
        source=_MARLIN,
    ),
    _no(reason="4 and 8 bits alone have a kernel there, not {linear}", source=_WNA16 + ": WNA16_SUPPORTED_BITS"),
)

ENGINE = Engine(
    title="SGLang",
    release="0.5.23",
    rules=(*_OTHER_FORMATS, *_COMPRESSED_TENSORS),
    ordinary=_fast(reason="an ordinary checkpoint, as large as the original", source=""),
    caches={"own": "the cache's own entry (quantkit_kv_cache) is ignored without a word: 16-bit keys and values"},
)
