"""Quantization schemes of weights, activations, KV caches and whole models."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from quantkit.errors import SchemeError
from quantkit.numerics.dtype import FALLBACK, DType
from quantkit.numerics.name_patterns import MAX_EXPRESSIONS, Budget, check_pattern, is_exact, matches
from quantkit.quantities import GROUP_SIZES, fitting_group


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightScheme:
    """Number type and granularity of a weight (N, K).

    Args:
        dtype: number type of the codes.
        group_size: number of inputs that share one scale; None = the whole row.
        symmetric: no zero points are stored; always true for float types.
        block_rows: number of outputs that share scales; 1 = each output has its own, None = one scale for the tensor.
        signed_scales: scales of symmetric integers may be negative. This field and those below affect which scales and
            codes are chosen, not how they are stored. So schemes that differ only in these fields compare equal.
        strict_groups: refuse a linear if `group_size` does not divide its inputs, instead of using smaller groups.
        row_scales: "e4m3" = choose scales that kernels with 8-bit scales hold exactly; see `scales.row_scales`.
    """

    dtype: DType
    group_size: int | None = None
    symmetric: bool = True
    block_rows: int | None = 1
    signed_scales: bool = field(default=True, compare=False)
    strict_groups: bool = field(default=False, compare=False)
    row_scales: Literal["", "e4m3"] = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.group_size is not None and self.group_size < 1:
            raise SchemeError(
                f"group_size {self.group_size} is not a positive number; use 'channel' for one group per row"
            )
        if self.dtype.group is not None and (self.group_size, self.block_rows) != (self.dtype.group, 1):
            raise SchemeError(
                f"{self.dtype.name} has a scale per {self.dtype.group} inputs; "
                f"set weights.group_size to {self.dtype.group}, or leave it out"
            )
        if self.dtype.scale == "ggml" and self.symmetric == self.dtype.has_minimums:
            raise SchemeError(f"{self.dtype.name} determines weights.symmetric; leave weights.symmetric out")
        if self.dtype.kind == "float" and not self.symmetric:
            raise SchemeError(f"{self.dtype.name} has no zero point: set weights.symmetric=true")
        if self.block_rows != 1 and not self.symmetric:
            raise SchemeError("a scale shared by several rows allows no zero points: set weights.symmetric=true")
        if self.block_rows is None and self.group_size is not None:
            raise SchemeError(
                f"group_size {self.group_size} has no effect with one scale for the tensor; leave group_size out"
            )
        if self.block_rows is not None and self.block_rows < 1:
            raise SchemeError(f"a block cannot have {self.block_rows} outputs; write a block such as 128x128")

    def fitted(self, in_features: int) -> "WeightScheme":
        """Return the scheme to use for a linear with this many inputs: usually the scheme itself.

        If `group_size` does not divide `in_features`, the groups become smaller where possible. A ggml type whose block
        size does not divide `in_features` is replaced by a different type, as in llama-quantize.
        """
        if self.dtype.block is not None and in_features % self.dtype.block[0] and self.dtype.name in FALLBACK:
            other = FALLBACK[self.dtype.name]
            return replace(self, dtype=other, group_size=32, symmetric=not other.has_minimums)
        if self.group_size is None or self.block_rows != 1 or self.dtype.group is not None or self.strict_groups:
            return self
        size = fitting_group(self.group_size, in_features)
        return self if size == self.group_size else replace(self, group_size=size)

    def group_width(self, in_features: int) -> int:
        """Return the number of inputs per scale, g, for a weight with this many inputs.

        Raises:
            SchemeError: group_size does not divide in_features; the message suggests sizes that divide it and that
                engines support.
        """
        if self.group_size is None:
            return in_features
        if self.dtype.block is not None and in_features % self.dtype.block[0]:
            raise SchemeError(
                f"{self.dtype.name} has blocks of {self.dtype.block[0]} inputs, which do not divide {in_features}; "
                "add this linear to ignore, or choose another weights.dtype"
            )
        if in_features % self.group_size and self.dtype.group is not None:
            raise SchemeError(
                f"{self.dtype.name} has a scale per {self.group_size} inputs, which do not divide {in_features} "
                "inputs; add this linear to ignore, or choose another weights.dtype"
            )
        if in_features % self.group_size and self.block_rows != 1:
            raise SchemeError(
                f"group_size {self.block_rows}x{self.group_size}: {self.group_size} does not divide {in_features} "
                "inputs, and engines compute with whole blocks only; use recipe fp8-dynamic, or set weights.group_size "
                "to channel and leave activations.group_size out, or add this linear to ignore"
            )
        if in_features % self.group_size:
            sizes = " or ".join([*(str(size) for size in GROUP_SIZES if in_features % size == 0), "channel"])
            raise SchemeError(
                f"group_size {self.group_size} does not divide {in_features} inputs; "
                f"set weights.group_size to {sizes}, or add this linear to ignore"
            )
        return self.group_size

    def num_groups(self, in_features: int) -> int:
        """Return the number of scales per row, G."""
        return in_features // self.group_width(in_features)

    def num_scale_rows(self, out_features: int) -> int:
        """Return the number of stored rows of scales for this many outputs."""
        return 1 if self.block_rows is None else -(-out_features // self.block_rows)

    @property
    def has_tensor_scale(self) -> bool:
        """Whether there is a scale for the whole tensor: the only scale, or a global scale above the groups' scales."""
        return self.block_rows is None or self.dtype.scale == "e4m3"

    def describe(self) -> str:
        """Short form for tables, e.g. `int4 g128 asym`."""
        if self.dtype.block is not None:
            return self.dtype.name
        size = "channel" if self.group_size is None else f"g{self.group_size}"
        if self.block_rows is None:
            size = "tensor"
        elif self.block_rows > 1:
            size = f"{self.block_rows}x{self.group_size}"
        return f"{self.dtype.name} {size}" + ("" if self.symmetric else " asym")


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationScheme:
    """Scheme of a linear's input, always symmetric.

    Args:
        dtype: number type.
        granularity: "token" = a scale for each token, or each group of a token; "tensor" = one scale for all inputs.
        dynamic: compute the scales from the inputs at run time; False = one calibrated scale per tensor.
        group_size: number of a token's inputs that share one scale; None = all of them.
    """

    dtype: DType
    granularity: Literal["token", "tensor"] = "token"
    dynamic: bool = True
    group_size: int | None = None

    def __post_init__(self) -> None:
        if (self.granularity == "tensor") == self.dynamic:
            raise SchemeError(
                "activations have either one scale per token at run time or one calibrated scale per tensor; "
                "set activations.dynamic=true, or set it to false and leave group_size out"
            )
        if self.dtype.group is not None and self.group_size != self.dtype.group:
            raise SchemeError(
                f"{self.dtype.name} activations have a scale per {self.dtype.group} inputs; "
                f"set activations.group_size to {self.dtype.group}, or leave it out"
            )
        if self.group_size is not None and (self.group_size < 1 or not self.dynamic):
            raise SchemeError(
                f"activations in groups of {self.group_size} need a positive group_size and activations.dynamic=true"
            )

    @property
    def is_per_token(self) -> bool:
        """Whether each token has a single scale that the kernels compute at run time."""
        return self.dynamic and self.group_size is None

    @property
    def is_calibrated(self) -> bool:
        """Whether the checkpoint stores an input scale: the only scale, or a global one above the groups' scales."""
        return not self.dynamic or self.dtype.scale == "e4m3"

    def describe(self) -> str:
        """Short form for tables, e.g. `int8 per token`."""
        groups = "" if self.group_size is None else f" g{self.group_size}"
        return f"{self.dtype.name} per {self.granularity}{groups}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearScheme:
    """Scheme of one linear: of its weight, and of its input if the input is quantized too."""

    weight: WeightScheme
    activation: ActivationScheme | None = None

    def describe(self) -> str:
        """Short form for tables, e.g. `int8 channel, activations int8 per token`."""
        text = self.weight.describe()
        return text if self.activation is None else f"{text}, activations {self.activation.describe()}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Rule for the modules whose names match `pattern`: it gives them a scheme, or leaves them unquantized.

    Args:
        pattern: shell-style (`*.down_proj`), or a regular expression after `re:`.
        linear: scheme of these modules; None = not quantized.
        keep: whether these modules keep the codes of the source.
    """

    pattern: str
    linear: LinearScheme | None
    keep: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """Scheme of every linear of a model: a default and rules; the last rule that matches a name wins.

    The time for matching all names together is limited. Answers are cached.

    Args:
        default: scheme of the linears that no rule matches; None = not quantized.
        rules: the rules in order.
    Raises:
        SchemeError: a pattern is not valid, or there are too many patterns with wildcards.
    """

    default: LinearScheme | None
    rules: tuple[Rule, ...] = ()
    _exact: dict[str, int] = field(init=False, repr=False, compare=False)  # position of each pattern's last rule
    _expressions: tuple[int, ...] = field(init=False, repr=False, compare=False)  # positions with wildcards, last first
    _answers: dict[str, Rule | None] = field(default_factory=dict, init=False, repr=False, compare=False)
    _budget: Budget = field(default_factory=Budget, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # If rules have equal patterns, the last one wins: the dictionary keeps the last position of a pattern.
        positions = {rule.pattern: index for index, rule in enumerate(self.rules)}
        expressions = sorted((index for pattern, index in positions.items() if not is_exact(pattern)), reverse=True)
        if len(expressions) > MAX_EXPRESSIONS:
            raise SchemeError(
                f"{len(expressions)} patterns with wildcards are too many; at most {MAX_EXPRESSIONS} are allowed"
            )
        for index in expressions:
            check_pattern(self.rules[index].pattern)
        object.__setattr__(self, "_exact", positions)
        object.__setattr__(self, "_expressions", tuple(expressions))

    def find(self, name: str) -> LinearScheme | None:
        """Return the scheme of the linear with this full module name; None = not quantized.

        Raises:
            SchemeError: a pattern takes too long to match.
        """
        rule = self._rule(name)
        return self.default if rule is None else rule.linear

    def keeps(self, name: str) -> bool:
        """Whether the linear with this full module name keeps the codes of the source.

        Raises:
            SchemeError: a pattern takes too long to match.
        """
        rule = self._rule(name)
        return rule is not None and rule.keep

    def _rule(self, name: str) -> Rule | None:
        """Return the rule for a linear; None = the default applies."""
        if name not in self._answers:
            self._answers[name] = self._search(name)
        return self._answers[name]

    def unmatched(self, names: Collection[str]) -> Iterator[Rule]:
        """Yield the rules that match none of these names.

        Raises:
            SchemeError: a pattern takes too long to match.
        """
        known = set(names)
        for rule in self.rules:
            plain = is_exact(rule.pattern)
            if not (rule.pattern in known if plain else any(matches(rule.pattern, n, self._budget) for n in names)):
                yield rule

    def _search(self, name: str) -> Rule | None:
        # A name that contains a wildcard must not match the pattern with the same text.
        exact = self._exact.get(name, -1) if is_exact(name) else -1
        for index in self._expressions:
            # The last rule wins, so expressions before the last plain match need not be tried.
            if index > exact and matches(self.rules[index].pattern, name, self._budget):
                return self.rules[index]
        return None if exact < 0 else self.rules[exact]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheScheme:
    """Scheme of the keys or of the values in the KV cache.

    Args:
        dtype: number type; None = unquantized.
        granularity: values that share one scale: "tensor" or "head" (fixed scales from calibration; 1.0 if the
            checkpoint has none), "token" (one token's values in one head) or "channel" (one channel of one head in a
            page; the page is quantized once, when it is full).
        symmetric: no zero points; always true for float types.
    """

    dtype: DType | None = None
    granularity: Literal["tensor", "head", "token", "channel"] = "token"
    symmetric: bool = True

    @property
    def is_fixed(self) -> bool:
        """Whether the scales are fixed before the first token."""
        return self.dtype is not None and self.granularity in ("tensor", "head")

    def describe(self) -> str:
        """Short form for tables and messages, e.g. `int4 per channel asymmetric`."""
        if self.dtype is None:
            return "unquantized"
        return f"{self.dtype.name} per {self.granularity}" + ("" if self.symmetric else " asymmetric")


@dataclass(frozen=True, kw_only=True, slots=True)
class KVScheme:
    """Storage of keys and values in the cache.

    Args:
        key, value: schemes of keys and values.
        rotation: "hadamard" = multiply keys and queries by a Hadamard matrix after the position embedding. This keeps
            their products and spreads the outliers of one channel over all channels.
    """

    key: CacheScheme = CacheScheme()
    value: CacheScheme = CacheScheme()
    rotation: Literal["none", "hadamard"] = "none"

    @property
    def is_quantized(self) -> bool:
        """Whether keys or values are quantized."""
        return self.key.dtype is not None or self.value.dtype is not None

    def describe(self) -> str:
        """Short form for tables and messages, e.g. `keys int4 per channel asymmetric, values int8 per token`."""
        rotated = " (rotated)" if self.rotation != "none" else ""
        return f"keys {self.key.describe()}{rotated}, values {self.value.describe()}"
