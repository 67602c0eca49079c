"""Convert between quantkit's schemes and the config groups in config.json of a compressed-tensors checkpoint.

The library's own classes build and validate `quantization_config`. Module `compressed_tensors` handles the tensors.
Source: compressed-tensors `quantization/quant_{args,scheme,config}.py` and `utils/match.py` (precedence of targets);
vLLM `layers/quantization/compressed_tensors/utils.py` (`find_matched_target`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from quantkit.errors import SchemeError
from quantkit.formats._compressed_tensors_layout import MIXED, READABLE, find_layout, library_version
from quantkit.numerics.dtype import DTYPES, FP8, DType
from quantkit.numerics.scheme import ActivationScheme, LinearScheme, Rule, Scheme, WeightScheme

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

_LINEAR = "Linear"  # a target or ignored name that means every linear


def compressed_tensors_section(linears: Mapping[str, LinearScheme], ignored: Sequence[str]) -> dict[str, Any]:
    """Build the `quantization_config` for one or more quantized linears.

    With several schemes, every group lists its modules by name instead of targeting the class "Linear". vLLM matches
    classes before it splits its fused modules (qkv_proj), so a class target would also match modules of other groups.

    Args:
        linears: scheme of each quantized linear, keyed by full module name.
        ignored: full names of linears that are not quantized.
    Raises:
        SchemeError: compressed-tensors cannot hold one of the schemes, or its loaders do not support the combination.
    """
    members: dict[LinearScheme, list[str]] = {}
    # Experts first: if no group targets a class or an expression, transformers decodes experts with the first group.
    for name, scheme in sorted(linears.items(), key=lambda item: ".experts." not in item[0]):
        members.setdefault(scheme, []).append(name)
    has_zero_points = any(not scheme.weight.symmetric for scheme in members)
    if len(members) > 1 and has_zero_points:
        # transformers 5.23 with compressed-tensors 0.18 to 0.20 cannot read such files, whichever tool wrote them.
        raise SchemeError(
            "transformers cannot load weights with zero points together with weights of a different scheme; set "
            "weights.symmetric=true, or give all linears one scheme (ignoring some is fine), or set format=dense"
        )
    groups = {
        f"group_{number}": _group(scheme, [_LINEAR] if len(members) == 1 else names)
        for number, (scheme, names) in enumerate(members.items())
    }
    layouts = sorted({find_layout(scheme) for scheme in members})
    # transformers 5 creates the model without data. The library then does not pack the zero points, so their shapes
    # differ from those in the file. With `dequantize`, transformers skips this step, but decodes every module with the
    # first scheme. vLLM does not read `dequantize`.
    decode = {"dequantize": True} if has_zero_points else {}
    return _section(groups, layouts[0] if len(layouts) == 1 else MIXED, ignored, **decode)


def _ignored(name: str) -> str:
    """Return the entry of `ignore` for a linear or, if the name ends with a dot, for all linears below that module."""
    return f"re:{re.escape(name)}" if name.endswith(".") else name


def cache_only_config() -> dict[str, Any]:
    """Return a `quantization_config` that holds the `kv_cache_scheme` of a model whose weights stay unquantized."""
    return _section({}, "dense", [])


def _section(
    groups: dict[str, QuantizationScheme], layout: str, ignored: Sequence[str], **decode: bool
) -> dict[str, Any]:
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig(
        config_groups=groups, format=layout, quantization_status="compressed", ignore=list(map(_ignored, ignored))
    )
    fields = config.model_dump(mode="json")
    # Only newer versions know this field, and it means nothing here, so older readers need not see it.
    fields.pop("moe_sparsity_config", None)
    return {**fields, **decode, "version": library_version(), "sparsity_config": {}, "transform_config": {}}


def fp8_cache_args(strategy: str) -> dict[str, Any]:
    """Return the `kv_cache_scheme` for FP8 keys and values with fixed scales: strategy "tensor" or "attn_head"."""
    fields: dict[str, Any] = _arguments(FP8, strategy=strategy).model_dump(mode="json")
    return fields


def read_compressed_tensors_section(section: Mapping[str, Any]) -> Scheme:
    """Return the scheme that a compressed-tensors `quantization_config` describes.

    In the library, exact names take precedence over regular expressions, and regular expressions over classes; within
    a kind, the alphabetically first target wins. In a `Scheme` the last matching rule wins, so the rules are in reverse
    order.

    Raises:
        SchemeError: this variant of the format cannot be decoded.
    """
    parsed = _parse(section)
    targets = {
        target: _linear_scheme(name, group) for name, group in parsed.config_groups.items() for target in group.targets
    }
    if not targets and parsed.kv_cache_scheme is not None:
        return Scheme(default=None)
    if not targets:
        raise SchemeError(
            "quantization_config has no config_groups with targets, so it does not say how weights are stored; "
            "download config.json again"
        )
    default = targets.pop(_LINEAR, None)
    # No target is the class "Linear", so modules that no target names are not quantized.
    rules = [] if default is not None else [Rule(pattern="*", linear=None)]
    for target in sorted(targets, key=lambda name: (name.startswith("re:"), name), reverse=True):
        if "." not in target and target[:1].isupper():
            raise SchemeError(f"quantization_config targets class {target!r}; the only supported class is {_LINEAR!r}")
        rules.append(Rule(pattern=_pattern(target), linear=targets[target]))
    # An ignored module is not quantized even if a target matches it. The last rule wins, so these come last.
    rules += [Rule(pattern=_pattern(name), linear=None) for name in parsed.ignore or ()]
    # A default of None would say that weights are not quantized at all; the rules already ignore every other name.
    return Scheme(default=default or next(iter(targets.values())), rules=tuple(rules))


def _group(scheme: LinearScheme, targets: list[str]) -> QuantizationScheme:
    """Build one config group with the library's own classes, which validate it."""
    from compressed_tensors.quantization import QuantizationScheme

    weight, inputs = scheme.weight, scheme.activation
    kind = _granularity(weight.dtype, weight.group_size, "tensor" if weight.block_rows is None else "channel")
    if weight.block_rows is not None and weight.block_rows > 1:
        kind = {"strategy": "block", "block_structure": [weight.block_rows, weight.group_size]}
    arguments = None
    if inputs is not None:
        # With two levels of scales, only the global one is calibrated.
        dynamic = "local" if inputs.dtype.scale == "e4m3" else inputs.dynamic
        arguments = _arguments(
            inputs.dtype, dynamic=dynamic, **_granularity(inputs.dtype, inputs.group_size, inputs.granularity)
        )
    return QuantizationScheme(
        targets=targets,
        weights=_arguments(weight.dtype, symmetric=weight.symmetric, **kind),
        input_activations=arguments,
        format=find_layout(scheme),
    )


