"""What config.json says about a GPTQ checkpoint, in both directions, and what AutoRound calls the same layout.

One set of numbers for all linears, and `dynamic` for those that differ: {"-:regex": {}} ignores modules,
{"+:regex": {"bits": 8}} changes fields. The expressions match from the start of a module's name.
Source: GPTQModel `quantization/config.py`; AutoRound `export/export_to_autoround`; vLLM `gptq_marlin.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.errors import SchemeError
from quantkit.numerics.dtype import DTYPES
from quantkit.numerics.patterns import is_exact
from quantkit.numerics.scheme import LinearScheme, Rule, Scheme, WeightScheme

GPTQ_BITS = (2, 3, 4, 8)
_HEAD = "lm_head"
_AUTOROUND = ("auto-round", "intel/auto-round")  # its `quant_method`, whatever the layout


def gptq_section(
    linears: Mapping[str, LinearScheme], ignored: Sequence[str], version: str, *, group_order: bool
) -> dict[str, Any]:
    """The `quantization_config` of at least one quantized linear.

    Args:
        linears: scheme of each quantized linear by full module name.
        ignored: full names of linears that are not quantized.
        version: "gptq" or "gptq_v2".
        group_order: whether groups follow the activations' order.
    """
    common = Counter(linears.values()).most_common(1)[0][0].weight
    dynamic: dict[str, Any] = {f"-:{_exactly(name)}": {} for name in ignored if not _is_head(name)}
    for name, scheme in linears.items():
        if scheme.weight != common:
            dynamic[f"+:{_exactly(name)}"] = _numbers(scheme.weight)
    section = {
        "quant_method": "gptq",
        "checkpoint_format": version,
        "format": version,
        **_numbers(common),
        "desc_act": group_order,
        "lm_head": any(_is_head(name) for name in linears),
        "pack_dtype": "int32",
        "meta": {"quantizer": ["quantkit"]},
    }
    return {**section, "dynamic": dynamic} if dynamic else section


def read_gptq_section(section: Mapping[str, Any]) -> Scheme:
    """The scheme of a `quantization_config` of which `find_version` knows the version.

    Raises:
        SchemeError: of a kind that cannot be decoded.
    """
    default = _weight(section, {})
    rules = [] if section.get(_HEAD) else [Rule(pattern=f"re:(.*\\.)?{_HEAD}", linear=None)]
    dynamic = section.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise SchemeError(f"quantization_config.dynamic is a {type(dynamic).__name__}, not an object of expressions")
    # GPTQModel takes the first expression that matches, a Scheme the last.
    for expression, changes in reversed(list(dynamic.items())):
        rules.append(_rule(expression, changes, section))
    extra = section.get("extra_config") or {}
    for name, changes in extra.items() if isinstance(extra, Mapping) else ():
        bits = changes.get("bits") if isinstance(changes, Mapping) else None
        ignored = type(bits) is int and bits >= 16
        rules.append(Rule(pattern=name, linear=None if ignored else LinearScheme(weight=_weight(section, changes))))
    return Scheme(default=LinearScheme(weight=default), rules=tuple(rules))


def find_version(section: Mapping[str, Any]) -> str | None:
    """ "gptq", "gptq_v2", or None when a `quantization_config` is of another method.

    Raises:
        SchemeError: it is GPTQ in a layout of one kernel (Marlin, ...), which cannot be decoded.
    """
    method = section.get("quant_method")
    if method in _AUTOROUND:
        packing = str(section.get("packing_format", ""))
        return {"auto_round:auto_gptq": "gptq", "auto_round:gptqmodel": "gptq_v2", "auto_round": "gptq_v2"}.get(packing)
    if method != "gptq":
        return None
    version = section.get("checkpoint_format") or section.get("format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise SchemeError(
            f"quantization_config.checkpoint_format is {version!r}, a layout of one kernel; "
            "can be decoded: 'gptq', 'gptq_v2'"
        )
    return str(version)


def read_group_size(value: Any) -> int | None:
    """A group size as these formats write it: -1 means one scale per channel.

    Raises:
        SchemeError: it is no whole number, or less than -1.
    """
    if type(value) is not int or value == 0 or value < -1:
        raise SchemeError(
            f"quantization_config.group_size is {value!r}; expected a positive whole number, "
            "or -1 for one scale per channel"
        )
    return None if value == -1 else value


def write_group_size(weight: WeightScheme) -> int:
    """Inverse of `read_group_size`."""
    return -1 if weight.group_size is None else weight.group_size


def _numbers(weight: WeightScheme) -> dict[str, Any]:
    return {
        "bits": weight.dtype.bits,
        "group_size": write_group_size(weight),
        "sym": weight.symmetric,
    }


def _weight(section: Mapping[str, Any], changes: Any) -> WeightScheme:
    fields = {**section, **changes} if isinstance(changes, Mapping) else section
    bits, symmetric = fields.get("bits"), fields.get("sym", True)
    if type(bits) is not int or bits not in GPTQ_BITS:
        raise SchemeError(f"quantization_config.bits is {bits!r}; can be decoded: {', '.join(map(str, GPTQ_BITS))}")
    if type(symmetric) is not bool:
        raise SchemeError(f"quantization_config.sym is {symmetric!r}; expected true or false")
    return WeightScheme(
        dtype=DTYPES[f"int{bits}"],
        group_size=read_group_size(fields.get("group_size", -1)),
        symmetric=symmetric,
    )


def _rule(expression: Any, changes: Any, section: Mapping[str, Any]) -> Rule:
    sign, _, pattern = expression.partition(":")
    if sign not in ("+", "-"):
        sign, pattern = "+", expression
    name = re.sub(r"\\(.)", r"\1", pattern[1:-1])
    # A plain name, as we write it, is not an expression: there are as many as linears.
    full = name if is_exact(name) and pattern == _exactly(name) else f"re:(?:{pattern}).*"
    return Rule(pattern=full, linear=None if sign == "-" else LinearScheme(weight=_weight(section, changes)))


def _exactly(name: str) -> str:
    return f"^{re.escape(name)}$"


def _is_head(name: str) -> bool:
    return name.rpartition(".")[2] == _HEAD
