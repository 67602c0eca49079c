"""The seam of all engines: what a checkpoint holds as far as they mind, and a rule of one of them as data.

Rules are read from the sources of a release, each with the file and function that it is from; none was run on a GPU.
Architecture support is another question, which nothing here answers. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from quantkit.numerics.scheme import LinearScheme

CPU, AMX, OTHER = 0, 1, -1
"""In place of a compute capability: any CPU, one with AMX tiles, and a device that no rule is about."""
CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)
"""Compute capabilities of NVIDIA GPUs times ten that rules tell apart."""
GPU = 10
"""The least of all GPUs."""

Groups = int | Literal["channel", "tensor", "block"]
Cache = Literal["", "fp8", "own"]


class Reads(StrEnum):
    """How an engine takes a checkpoint, best first."""

    FAST = "fast"
    SLOW = "slow"
    UNKNOWN = "unknown"  # no rule is about it
    WRONG = "wrong"  # it loads and computes other numbers
    NO = "no"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredLinear:
    """One kind of quantized linear.

    Args:
        scheme: its numbers.
        shape: (N, K) of its weight; None = not known.
        expert: of a mixture of experts.
    """

    scheme: LinearScheme
    shape: tuple[int, int] | None = None
    expert: bool = False

    @property
    def groups(self) -> Groups:
        """Inputs that share a scale, or the name of what does."""
        weight = self.scheme.weight
        if weight.block_rows != 1:
            return "tensor" if weight.block_rows is None else "block"
        return "channel" if weight.group_size is None else weight.group_size

    @property
    def inputs(self) -> str:
        """Number type of the activations; "" = 16 bits."""
        return "" if self.scheme.activation is None else self.scheme.activation.dtype.name

    def describe(self) -> str:
        """Short form for messages, e.g. `int4 g128 (experts)`."""
        return self.scheme.describe() + (" (experts)" if self.expert else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredModel:
    """What a checkpoint holds, or would.

    Args:
        format: on-disk format by its name in `quantkit.formats`.
        linears: kinds of quantized linears that differ; empty for an ordinary model.
        cache: "fp8": calibrated scales of an FP8 cache in the checkpoint; "own": an entry that only quantkit reads.
        hidden_size: of the model; None = not known.
        group_order: whether groups follow the order of activations (GPTQ's desc_act).
        compressed_experts: whether transformers takes compressed experts of this family.
        other_codes: whether it has codes that `linears` does not name, as GGUF files of other tools do.
    """

    format: str
    linears: tuple[StoredLinear, ...] = ()
    cache: Cache = ""
    hidden_size: int | None = None
    group_order: bool = False
    compressed_experts: bool = True
    other_codes: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How an engine takes the linears that it is about; the first rule of an engine that applies decides.

    Args:
        reads, reason: the answer.
        source: file and function of the release that says so.
        format, weights, inputs, groups: names, number types and group sizes that it is about; () = any. An input of 16
            bits is "".
        besides: group sizes that it is not about.
        zero_points, experts, static, group_order, compressed_experts: True or False = only of models
            with or without; None = of both. `static`: inputs with calibrated scales.
        capability: lowest and highest, both included; without it, all NVIDIA GPUs.
        multiples: of N and K, where it is about linears of such sizes only.
        hidden: what the model's width is a multiple of.
        error: what the engine says where it refuses, as far as that is always the same; "" = not known.
    """

    reads: Reads
    reason: str
    source: str
    format: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    groups: tuple[Groups, ...] = ()
    besides: tuple[Groups, ...] = ()
    zero_points: bool | None = None
    experts: bool | None = None
    static: bool | None = None
    group_order: bool | None = None
    compressed_experts: bool | None = None
    capability: tuple[int, int] = (GPU, 999)
    multiples: tuple[int, int] = (1, 1)
    hidden: int = 1
    error: str = ""

    def is_about_format(self, name: str) -> bool:
        """Whether it is about all that is in this format, whatever the linears are."""
        narrow = (
            self.weights,
            self.inputs,
            self.groups,
            self.besides,
            self.capability[1] < 999,
            self.multiples != (1, 1),
        )
        asked = (self.zero_points, self.experts, self.static, self.group_order, self.compressed_experts)
        return name in self.format and not any(narrow) and all(flag is None for flag in asked)

    def covers(self, capability: int) -> bool:
        """Whether it is about a device."""
        return self.capability[0] <= capability <= self.capability[1]

    def applies(self, linear: StoredLinear, model: StoredModel, capability: int) -> bool:
        """Whether it is about this linear of a model on a device; sizes that are not known fit."""
        weight, activation = linear.scheme.weight, linear.scheme.activation
        rows, columns = linear.shape or (0, 0)
        named = ((self.format, model.format), (self.weights, weight.dtype.name), (self.inputs, linear.inputs))
        asked = (
            (self.zero_points, not weight.symmetric),
            (self.experts, linear.expert),
            (self.static, activation is not None and not activation.dynamic),
            (self.group_order, model.group_order and weight.group_size is not None),
            (self.compressed_experts, model.compressed_experts),
        )
        return (
            self.covers(capability)
            and all(not names or name in names for names, name in named)
            and (not self.groups or linear.groups in self.groups)
            and linear.groups not in self.besides
            and all(flag is None or flag is given for flag, given in asked)
            and not (rows % self.multiples[0] or columns % self.multiples[1] or (model.hidden_size or 0) % self.hidden)
        )


_SINGLE = ("zero_points", "experts", "static", "group_order", "compressed_experts", "hidden")
_WORDS: dict[str, Any] = {"yes": True, "no": False, "16-bit": "", "amx": AMX}


def read_rules(text: str, **shared: Any) -> tuple[Rule, ...]:
    """Rules of a table, in its order.

    Args:
        text: of each rule a line of how it reads and what it is about, by the names of `Rule` (`no weights=int4,int8
            experts=yes`); indented below it the reason, the source and perhaps the error. Lines indented twice go on.
        shared: what all are about that say nothing else.
    """
    rules = re.split(r"\n(?=\S)", re.sub(r"\n {8}", " ", text.strip()))
    return tuple(_read_rule(shared, *rule.split("\n    ")) for rule in rules)


def _read_rule(shared: dict[str, Any], head: str, reason: str, source: str, error: str = "") -> Rule:
    reads, *about = head.split()
    values = dict(shared)
    for name, _, given in (part.partition("=") for part in about):
        parts = tuple(_WORDS.get(part, int(part) if part.isdigit() else part) for part in given.split(","))
        values[name] = parts[0] if name in _SINGLE else parts
    return Rule(reads=Reads(reads), reason=reason, source=source, error=error, **values)


ORDINARY = Rule(reads=Reads.FAST, reason="an ordinary checkpoint, as large as the original", source="")
"""What most engines say of a model without codes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """One engine at one release.

    Args:
        title: its name.
        release: whose sources the rules are from.
        rules: in order.
        ordinary: what is said of a model without codes.
        caches: what becomes of the KV cache that a checkpoint asks for, where it is not what was asked.
        devices: whether answers depend on the device.
    """

    title: str
    release: str
    rules: tuple[Rule, ...]
    ordinary: Rule = ORDINARY
    caches: Mapping[Cache, str] = field(default_factory=dict)
    devices: bool = True


def cpu_engine(*, title: str, release: str, rules: str, loader: str) -> Engine:
    """One that is asked about CPUs only.

    Args:
        title, release: see `Engine`.
        rules: a table, see `read_rules`.
        loader: who is told what its cache is; what a checkpoint says of that is not read.
    """
    anywhere = (CPU, 999)
    return Engine(
        title=title,
        release=release,
        rules=read_rules(rules, capability=anywhere),
        ordinary=replace(ORDINARY, capability=anywhere),
        caches={"own": f"the cache's own entry (quantkit_kv_cache) is ignored: the cache is what {loader} is told"},
        devices=False,
    )
