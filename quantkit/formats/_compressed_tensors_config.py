"""What config.json says about a compressed-tensors checkpoint, in both directions: our schemes and its config groups.

The library's own classes build and validate `quantization_config`. No tensors here; those are in `compressed_tensors`.
Source: compressed-tensors `quantization/quant_{args,scheme,config}.py` and `utils/match.py` for who wins;
vLLM `layers/quantization/compressed_tensors/utils.py` (`find_matched_target`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import compressed_tensors
import torch
from compressed_tensors.compressors import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

from quantkit.errors import SchemeError
from quantkit.numerics.dtype import DTYPES, FP4, FP8, DType
from quantkit.numerics.scheme import ActivationScheme, LinearScheme, Rule, Scheme, WeightScheme

PACKED, _INT, _FLOAT, _MIXED = "pack-quantized", "int-quantized", "float-quantized", "mixed-precision"
NVFP4, MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
_READABLE = (PACKED, _INT, _FLOAT, "naive-quantized", _MIXED, NVFP4, MXFP4)
_FP4_GROUPS = {16: NVFP4, 32: MXFP4}
_DENSE_PACKING_SINCE = "0.18"
_LINEAR = "Linear"  # a target or ignored name that means every linear


def make_config(linears: Mapping[str, LinearScheme], left_alone: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` entry of config.json; nothing when no linear is quantized.

    With several schemes every group lists its modules by name and none says "Linear": vLLM looks for a class
    before it takes its fused modules (qkv_proj) apart, so that group would take in the modules of the others.

    Args:
        linears: scheme of each quantized linear by full module name.
        left_alone: full names of linears that are not quantized.
    Raises:
        SchemeError: compressed-tensors cannot hold one of the schemes, or its readers not all of them together.
    """
    if not linears:
        return {}
    members: dict[LinearScheme, list[str]] = {}
    for name, scheme in linears.items():
        members.setdefault(scheme, []).append(name)
    if len(members) > 1 and any(not scheme.weight.symmetric for scheme in members):
        # Whatever wrote it, transformers 5.23 with compressed-tensors 0.18 to 0.20 cannot read it; see below.
        raise SchemeError(
            "zero points beside weights of another scheme do not load in transformers: set weights.symmetric=true, "
            "or give all linears the same numbers (leaving some alone is fine), or set format=dense"
        )
    groups = {
        f"group_{number}": _group(scheme, [_LINEAR] if len(members) == 1 else names)
        for number, (scheme, names) in enumerate(members.items())
    }
    layouts = sorted({find_layout(scheme) for scheme in members})
    config = QuantizationConfig(
        config_groups=groups,
        format=layouts[0] if len(layouts) == 1 else _MIXED,
        quantization_status="compressed",
        ignore=list(left_alone),
    )
    fields = config.model_dump(mode="json")
    # Known to newer versions only and without meaning here, so older readers need not meet it.
    fields.pop("moe_sparsity_config", None)
    if any(not scheme.weight.symmetric for scheme in members):
        # transformers 5 sets the model up without data, where the library does not pack the zero points, and then
        # finds shapes that differ. Asked to decode while loading it does not come that way, but decodes every module
        # by the first scheme. vLLM reads its fields by name and not this one.
        fields["dequantize"] = True
    constants = {"version": compressed_tensors.__version__, "sparsity_config": {}, "transform_config": {}}
    return {"quantization_config": {**fields, **constants}}


def read_config(config: Mapping[str, Any]) -> Scheme | None:
    """The scheme that a config.json describes; None when it is not of compressed-tensors.

    The library lets exact names win over expressions and expressions over classes, and within a kind the first in
    alphabetical order; our last rule wins, so the rules come in the opposite order.

    Args:
        config: contents of config.json.
    Raises:
        SchemeError: it is of compressed-tensors, but of a kind that cannot be decoded.
    """
    section = config.get("quantization_config")
    if not isinstance(section, Mapping) or section.get("quant_method") != "compressed-tensors":
        return None
    parsed = _parse(section)
    targets = {
        target: _linear_scheme(name, group) for name, group in parsed.config_groups.items() for target in group.targets
    }
    if not targets:
        raise SchemeError("quantization_config has no config_groups with targets: nothing says how weights are stored")
    default = targets.pop(_LINEAR, None)
    rules = [] if default is not None else [Rule(pattern="*", linear=None)]
    for target in sorted(targets, key=lambda name: (name.startswith("re:"), name), reverse=True):
        if "." not in target and target[:1].isupper():
            raise SchemeError(f"quantization_config targets the class {target!r}; only {_LINEAR!r} can be decoded")
        rules.append(Rule(pattern=_pattern(target), linear=targets[target]))
    rules += [Rule(pattern=_pattern(name), linear=None) for name in parsed.ignore or ()]
    return Scheme(default=default or next(iter(targets.values())), rules=tuple(rules))