def _arguments(dtype: DType, *, symmetric: bool = True, dynamic: bool | str = False, **kind: Any) -> QuantizationArgs:
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(num_bits=dtype.bits, type=dtype.kind, symmetric=symmetric, dynamic=dynamic, **kind)


def _granularity(dtype: DType, group_size: int | None, ungrouped: str) -> dict[str, Any]:
    """Return the arguments of compressed-tensors' `QuantizationArgs` that say which values share a scale.

    Args:
        dtype: number type.
        group_size: inputs per scale; None = no groups.
        ungrouped: `strategy` to use if there are no groups.
    """
    if group_size is None:
        return {"strategy": ungrouped}
    if dtype.scale == "e4m3":
        return {"strategy": "tensor_group", "group_size": group_size, "scale_dtype": torch.float8_e4m3fn}
    kind = {"strategy": "group", "group_size": group_size}
    return kind | {"scale_dtype": torch.uint8} if dtype.scale == "e8m0" else kind


def _parse(section: Mapping[str, Any]) -> QuantizationConfig:
    """Parse a `quantization_config` with the library's own classes and resolve preset names."""
    from compressed_tensors.quantization import QuantizationConfig

    fields = {key: value for key, value in section.items() if key in QuantizationConfig.model_fields}
    try:
        parsed = QuantizationConfig.model_validate(fields)
    except (ValueError, KeyError, TypeError, AttributeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise SchemeError(f"the library compressed-tensors rejects quantization_config: {reason}") from error
    # Check only what the file says, because the classes have their own defaults for the format and the status.
    formats = [parsed.format] if "format" in section and parsed.config_groups else []
    formats += [group.format for group in parsed.config_groups.values() if group.format is not None]
    for name in map(_plain, formats):
        if name not in READABLE:
            raise SchemeError(f"compressed-tensors format {name!r} is not supported; supported: {', '.join(READABLE)}")
    status = _plain(parsed.quantization_status)
    if "quantization_status" in section and status != "compressed":
        raise SchemeError(f"quantization_status is {status!r}, so the checkpoint holds no compressed weights to decode")
    sparsity = section.get("sparsity_config") or {}
    sparse = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else sparsity
    if sparse != "dense":
        raise SchemeError(f"sparsity_config has format {sparse!r}; sparse checkpoints are not supported")
    if section.get("transform_config"):
        raise SchemeError("transform_config is not empty; checkpoints with transforms (rotations) are not supported")
    return parsed


def _plain(value: Any) -> str:
    """Return the value of an enum member, or a string unchanged."""
    return str(getattr(value, "value", value))


def _linear_scheme(name: str, group: QuantizationScheme) -> LinearScheme:
    """Convert a config group to a `LinearScheme`.

    Raises:
        SchemeError: no `LinearScheme` describes the group; the message names the group and the unsupported setting.
    """
    weights, inputs = group.weights, group.input_activations
    if weights is None or group.output_activations is not None:
        problem = "has no weights" if weights is None else "quantizes outputs"
        raise SchemeError(f"config group {name!r} {problem}, which is not supported")
    strategy = _plain(weights.strategy)
    if strategy not in ("tensor", "channel", "group", "block", "tensor_group") or weights.dynamic:
        raise SchemeError(
            f"config group {name!r}: weight strategy {strategy!r} is not supported; supported: tensor, channel, "
            "group, block, tensor_group"
        )
    if weights.actorder is not None and _plain(weights.actorder) in ("group", "dynamic"):
        raise SchemeError(f"config group {name!r}: actorder 'group' (groups in activation order) is not supported")
    block, rows = weights.block_structure, 1 if strategy != "tensor" else None
    group_size = weights.group_size if strategy in ("group", "tensor_group") else None
    if strategy == "block":
        if not block or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
            raise SchemeError(f"config group {name!r} has block_structure {block!r}; expected [rows, columns]")
        rows, group_size = block
    weight = WeightScheme(
        dtype=_dtype(name, weights), group_size=group_size, symmetric=weights.symmetric, block_rows=rows
    )
    scheme = LinearScheme(weight=weight, activation=None if inputs is None else _activation(name, inputs))
    # Called because it raises an error if no format holds the scheme: then the scheme cannot be decoded either.
    find_layout(scheme)
    return scheme


def _activation(name: str, inputs: QuantizationArgs) -> ActivationScheme:
    """Convert the input activations of a config group to an `ActivationScheme`."""
    strategy, dtype = _plain(inputs.strategy), _dtype(name, inputs)
    local = dtype.scale == "e4m3" and strategy == "tensor_group" and _plain(inputs.dynamic) == "local"
    grouped = strategy == "group" and inputs.dynamic is True and dtype.scale != "e4m3"
    per_token, static = strategy == "token" and inputs.dynamic is True, strategy == "tensor" and not inputs.dynamic
    if not inputs.symmetric or not (local or grouped or per_token or static):
        raise SchemeError(
            f"config group {name!r}: input activations with strategy {strategy!r}, dynamic={inputs.dynamic}, "
            f"symmetric={inputs.symmetric} are not supported; supported: symmetric, either dynamic per token or group, "
            "or static per tensor"
        )
    return ActivationScheme(
        dtype=dtype,
        granularity="tensor" if static else "token",
        dynamic=not static,
        group_size=inputs.group_size if local or grouped else None,
    )


def _dtype(name: str, args: QuantizationArgs) -> DType:
    kind, bits = _plain(args.type), args.num_bits
    for dtype in reversed(DTYPES.values()):  # types that fix their group size come last
        if (dtype.kind, dtype.bits) != (kind, bits):
            continue
        # FP4 types differ by their groups; FP8 in groups is MXFP8 only if its scales are exponents.
        if dtype.group is None or (dtype.group == args.group_size and (bits == 4 or args.scale_dtype == torch.uint8)):
            return dtype
    known = ", ".join(DTYPES)
    raise SchemeError(f"config group {name!r}: {bits}-bit {kind} is not supported; supported: {known}")


def _pattern(target: str) -> str:
    """Convert a target, or an ignored name, of the library to the pattern of a `Rule`."""
    if target == _LINEAR:
        return "*"
    if not target.startswith("re:"):
        # The library takes names literally, but a rule would read these characters as wildcards.
        return target if not set(target) & set("*?[") else f"re:{re.escape(target)}"
    # The library matches from the start of a name, but a rule must match the whole name.
    return f"re:(?:{target[3:]}).*"
