"""Base class of all on-disk formats, and pure functions on the tensors of one linear.

Each format has its own module; its FORMAT object states what the format supports.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from quantkit.errors import AuditError, SchemeError, located
from quantkit.formats import writable
from quantkit.formats._tensors import matrix_shape
from quantkit.numerics.scheme import LinearScheme, Rule, Scheme
from quantkit.numerics.tensor import QuantizedTensor

if TYPE_CHECKING:
    from quantkit.models.family import Family

Shapes = Mapping[str, tuple[int, ...]]
Read = Callable[[str], Tensor]
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF_DTYPES = (torch.float16, torch.bfloat16)
# The parts of a weight that decoding a file must return bit for bit.
_NUMBERS = ("codes", "scale", "zero_point", "group_index", "global_scale", "input_scale")


class Format(ABC):
    """One on-disk format of a quantized model; its module defines an instance called FORMAT.

    A subclass overrides the attributes that differ; a format that is written also overrides `encode` and `section`.
    Names in tensor dictionaries are local: `weight_packed`, not `model.layers.0.mlp.up_proj.weight_packed`.
    """

    # The name that users write, which is also the `quant_method` of config.json if there is one.
    name: ClassVar[str]
    # File suffix, with the dot, of a format that is one file; "" = the format is a directory.
    suffix: ClassVar[str] = ""

    is_written: ClassVar[bool] = True
    # Whether a recipe can name it; false if only `convert` writes it.
    is_recipe_format: ClassVar[bool] = True
    # Whether `decode` gives back exactly what `encode` was given; false if only the values are stored.
    keeps_codes: ClassVar[bool] = True
    # Whether groups may be formed in an order that differs from that of the inputs.
    holds_group_index: ClassVar[bool] = False
    holds_activations: ClassVar[bool] = False
    # Whether a model whose weights have the shape (K, N), such as GPT-2, can be stored so that loaders read it.
    holds_transposed: ClassVar[bool] = False
    # Whether config.json can describe the KV cache; `holds_cache_scales`: whether it can announce fixed scales.
    describes_cache: ClassVar[bool] = True
    fuses: ClassVar[bool] = True  # whether readers fuse linears that share their inputs, which then need one scheme
    holds_cache_scales: ClassVar[bool] = False
    # Entries of config.json that describe the quantized weights; all have the same contents.
    section_keys: ClassVar[tuple[str, ...]] = ("quantization_config",)
    # Entry of `quantization_config` that asks loaders to decode the weights while loading; "" = there is none.
    decode_key: ClassVar[str] = ""
    # Local names of the tensors with the scales, and with the group of each input; "" = there is no such tensor.
    scale_name: ClassVar[str] = "weight_scale"
    order_name: ClassVar[str] = ""
    # Local name of the matrix that has the shape of the weight.
    shape_name: ClassVar[str] = "weight"
    # Whether it stores experts that the model keeps in one tensor (E, K, N); `decode` gets one expert at a time.
    is_stacked: ClassVar[bool] = False
    # Sizes of groups that it stores, largest first; `convert` splits larger groups. Empty = any size.
    group_sizes: ClassVar[tuple[int, ...]] = ()
    # Dtypes that scales can be stored in; the first is used if the model's own dtype is not among them.
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOAT_DTYPES

    # For model cards: tag ("" = `name`), library, engines that load the format, and package that transformers needs.
    tag: ClassVar[str] = ""
    library: ClassVar[str] = "transformers"
    engines: ClassVar[tuple[str, ...]] = ("transformers", "vllm")
    package: ClassVar[str] = ""

    def check(self, scheme: LinearScheme, shape: tuple[int, int]) -> None:
        """Refuse a scheme that this format cannot hold, before any work is done.

        Args:
            scheme: scheme of one linear.
            shape: (N, K) of its weight.
        Raises:
            SchemeError: the format cannot hold the scheme; the message names the recipe field to change.
        """
        if not self.is_written:
            raise self._read_only()
        self._check_activations(scheme)
        with located("weights.group_size"):
            scheme.weight.group_width(shape[1])

    def check_model(self, family: Family, layers: Sequence[Mapping[str, LinearScheme]]) -> tuple[str, ...]:
        """Refuse a model that no loader of this format supports; return warnings if some loaders do not support it.

        Args:
            family: family of the model.
            layers: for each layer, the scheme of each linear to quantize, keyed by relative name.
        Returns:
            Warnings, one sentence each.
        Raises:
            SchemeError: no loader supports the model; the message names the recipe field to change.
        """
        if family.transposed and not self.holds_transposed:
            raise SchemeError(
                f"{family.hf_names[0]} stores its linears as Conv1D, which {self.name} loaders do not support; "
                f"set format to one of {writable(lambda other: other.holds_transposed)}"
            )
        return ()

    def shape(self, shapes: Shapes, scheme: LinearScheme, read: Read | None = None) -> tuple[int, int] | None:
        """Return (N, K) of a linear from the shapes of its tensors; None if the shapes do not determine it. Without
        `read`, K may include the padding of the last word.

        Args:
            shapes: shapes of the tensors of the linear, keyed by local name.
            scheme: scheme of the linear.
            read: reads a small tensor by its local name, e.g. one that stores the exact shape.
        """
        return matrix_shape(shapes.get(self.shape_name))

    def linear_bytes(self, scheme: LinearScheme, out_features: int, in_features: int, scale_bytes: int) -> int:
        """Count the bytes of a weight (N, K) in this format.

        Args:
            scheme: scheme of the linear.
            out_features, in_features: N and K.
            scale_bytes: bytes per number in the model's own dtype.
        Raises:
            SchemeError: the format does not implement this method.
        """
        raise SchemeError(
            f"the {self.name} format cannot count the bytes of a weight; implement {type(self).__name__}.linear_bytes"
        )

    def beside_bytes(self, scheme: LinearScheme, scale_bytes: int) -> int:
        """Count the bytes that a file stores for a linear in addition to `linear_bytes`."""
        return 0

    def stored_weights(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        """Return the names of the tensors that store each quantized weight.

        The result maps the name of each weight to a mapping from local to full tensor names. A weight whose name does
        not end in `.weight` is a stack of matrices; its tensors have one more dimension.

        Args:
            names: names of all tensors of a checkpoint.
        """
        modules = ((module, local) for module, local in by_module(names).items() if stores_codes(local))
        return {
            f"{module}.weight": {name: f"{module}.{name}" for name in local if name != "bias"}
            for module, local in modules
        }

    def encode(self, weight: QuantizedTensor, scheme: LinearScheme) -> dict[str, Tensor]:
        """Return the tensors that store `weight`, keyed by local name; `decode` restores the same codes and scales."""
        raise self._read_only()

    @abstractmethod
    def decode(self, tensors: Mapping[str, Tensor], scheme: LinearScheme) -> QuantizedTensor:
        """Decode the tensors of one linear: the inverse of `encode`; also reads checkpoints of other tools.

        Args:
            tensors: tensors of one linear, keyed by local name.
            scheme: scheme of the linear.
        Raises:
            CheckpointError: a tensor is missing, has the wrong shape or dtype, or contradicts the scheme.
            SchemeError: this variant of the format cannot be decoded.
        """

    def check_encoded(
        self, module: str, weight: QuantizedTensor, scheme: LinearScheme, tensors: Mapping[str, Tensor]
    ) -> None:
        """Check that an encoded weight decodes to exactly the original codes and scales.

        The check does not dequantize: equal codes and scales give equal values.

        Args:
            module: full name of the linear.
            weight: the original weight.
            scheme: scheme of the linear.
            tensors: tensors that `encode` returned, keyed by local name.
        Raises:
            AuditError: a part of the weight differs; the message names the part.
        """
        decoded = self.decode(tensors, scheme) if self.keeps_codes else weight
        for part in _NUMBERS:
            if not identical(getattr(decoded, part), getattr(weight, part)):
                raise AuditError(
                    f"{module}: the encoded {part} does not decode to the original values; report this bug"
                )

    def config(
        self,
        linears: Mapping[str, LinearScheme],
        ignored: Sequence[str],
        *,
        group_order: bool = False,
        decode_at_load: bool = False,
    ) -> dict[str, Any]:
        """Return the entries to add to config.json; empty if no linear is quantized.

        Args:
            linears: scheme of each quantized linear, keyed by full module name.
            ignored: full names of linears that are not quantized, including the output head; a name that ends with a
                dot means all linears below that module, including those that loaders fuse under other names.
            group_order: whether some linear has groups in activation order; only formats with `holds_group_index`
                support that.
            decode_at_load: ask loaders to decode the weights while loading, if the format has an entry for that.
        Raises:
            SchemeError: the format does not support this combination of schemes.
        """
        if not self.is_written:
            raise self._read_only()
        section = self.section(linears, ignored, group_order) if linears else {}
        if section and decode_at_load and self.decode_key:
            section[self.decode_key] = True
        return dict.fromkeys(self.section_keys, section) if section else {}

    def model_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return further entries of config.json about the model, which `convert` adds for the format's loaders.

        Args:
            config: contents of the source's config.json.
        Raises:
            SchemeError: no loader of this format supports the model.
        """
        return {}

    def check_config(
        self, config: Mapping[str, Any], linears: Mapping[str, LinearScheme], ignored: Iterable[str]
    ) -> None:
        """Check that config.json, as a loader reads it, gives each linear the scheme that it was quantized with.

        Raises:
            AuditError: a linear has a different scheme in config.json; the message names the linear.
        """
        scheme = self.recognise(config)
        if scheme is None:
            if self.keeps_codes and linears:
                raise AuditError(
                    f"config.json does not describe the format {self.name}, in which the weights were written"
                )
            return
        for name, linear in linears.items():
            if scheme.find(name) != linear:
                raise AuditError(f"config.json describes {name} differently from how it was quantized")
        for name in ignored:
            if not name.endswith(".") and scheme.find(name) is not None:
                raise AuditError(f"config.json describes {name} as quantized, but it was left unquantized")

    def section(self, linears: Mapping[str, LinearScheme], ignored: Sequence[str], group_order: bool) -> dict[str, Any]:
        """Build the `quantization_config` for one or more quantized linears; empty if the format has none."""
        raise self._read_only()

    def recognise(self, config: Mapping[str, Any]) -> Scheme | None:
        """Return the scheme that a config.json in this format describes; None for other formats.

        Raises:
            SchemeError: config.json is in this format, but this variant cannot be decoded.
        """
        section = config.get("quantization_config")
        return self.scheme(section) if isinstance(section, Mapping) and self.owns(section) else None

    def owns(self, section: Mapping[str, Any]) -> bool:
        """Whether a `quantization_config` is in this format."""
        return section.get("quant_method") == self.name

    def scheme(self, section: Mapping[str, Any]) -> Scheme:
        """Return the scheme that a `quantization_config` in this format describes."""
        raise NotImplementedError(f"format {self.name} cannot read quantization_config")

    def _check_activations(self, scheme: LinearScheme) -> None:
        if scheme.activation is not None and not self.holds_activations:
            raise SchemeError(
                f"the {self.name} format does not support {scheme.activation.describe()} activations; "
                f"leave activations out, or write with --format {writable(lambda other: other.holds_activations)}"
            )

    def _read_only(self) -> SchemeError:
        return SchemeError(
            f"quantkit can read {self.name} checkpoints but not write them; "
            f"set format to one of {writable(lambda _: True)}"
        )


