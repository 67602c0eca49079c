"""transformers 5.23.0 with compressed-tensors 0.20, and GPTQModel for GPTQ and AWQ; run on CPUs.

`integrations` and `quantizers` are transformers' own. It decodes weights and keeps activations as they are.
"""

from functools import partial

from quantkit.engines.base import CPU, Engine, Reads, Rule

_EXPERTS = "integrations/compressed_tensors.py: CompressedTensorsDequantize.convert"
_DECODED = "with compressed-tensors installed"
_slow, _wrong, _no = (
    partial(Rule, reads=reads, capability=(CPU, 999)) for reads in (Reads.SLOW, Reads.WRONG, Reads.NO)
)
_experts_slow, _experts_wrong, _experts_no = (
    partial(rule, format=("compressed-tensors",), experts=True) for rule in (_slow, _wrong, _no)
)

_RULES = (
    _slow(
        format=("gptq", "gptq-v2", "awq"),
        reason="with gptqmodel installed",
        source="quantizers/quantizer_gptq.py, quantizer_awq.py: validate_environment",
    ),
    _slow(
        format=("gguf",),
        reason="decoded to 16 bits while loading",
        source="modeling_gguf_pytorch_utils.py",
    ),
    _slow(
        format=("bitsandbytes", "torchao", "fp8", "mxfp4"),
        reason="with the library of {format} installed",
        source="quantizers/auto.py: AUTO_QUANTIZER_MAPPING",
    ),
    _no(format=("modelopt",), reason="it has no loader of {format}", source="quantizers/auto.py"),
    _experts_no(
        zero_points=True,
        reason="its decoder is not given zero points of experts and stops; set weights.symmetric=true, or format=dense",
        source=_EXPERTS,
    ),
    _experts_no(
        compressed_experts=False,
        reason="it does not load compressed experts of this family, whoever wrote them; set format=dense",
        source="conversion_mapping.py; " + _EXPERTS,
    ),
    _experts_no(
        weights=("int8", "int4"),
        inputs=("int8",),
        reason="INT8 experts with INT8 activations: it has no rule that joins them; take rtn-int8 or fp8-dynamic",
        source=_EXPERTS,
    ),
    _experts_wrong(
        weights=("nvfp4",),
        reason="it decodes NVFP4 experts without their global scale, to other numbers",
        source=_EXPERTS,
    ),
    _experts_no(
        weights=("fp8", "mxfp8"),
        groups=("block", 32),
        reason="FP8 experts with scales of blocks or groups are not decoded",
        source=_EXPERTS,
    ),
    _experts_slow(
        static=True,
        reason="with compressed-tensors installed; input scales of experts are dropped, activations stay as they are",
        source=_EXPERTS,
    ),
    _slow(
        weights=("fp8", "nvfp4", "mxfp4", "mxfp8"),
        reason=_DECODED + ", decoded to bfloat16",
        source="quantizers/quantizer_compressed_tensors.py",
    ),
    _slow(reason=_DECODED, source="quantizers/quantizer_compressed_tensors.py"),
)

ENGINE = Engine(
    title="transformers",
    release="5.23.0",
    rules=_RULES,
    ordinary=_slow(reason="an ordinary checkpoint, as large as the original", source=""),
    caches={
        "own": "the cache's own entry (quantkit_kv_cache) is ignored: 16-bit keys and values",
    },
    devices=False,
)