def find_layout(scheme: LinearScheme) -> str:
    """Name of the format that holds this scheme.

    Raises:
        SchemeError: none does; says which recipe field to change.
    """
    weight, activation = scheme.weight, scheme.activation
    if weight.dtype == FP4 and weight.group_size in _FP4_GROUPS and activation is None:
        return _FP4_GROUPS[weight.group_size]
    if weight.dtype.kind == "float":
        if weight.block_rows > 1 and weight.dtype == FP8:
            return _FLOAT
        if weight.group_size is not None:
            raise SchemeError(
                f"compressed-tensors stores {weight.dtype.name} weights with one scale per channel, "
                f"not {weight.describe()}; set weights.group_size to 'channel'"
            )
        if activation is not None and activation.dtype != weight.dtype:
            raise SchemeError(
                f"{activation.dtype.name} activations do not go with {weight.dtype.name} weights; "
                f"set activations to {weight.dtype.name} or leave them out"
            )
        return _FLOAT
    if weight.dtype.bits == 3 and not _packs_densely():
        raise SchemeError(
            f"3-bit weights need compressed-tensors>={_DENSE_PACKING_SINCE}, which packs them without unused bits; "
            f"installed: {compressed_tensors.__version__}; pip install -U compressed-tensors"
        )
    if activation is None:
        return PACKED
    if activation.dtype.kind == "float":
        raise SchemeError(
            f"{activation.dtype.name} activations need {activation.dtype.name} weights, not {weight.describe()}; "
            f"set weights.dtype to {activation.dtype.name} or leave activations out"
        )
    if activation.dtype.bits != 8 or weight.dtype.bits != 8 or weight.group_size is not None or not weight.symmetric:
        raise SchemeError(
            f"{activation.dtype.name} activations need symmetric int8 weights with one scale per channel, "
            f"not {weight.describe()}; set weights.dtype to int8, weights.group_size to 'channel' and "
            "weights.symmetric to true, or leave activations out"
        )
    return _INT


@functools.cache
def _packs_densely() -> bool:
    """Whether the installed library packs 64 codes of 3 bits into 6 words; older ones leave bits unused and take 7."""
    return bool(pack_to_int32(torch.zeros(1, 64, dtype=torch.int8), 3).shape[1] == 6)


def _group(scheme: LinearScheme, targets: list[str]) -> QuantizationScheme:
    """One config group in the library's own classes, which check it."""
    weight = scheme.weight
    layout = find_layout(scheme)
    shared: dict[str, Any] = {"type": weight.dtype.kind, "symmetric": weight.symmetric, "dynamic": False}
    if weight.block_rows > 1:
        shared |= {"strategy": "block", "block_structure": [weight.block_rows, weight.group_size]}
    elif layout == NVFP4:
        shared |= {"strategy": "tensor_group", "group_size": weight.group_size, "scale_dtype": torch.float8_e4m3fn}
    else:
        strategy = "channel" if weight.group_size is None else "group"
        shared |= {"strategy": strategy, "group_size": weight.group_size}
        shared |= {"scale_dtype": torch.uint8} if layout == MXFP4 else {}
    weights = QuantizationArgs(num_bits=weight.dtype.bits, **shared)
    inputs = None
    if scheme.activation is not None:
        dtype = scheme.activation.dtype
        size = scheme.activation.group_size
        kind = {"strategy": "token"} if size is None else {"strategy": "group", "group_size": size}
        inputs = QuantizationArgs(num_bits=dtype.bits, type=dtype.kind, symmetric=True, dynamic=True, **kind)
    return QuantizationScheme(targets=targets, weights=weights, input_activations=inputs, format=layout)


