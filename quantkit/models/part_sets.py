"""Sets of linears that follow from the parts of a family: attention, MLP and experts. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit.models.linear_sets import LinearSet

if TYPE_CHECKING:
    from quantkit.models.family import Experts, Parts


def attention_sets(parts: Parts, norm: str | None, *, joint: bool) -> tuple[LinearSet, ...]:
    """With a `joint` norm the MLP reads what attention reads: one set, whose outputs come together in the layer."""
    together = len(parts.qkv) == 1
    first = LinearSet(
        linears=(*parts.qkv, *(parts.up if joint else ())),
        source=norm,
        parent="" if joint else parts.qkv[0].rpartition(".")[0],
    )
    # A scale for the output would have to be folded into some rows of a projection that is all three: not done.
    value = None if together else parts.qkv[2]
    return first, LinearSet(linears=(parts.output,), source=value, parent=parts.output, grouped_heads=not together)


def mlp_sets(parts: Parts, norm: str | None, *, joint: bool) -> tuple[LinearSet, ...]:
    """Without a `joint` norm two: what the MLP reads, and what its last linear does."""
    # No scale passes through an activation, but one does through the product with its gate.
    source = parts.up[1] if parts.gated and len(parts.up) == 2 else None
    down = LinearSet(linears=(parts.down,), source=source, parent=parts.down)
    up = LinearSet(linears=parts.up, source=norm, parent=parts.up[0].rpartition(".")[0])
    return (down,) if joint else (up, down)


def expert_sets(data: Experts, norm: str | None) -> tuple[LinearSet, ...]:
    """Of a layer with experts: all that reads what the router reads, then what is behind it in each expert."""
    beside = (data.router, *([data.shared_gate] if data.shared_gate else []))
    ups = LinearSet(
        linears=(*data.up, *data.shared_up),
        source=norm,
        parent=data.router.rpartition(".")[0],
        beside=beside,
        optional=True,
    )
    smooth = data.smooth_down and data.gated
    down = LinearSet(linears=(data.down,), source=data.up[1] if smooth else None, parent=data.down)
    if data.shared_down is None:
        return ups, down
    source = data.shared_up[1] if len(data.shared_up) == 2 else None
    shared = LinearSet(linears=(data.shared_down,), source=source, parent=data.shared_down, optional=True)
    return ups, down, shared
