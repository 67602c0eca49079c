"""Reference for quantized activations: fake quantization of a linear's inputs, and calibrated input scales.

Tests compare the kernels with these functions.
Source: compressed-tensors `quantization/lifecycle/forward.py` and `quantization/utils/helpers.py`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.numerics.affine import to_codes
from quantkit.numerics.scales import global_scale, round_scale, storable_scale, two_level_scale
from quantkit.numerics.scheme import ActivationScheme


def fake_quantize_inputs(values: Tensor, scheme: ActivationScheme, scale: Tensor | None = None) -> Tensor:
    """Return the values that a linear sees when its input is quantized at run time.

    Args:
        values: (..., K); not modified.
        scheme: number type and granularity.
        scale: (1,) calibrated scale, or global scale for types with two levels of scales; required only if
            `scheme.is_calibrated`.
    Returns:
        Same shape and dtype.
    Raises:
        CheckpointError: the scale is missing.
    """
    if scheme.is_calibrated and scale is None:
        raise CheckpointError(
            f"{scheme.describe()} activations need a calibrated input scale, but the checkpoint has none"
        )
    if scheme.group_size is not None and values.shape[-1] % scheme.group_size == 0:
        groups = values.reshape(*values.shape[:-1], -1, scheme.group_size)
        return _fake_quantize(groups, scheme, scale).flatten(-2)
    return _fake_quantize(values, replace(scheme, group_size=scheme.dtype.group), scale)


def _fake_quantize(values: Tensor, scheme: ActivationScheme, scale: Tensor | None) -> Tensor:
    dtype, single = scheme.dtype, values.float()
    if not scheme.dynamic and scale is not None:
        step = scale.float()
    else:
        largest = single.abs().amax(dim=-1, keepdim=True)
        if scale is None:
            step = storable_scale(largest, dtype, torch.float32, None)
        else:  # the global scale of a type with two levels
            step = two_level_scale(largest / dtype.half_range, scale.float())
    return (to_codes(single, step, None, dtype) * step).to(values.dtype)


def input_scale(largest: Tensor, scheme: ActivationScheme, scale_dtype: torch.dtype) -> Tensor:
    """Return the calibrated scale of an input, from the largest magnitude that it must represent.

    Args:
        largest: one element, float32, > 0.
        scheme: scheme of the input; `is_calibrated` must hold.
        scale_dtype: dtype in which scales are stored; a global scale is always float32.
    Returns:
        (1,) in the stored dtype.
    """
    if scheme.dtype.scale == "e4m3":
        return global_scale(largest, scheme.dtype)
    return round_scale(largest.float() / scheme.dtype.half_range, scale_dtype).to(scale_dtype).reshape(1)
