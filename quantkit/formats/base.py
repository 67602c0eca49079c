"""The seam of all on-disk formats: pure functions on the tensors of one linear, under local names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.numerics.scheme import LinearScheme, Scheme
from quantkit.numerics.tensor import QuantizedTensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Format(Protocol):
    """One way to write a quantized model; an instance called FORMAT in its own file.

    Names in tensor dictionaries are local: `weight_packed`, not `model.layers.0.mlp.up_proj.weight_packed`.
    """

    @property
    def keeps_codes(self) -> bool:
        """Whether `decode` gives back exactly what `encode` was given; false where only the values are stored."""
        ...

    @property
    def holds_group_index(self) -> bool:
        """Whether groups may be formed in another order than that of the inputs."""
        ...

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        """What scales can be stored in; the first is taken when a model's own dtype is none of them."""
        ...

    def check(self, scheme: LinearScheme, shape: tuple[int, int]) -> None:
        """Refuse what this format cannot hold, before any work is done.

        Args:
            scheme: of one linear.
            shape: (N, K) of its weight.
        Raises:
            SchemeError: says which recipe field to change.
        """
        ...

    def shape(self, shapes: Mapping[str, tuple[int, ...]], scheme: LinearScheme) -> tuple[int, int] | None:
        """(N, K) of a linear from the shapes of its tensors alone; None when they do not tell.

        K may come out larger, by less than a word of codes, where words are filled up.

        Args:
            shapes: of its tensors, by local name.
            scheme: of the linear.
        """
        ...

    def encode(self, weight: QuantizedTensor, scheme: LinearScheme) -> dict[str, Tensor]:
        """Tensors to write in place of `weight`; `decode` gives back exactly the same codes and scales."""
        ...

    def decode(self, tensors: Mapping[str, Tensor], scheme: LinearScheme) -> QuantizedTensor:
        """Inverse of `encode`."""
        ...

    def config(
        self, linears: Mapping[str, LinearScheme], ignored: Sequence[str], *, group_order: bool = False
    ) -> dict[str, Any]:
        """Entries to add to config.json.

        Args:
            linears: scheme of each quantized linear by full module name.
            ignored: full names of linears that are not quantized, the output head included.
            group_order: whether groups of some linear follow another order than that of the inputs; only formats
                with `holds_group_index` are told so.
        """
        ...

    def recognise(self, config: Mapping[str, Any]) -> Scheme | None:
        """The scheme that a config.json in this format describes; None when it is not in this format."""
        ...


# Local names that only a quantized linear has, whatever the format.
_CODES = re.compile(r"weight_packed|qweight|weight_scale(_inv)?|SCB|weight\.(absmax|SCB)|_weight_qdata")


def stores_codes(names: Iterable[str]) -> bool:
    """Whether the tensors of one module, by local name, are those of a quantized linear."""
    return any(_CODES.fullmatch(name) for name in names)


def by_module(names: Iterable[str]) -> dict[str, list[str]]:
    """Local tensor names by full module name, in the order of the layers.

    What some formats store inside a weight belongs to the weight's module: `a.b.weight.absmax` is `weight.absmax` of
    `a.b`, and `a.b._weight_qdata` .

    Args:
        names: of all tensors of a checkpoint.
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
    """Sort key that puts layer 10 behind layer 2."""
    return [(0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in name.split(".")]
