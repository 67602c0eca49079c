"""What vLLM 0.32.0's CPU build reads, which was run without AMX; with AMX from reading its sources.

`layers` is `vllm/model_executor/layers`, `kernels` is `vllm/model_executor/kernels/linear`.
"""

from quantkit.engines.base import AMX, CPU, read_rules

ON_CPU = read_rules(
    """
no weights=int4 inputs=16-bit zero_points=yes experts=yes
    experts with zero points have no CPU kernel
    layers/fused_moe/experts/cpu_moe.py: CPUExpertsInt4
    No WNA16 MoE backend supports the deployment configuration
slow weights=int4 inputs=16-bit groups=channel,64,128,256 experts=yes capability=amx,amx
    experts of int4 by AMX
    layers/fused_moe/experts/cpu_moe.py: CPUExpertsInt4
no weights=int2,int3,int4,int5,int6,int8 inputs=16-bit experts=yes
    experts of integers have CPU kernels with AMX only, in int4 and groups of 64, 128, 256 or channels
    layers/fused_moe/experts/cpu_moe.py: CPUExpertsInt4._supports_current_device
    No WNA16 MoE backend supports the deployment configuration
no weights=int8 inputs=int8 experts=yes
    experts of int8 have no CPU kernel
    layers/fused_moe/oracle/int8.py
    No Int8 MoE backend supports the deployment configuration
slow weights=fp8 inputs=fp8 groups=block experts=yes capability=amx,amx
    experts of fp8 in blocks by AMX, activations in 16 bits
    layers/fused_moe/experts/cpu_moe.py: CPUExpertsFp8
no weights=fp8 experts=yes
    experts of fp8 have CPU kernels with AMX only, in blocks
    layers/fused_moe/experts/cpu_moe.py: CPUExpertsFp8._supports_current_device
    Unsupported FP8 MoE backend: NONE
fast weights=int4 inputs=16-bit multiples=32,32
    CPU kernels for 4-bit integers
    kernels/mixed_precision/cpu.py: CPUWNA16LinearKernel.can_implement
no weights=int2,int3,int4,int5,int6,int8 inputs=16-bit
    the CPU build has kernels for int4 in multiples of 32, not for {linear}
    kernels/mixed_precision/cpu.py: CPUWNA16LinearKernel.can_implement
    not supported by CPUWNA16
fast weights=int4 inputs=int8
    4-bit products of torch, int8 activations
    kernels/mixed_precision/dynamic_4bit.py: can_implement
no weights=int4 inputs=fp8
    int4 with fp8 activations has no CPU kernel
    layers/quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts
    No compressed-tensors compatible scheme was found
fast weights=int8 inputs=int8
    int8 products
    kernels/scaled_mm/cpu.py: CPUInt8ScaledMMLinearKernel
slow weights=fp8 inputs=fp8 groups=channel static=no
    fp8 products of torch
    kernels/scaled_mm/pytorch.py: ChannelWiseTorchFP8ScaledMMLinearKernel
slow weights=fp8 inputs=fp8 groups=block,tensor capability=amx,amx
    fp8 by AMX, activations in 16 bits
    kernels/scaled_mm/cpu.py: CPUFp8BlockScaledMMKernel, CPUFp8PerTensorScaledMMLinearKernel
no weights=fp8 inputs=fp8 groups=block
    fp8 in blocks needs a CPU with AMX tiles; take fp8-dynamic
    kernels/scaled_mm/cpu.py: CPUFp8BlockScaledMMKernel.is_supported
    requires AMX tile support
no weights=fp8 inputs=fp8 static=yes
    the CPU build rounds no activations by calibrated scales without AMX; take fp8-dynamic
    kernels/scaled_mm/pytorch.py: PerTensorTorchFP8ScaledMMLinearKernel
    static_scaled_fp8_quant
no weights=nvfp4 inputs=16-bit
    the CPU build has no kernel for {linear}
    kernels/__init__.py: _POSSIBLE_NVFP4_KERNELS
    Marlin FP4 not available
no weights=nvfp4 inputs=nvfp4
    the CPU build has no kernel for {linear}
    kernels/__init__.py: _POSSIBLE_NVFP4_KERNELS
    Failed to find a kernel that can implement the NVFP4 linear layer
no weights=mxfp4
    the CPU build has no kernel for {linear}
    kernels/__init__.py: _POSSIBLE_MXFP4_KERNELS
    Failed to find a kernel that can implement the MXFP4 linear layer
no
    the CPU build has no kernel for {linear}
    kernels/__init__.py: _POSSIBLE_KERNELS, _POSSIBLE_FP8_KERNELS, _POSSIBLE_MXFP8_KERNELS
""",
    capability=(CPU, AMX),
)