def _parse(section: Mapping[str, Any]) -> QuantizationConfig:
    """`quantization_config` in the library's own classes, preset names resolved."""
    fields = {key: value for key, value in section.items() if key in QuantizationConfig.model_fields}
    try:
        parsed = QuantizationConfig.model_validate(fields)
    except (ValueError, KeyError, TypeError, AttributeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise SchemeError(f"quantization_config is not one that compressed-tensors accepts: {reason}") from error
    formats = [parsed.format] if "format" in section else []
    formats += [group.format for group in parsed.config_groups.values() if group.format is not None]
    for name in map(_plain, formats):
        if name not in _READABLE:
            raise SchemeError(f"compressed-tensors format {name!r} cannot be decoded; can be: {', '.join(_READABLE)}")
    status = _plain(parsed.quantization_status)
    if "quantization_status" in section and status != "compressed":
        raise SchemeError(
            f"quantization_status is {status!r}, so the weights are not stored quantized: nothing to decode"
        )
    sparsity = section.get("sparsity_config") or {}
    sparse = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else sparsity
    if sparse != "dense":
        raise SchemeError(f"sparsity_config has format {sparse!r}; sparse checkpoints cannot be decoded")
    if section.get("transform_config"):
        raise SchemeError("transform_config is not empty; checkpoints with transforms (rotations) cannot be decoded")
    return parsed


def _plain(value: Any) -> str:
    """The text of an enum member or string."""
    return str(getattr(value, "value", value))


def _linear_scheme(name: str, group: QuantizationScheme) -> LinearScheme:
    """Our scheme of a config group.

    Raises:
        SchemeError: it has none; names the group and what stands in the way.
    """
    weights, inputs = group.weights, group.input_activations
    if weights is None or group.output_activations is not None:
        raise SchemeError(f"config group {name!r} has no weights or quantizes outputs; it cannot be decoded")
    strategy = _plain(weights.strategy)
    if strategy not in ("channel", "group", "block", "tensor_group") or weights.dynamic:
        raise SchemeError(
            f"config group {name!r} has weights of strategy {strategy!r}; only channel, group, block and tensor_group "
            "can be decoded"
        )
    if weights.actorder is not None and _plain(weights.actorder) in ("group", "dynamic"):
        raise SchemeError(f"config group {name!r} has actorder 'group'; groups in activation order cannot be decoded")
    activation = None
    if inputs is not None:
        size = inputs.group_size if _plain(inputs.strategy) == "group" else None
        known = _plain(inputs.strategy) == "token" or size is not None
        if not known or inputs.dynamic is not True or not inputs.symmetric:
            raise SchemeError(
                f"config group {name!r} has input activations of strategy {_plain(inputs.strategy)!r}, "
                f"dynamic={inputs.dynamic}, symmetric={inputs.symmetric}; only dynamic symmetric per token is known"
            )
        activation = ActivationScheme(dtype=_dtype(name, inputs), group_size=size)
    block, group_size = weights.block_structure, weights.group_size if strategy != "channel" else None
    if strategy == "block":
        if not block or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
            raise SchemeError(f"config group {name!r} has block_structure {block!r}; expected rows and columns")
        group_size = block[1]
    weight = WeightScheme(
        dtype=_dtype(name, weights),
        group_size=group_size,
        symmetric=weights.symmetric,
        block_rows=block[0] if strategy == "block" else 1,
    )
    scheme = LinearScheme(weight=weight, activation=activation)
    find_layout(scheme)
    return scheme


def _dtype(name: str, args: QuantizationArgs) -> DType:
    kind, bits = _plain(args.type), args.num_bits
    for dtype in (*DTYPES.values(), FP4):
        if (dtype.kind, dtype.bits) == (kind, bits):
            return dtype
    known = ", ".join(DTYPES)
    raise SchemeError(f"config group {name!r} has {kind} numbers of {bits} bits; only these can be decoded: {known}")


def _pattern(target: str) -> str:
    """A target or ignored name of the library as the pattern of a `Rule`."""
    if target == _LINEAR:
        return "*"
    if not target.startswith("re:"):
        return target if not set(target) & set("*?[") else f"re:{re.escape(target)}"
    # The library matches from the start of a name, a rule matches all of it.
    pattern = f"(?:{target[3:]}).*"
    try:
        re.compile(pattern)
    except re.error as error:
        raise SchemeError(f"quantization_config has the expression {target!r}, which is not valid: {error}") from error
    return f"re:{pattern}"