def ignored_rules(section: Mapping[str, Any], *keys: str) -> tuple[Rule, ...]:
    """Return rules for the modules that a `quantization_config` leaves unquantized.

    Args:
        section: the `quantization_config`.
        keys: entries that may list the modules; the first non-empty one is used.
    Raises:
        SchemeError: the entry is not a list.
    """
    names: Any = next((section[key] for key in keys if section.get(key)), [])
    if not isinstance(names, list):
        raise SchemeError(f"quantization_config.{keys[0]} is {names!r}; expected a list of names")
    return tuple(Rule(pattern=str(name), linear=None) for name in names)


def identical(left: Tensor | None, right: Tensor | None) -> bool:
    """Whether both are None, or have equal bits and dtype."""
    if left is None or right is None:
        return left is right
    # Compared as bytes: minus zero differs from zero, and a NaN equals itself.
    left, right = left.cpu().contiguous(), right.cpu().contiguous()
    return left.dtype == right.dtype and torch.equal(left.view(-1).view(torch.uint8), right.view(-1).view(torch.uint8))


def unquantized_modules(name: str, shape: tuple[int, ...]) -> list[str]:
    """Return the names that loaders use for the linears whose weights a tensor holds; none if it holds no weight.

    For experts stacked in one tensor, some loaders use the name of their container, and others a name per expert.

    Args:
        name: full name of an unquantized tensor.
        shape: shape of the tensor.
    """
    module, _, leaf = name.rpartition(".")
    if leaf == "weight" and len(shape) == 2:
        return [module]
    around, experts, kind = name.removesuffix(".weight").rpartition(".experts.")
    if not experts or len(shape) != 3:
        return []
    container, parts = f"{around}.experts", _FUSED.get(kind, (kind,))
    return [
        container,
        f"{container}.{kind}",
        *(f"{container}.{number}.{part}" for number in range(shape[0]) for part in parts),
    ]


_FUSED = {"gate_up_proj": ("gate_proj", "up_proj")}

# Local names that only a quantized linear has, whatever the format.
_CODES = re.compile(
    r"weight_(packed|scale(_inv)?|q[2-8]_[01k]|mxfp4)|qweight|SCB|weight\.(absmax|SCB)|_weight_qdata|biases"
)


def stores_codes(names: Iterable[str]) -> bool:
    """Whether the local tensor names of one module are those of a quantized linear."""
    return any(_CODES.fullmatch(name) for name in names)


def by_module(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the local tensor names of each module, keyed by full module name, in the order of the layers.

    Some formats append to the name of the weight: `a.b.weight.absmax` has the local name `weight.absmax` in `a.b`.

    Args:
        names: names of all tensors of a checkpoint.
    """
    modules: dict[str, list[str]] = {}
    for name in sorted(names, key=_natural):
        module, inside, rest = name.partition(".weight.")
        local = f"weight.{rest}"
        if not inside:
            module, _, local = name.rpartition(".")
        modules.setdefault(module, []).append(local)
    return modules


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that orders layer 10 after layer 2."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]
