"""LoRA adapters of a loaded model: each request chooses one or none; requests with different adapters share a step.

An adapter changes a linear to W x + scale * B (A x). W stays as it is, quantized or not, so one copy of the base serves
all adapters. If neighbouring linears are fused into one, their matrices A are stacked into one A, and their matrices B
are placed along the diagonal of one B. Each fused linear and adapter then needs two small products.
Source: Hu et al. 2021, LoRA; Chen et al. 2023, Punica, for several adapters in one batch.
Shapes: T tokens, N outputs, K inputs, R sum of the ranks of the fused linears.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.checkpoints.adapter import Adapter, LowRankUpdate
from quantkit.errors import ModelError, RequestError
from quantkit.kernels.ops.linear import build_linear
from quantkit.kernels.types import ForwardBatch, Linear
from quantkit.quantities import counted

_SHOWN = 3  # names in a message


@dataclass(eq=False)
class Adapters:
    """The adapters of a model, and the rows of the current step that use them. *Mutable*: `select` changes the rows.

    Args:
        by_name: the adapters, keyed by the names that requests use.
    Attributes:
        rows: indices of the step's tokens that use an adapter, keyed by the adapter's name.
        num_rows: number of tokens in the step.
        num_bytes: bytes of all adapters in the layout of the kernels.
    """

    by_name: Mapping[str, Adapter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows: dict[str, slice | Tensor] = {}
        self.num_rows = 0
        self.num_bytes = 0
        self._applied: set[str] = set()

    @property
    def digests(self) -> dict[str, str]:
        """Digest of each adapter, keyed by name."""
        return {name: adapter.digest for name, adapter in self.by_name.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        """A note on each adapter, for reports, and its warnings."""
        notes: list[str] = []
        for name, adapter in self.by_name.items():
            folder = f"folder {adapter.path.name}, " if adapter.path.name != name else ""
            count, digest = counted(len(adapter.updates), "linear"), adapter.digest[:16]
            notes += (f"adapter {name}: {folder}rank {adapter.rank}, {count}, SHA-256 {digest}", *adapter.warnings)
        return tuple(notes)

    def check(self, name: str | None) -> None:
        """Refuse the name of an adapter that is not loaded.

        Args:
            name: name of the adapter; None = the base model.
        Raises:
            RequestError: there is no adapter with this name.
        """
        if name is not None and name not in self.by_name:
            known = ", ".join(map(repr, self.by_name))
            hint = f"choose {known}, or no adapter" if known else "no adapter is loaded; give --adapter NAME=DIR"
            raise RequestError(f"adapter {name!r} is not loaded; {hint}")

    def select(self, batch: ForwardBatch) -> None:
        """Record which rows of the next step use which adapter."""
        self.num_rows = sum(batch.query_lengths)
        self.rows = {}
        if any(batch.adapters):
            self.rows = _rows(batch.adapters, batch.query_lengths, batch.token_ids.device)

    def adapted(
        self,
        linear: Linear,
        names: Sequence[str],
        sizes: Sequence[int],
        orders: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Linear:
        """Return a linear with the updates of all adapters; the linear itself if no adapter changes it.

        Args:
            linear: linear of the base model.
            names, orders: see `Weights.linear`.
            sizes: number of outputs of each module.
            dtype, device: dtype and device of the computation.
        """
        updates: dict[str, tuple[Linear, Linear]] = {}
        for adapter_name, adapter in self.by_name.items():
            own = [adapter.updates.get(name) for name in names]
            if any(own):
                down, up = _fuse(own, sizes, [orders.get(name) for name in names])
                updates[adapter_name] = (
                    build_linear(down.to(dtype), dtype=dtype, device=device),
                    build_linear(up.to(dtype), dtype=dtype, device=device),
                )
        self._applied.update(names)
        self.num_bytes += sum(part.stored_bytes for pair in updates.values() for part in pair)
        return AdaptedLinear(linear, self, updates) if updates else linear

    def check_applied(self) -> None:
        """Refuse an adapter if one of its updates was not applied: the model does not compute this linear separately.

        Raises:
            ModelError: an update was not applied.
        """
        for adapter in self.by_name.values():
            if left := [name for name in adapter.updates if name not in self._applied]:
                others = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
                raise ModelError(
                    f"{adapter.path} changes {', '.join(left[:_SHOWN])}{others}, which quantkit's layers do not "
                    "compute as separate linears; merge the adapter with `quantkit quantize --adapter`"
                )


class AdaptedLinear(Linear):
    """A linear of the base model with low-rank updates; an adapter's update changes only the rows that use the adapter.

    Its inputs are never quantized, even if the base model's linear accepts quantized inputs, because A needs unrounded
    inputs.

    Args:
        base: the linear without adapters.
        adapters: knows the rows of the step.
        updates: A and scale * B, keyed by the adapter's name.
    """

    def __init__(self, base: Linear, adapters: Adapters, updates: Mapping[str, tuple[Linear, Linear]]) -> None:
        super().__init__((base.out_features, base.in_features), base.stored_bytes, base.description)
        self.base, self.updates, self._adapters = base, updates, adapters

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`; x has the rows of the whole step."""
        out = self.base(x)
        if not self._adapters.rows:
            return out
        assert len(x) == self._adapters.num_rows, f"{len(x)} rows of {self._adapters.num_rows} tokens"
        for name, rows in self._adapters.rows.items():
            if (update := self.updates.get(name)) is not None:
                down, up = update
                out[rows] += up(down(x[rows]))
        return out

    def gated(self, x: Tensor, activation: str) -> Tensor | None:
        """See `Linear`."""
        return None if self._adapters.rows else self.base.gated(x, activation)


def _rows(names: Sequence[str | None], lengths: Sequence[int], device: torch.device) -> dict[str, slice | Tensor]:
    """Return the rows of a step that use each adapter: a slice if they are contiguous, otherwise indices on the device.

    Args:
        names: adapter of each sequence; None = the base model.
        lengths: number of rows of each sequence.
        device: device of the step.
    """
    spans: dict[str, list[tuple[int, int]]] = {}
    start = 0
    for name, length in zip(names, lengths, strict=True):
        if name is not None:
            known = spans.setdefault(name, [])
            if known and known[-1][1] == start:
                known[-1] = known[-1][0], start + length
            else:
                known.append((start, start + length))
        start += length
    return {
        name: slice(*known[0])
        if len(known) == 1
        else torch.cat([torch.arange(first, last) for first, last in known]).to(device)
        for name, known in spans.items()
    }


def _fuse(
    updates: Sequence[LowRankUpdate | None], sizes: Sequence[int], orders: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Return the updates of fused linears as one update.

    Args:
        updates: update of each linear; None = the adapter does not change this linear.
        sizes: number of outputs of each linear.
        orders: order (N_i,) of each linear's outputs; None = as stored.
    Returns:
        A (R, K) and scale * B (N, R), float32.
    """
    present = [update for update in updates if update is not None]
    up = torch.zeros(sum(sizes), sum(len(update.a) for update in present))
    row = column = 0
    for update, size, order in zip(updates, sizes, orders, strict=True):
        if update is not None:
            scaled = update.b.float() * update.scale
            rank = len(update.a)
            up[row : row + size, column : column + rank] = scaled if order is None else scaled[order.cpu()]
            column += rank
        row += size
    return torch.cat([update.a.float() for update in present]), up
