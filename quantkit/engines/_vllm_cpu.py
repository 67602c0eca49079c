"""What vLLM 0.32.0's CPU build reads, which was run without AMX; with AMX from reading its sources.

`layers` is `vllm/model_executor/layers`, `kernels` is `vllm/model_executor/kernels/linear`.
"""

from functools import partial

from quantkit.engines.base import AMX, CPU, Reads, Rule

_EXPERTS = "layers/fused_moe/experts/cpu_moe.py: "
_NO_EXPERTS = "No WNA16 MoE backend supports the deployment configuration"
_INTEGERS = ("int2", "int3", "int4", "int5", "int6", "int8")

_fast, _slow, _no = (partial(Rule, reads=r, capability=(CPU, AMX)) for r in (Reads.FAST, Reads.SLOW, Reads.NO))
_amx_slow = partial(Rule, reads=Reads.SLOW, capability=(AMX, AMX))

ON_CPU = (
    _no(
        weights=("int4",),
        inputs=("",),
        experts=True,
        zero_points=True,
        reason="experts with zero points have no CPU kernel",
        source=_EXPERTS + "CPUExpertsInt4",
        error=_NO_EXPERTS,
    ),
    _amx_slow(
        weights=("int4",),
        inputs=("",),
        experts=True,
        groups=("channel", 64, 128, 256),
        reason="experts of int4 by AMX",
        source=_EXPERTS + "CPUExpertsInt4",
    ),
    _no(
        weights=_INTEGERS,
        inputs=("",),
        experts=True,
        reason="experts of integers have CPU kernels with AMX only, in int4 and groups of 64, 128, 256 or channels",
        source=_EXPERTS + "CPUExpertsInt4._supports_current_device",
        error=_NO_EXPERTS,
    ),
    _no(
        weights=("int8",),
        inputs=("int8",),
        experts=True,
        reason="experts of int8 have no CPU kernel",
        source="layers/fused_moe/oracle/int8.py",
        error="No Int8 MoE backend supports the deployment configuration",
    ),
    _amx_slow(
        weights=("fp8",),
        inputs=("fp8",),
        experts=True,
        groups=("block",),
        reason="experts of fp8 in blocks by AMX, activations in 16 bits",
        source=_EXPERTS + "CPUExpertsFp8",
    ),
    _no(
        weights=("fp8",),
        experts=True,
        reason="experts of fp8 have CPU kernels with AMX only, in blocks",
        source=_EXPERTS + "CPUExpertsFp8._supports_current_device",
        error="Unsupported FP8 MoE backend: NONE",
    ),
    _fast(
        weights=("int4",),
        inputs=("",),
        multiples=(32, 32),
        reason="CPU kernels for 4-bit integers",
        source="kernels/mixed_precision/cpu.py: CPUWNA16LinearKernel.can_implement",
    ),
    _no(
        weights=_INTEGERS,
        inputs=("",),
        reason="the CPU build has kernels for int4 in multiples of 32, not for {linear}",
        source="kernels/mixed_precision/cpu.py: CPUWNA16LinearKernel.can_implement",
        error="not supported by CPUWNA16",
    ),
    _fast(
        weights=("int4",),
        inputs=("int8",),
        reason="4-bit products of torch, int8 activations",
        source="kernels/mixed_precision/dynamic_4bit.py: can_implement",
    ),
    _no(
        weights=("int4",),
        inputs=("fp8",),
        reason="int4 with fp8 activations has no CPU kernel",
        source="layers/quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts",
        error="No compressed-tensors compatible scheme was found",
    ),
    _fast(
        weights=("int8",),
        inputs=("int8",),
        reason="int8 products",
        source="kernels/scaled_mm/cpu.py: CPUInt8ScaledMMLinearKernel",
    ),
    _slow(
        weights=("fp8",),
        inputs=("fp8",),
        groups=("channel",),
        static=False,
        reason="fp8 products of torch",
        source="kernels/scaled_mm/pytorch.py: ChannelWiseTorchFP8ScaledMMLinearKernel",
    ),
    _amx_slow(
        weights=("fp8",),
        inputs=("fp8",),
        groups=("block", "tensor"),
        reason="fp8 by AMX, activations in 16 bits",
        source="kernels/scaled_mm/cpu.py: CPUFp8BlockScaledMMKernel, CPUFp8PerTensorScaledMMLinearKernel",
    ),
    _no(
        weights=("fp8",),
        inputs=("fp8",),
        groups=("block",),
        reason="fp8 in blocks needs a CPU with AMX tiles; take fp8-dynamic",
        source="kernels/scaled_mm/cpu.py: CPUFp8BlockScaledMMKernel.is_supported",
        error="requires AMX tile support",
    ),
    _no(
        weights=("fp8",),
        inputs=("fp8",),
        static=True,
        reason="the CPU build rounds no activations by calibrated scales without AMX; take fp8-dynamic",
        source="kernels/scaled_mm/pytorch.py: PerTensorTorchFP8ScaledMMLinearKernel",
        error="static_scaled_fp8_quant",
    ),
    *(
        _no(
            weights=(name,),
            inputs=inputs,
            reason="the CPU build has no kernel for {linear}",
            source=f"kernels/__init__.py: _POSSIBLE_{name.upper()}_KERNELS",
            error=error,
        )
        for name, inputs, error in (
            ("nvfp4", ("",), "Marlin FP4 not available"),
            ("nvfp4", ("nvfp4",), "Failed to find a kernel that can implement the NVFP4 linear layer"),
            ("mxfp4", (), "Failed to find a kernel that can implement the MXFP4 linear layer"),
        )
    ),
    _no(
        reason="the CPU build has no kernel for {linear}",
        source="kernels/__init__.py: _POSSIBLE_KERNELS, _POSSIBLE_FP8_KERNELS, _POSSIBLE_MXFP8_KERNELS",
    ),
)
