"""Text Generation Inference 3.3.7 (in maintenance mode), from reading its sources; nothing was run.

`layers` is `server/text_generation_server/layers`.
"""

from functools import partial

from quantkit.engines.base import Engine, Groups, Reads, Rule

_CT = "layers/compressed_tensors/loader.py: _create_loader_for_group"
_MARLIN = "layers/marlin/gptq.py: can_use_gptq_marlin"
_MARLIN_GROUPS: tuple[Groups, ...] = ("channel", 32, 64, 128)
_fast, _slow, _no = (partial(Rule, reads=reads) for reads in (Reads.FAST, Reads.SLOW, Reads.NO))

_RULES = (
    _no(format=("gguf",), reason="it reads Hugging Face checkpoints only", source="utils/quantization.py"),
    _no(format=("modelopt", "torchao", "mxfp4"), reason="no loader of {format} there", source="utils/quantization.py"),
    _fast(
        format=("gptq", "gptq-v2"),
        weights=("int4", "int8"),
        zero_points=False,
        groups=_MARLIN_GROUPS,
        capability=(80, 999),
        reason="Marlin kernels",
        source=_MARLIN,
    ),
    _fast(
        format=("awq",),
        weights=("int4",),
        groups=_MARLIN_GROUPS,
        capability=(80, 999),
        reason="Marlin kernels",
        source=_MARLIN,
    ),
    _no(format=("gptq-v2",), reason="it reads zero points as version 1 stores them", source="layers/gptq/__init__.py"),
    _slow(format=("gptq", "awq", "bitsandbytes"), reason="kernels slower than Marlin's", source="layers/gptq"),
    _fast(
        weights=("fp8",),
        groups=("channel", "tensor"),
        reason="fp8 products from compute capability 8.9 on; before, Marlin kernels",
        source="layers/compressed_tensors/w8an_fp.py",
    ),
    _fast(
        weights=("int4", "int8"),
        inputs=("",),
        groups=_MARLIN_GROUPS,
        zero_points=False,
        capability=(80, 999),
        reason="Marlin kernels",
        source="layers/compressed_tensors/wna16_int.py",
    ),
    _slow(
        weights=("int4",),
        inputs=("",),
        zero_points=True,
        groups=_MARLIN_GROUPS,
        capability=(80, 999),
        reason="kernels slower than Marlin's",
        source="layers/compressed_tensors/wna16_int.py",
    ),
    _fast(
        weights=("int8",),
        inputs=("int8",),
        static=False,
        capability=(75, 90),
        reason="int8 products",
        source="layers/compressed_tensors/w8a8_int.py",
    ),
    _no(reason="no loader for {linear} there", source=_CT),
)

ENGINE = Engine(
    title="TGI",
    release="3.3.7",
    rules=_RULES,
    ordinary=_fast(reason="an ordinary checkpoint, as large as the original", source=""),
    caches={"own": "the cache's own entry (quantkit_kv_cache) is ignored: 16-bit keys and values"},
)
