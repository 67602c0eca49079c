"""Which part of a source a tensor of a checkpoint stands for: told by its values, not by the name that it was given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd

import torch
from torch import Tensor

ALIKE = 0.3  # cosine of a matrix and its quantized self at least; of two random ones it is within 0.1
PIECES = (2, 3, 4, 6, 8)  # of a matrix that joins several of the source


@torch.no_grad()
def put_decoded(state: Mapping[str, Tensor], name: str, value: Tensor) -> float:
    """Replace what a decoded matrix stands for: a matrix, a transposed one, an expert's, a part of one, or several.

    Args:
        state: tensors of the source, changed in place.
        name: what the checkpoint calls it; the part of that name is taken where it is like it.
        value: (N, K).
    Returns:
        the relative difference, the largest of several parts.
    Raises:
        ValueError: nothing is like it.
    """
    slot = state.get(name)
    if slot is None or slot.shape != value.shape or _cosine(slot, value) < ALIKE:
        slot = _most_alike(state, value)
    if slot is not None:
        return _replace(slot, value)
    for number in PIECES:
        pieces = value.unflatten(0, (number, -1)) if len(value) % number == 0 else ()
        slots = [_most_alike(state, piece) for piece in pieces]
        if slots and None not in slots:
            return max(_replace(slot, piece) for slot, piece in zip(slots, pieces, strict=True) if slot is not None)
    raise ValueError(f"{name} {tuple(value.shape)} resembles no weight of the source")


@torch.no_grad()
def put_changed(state: Mapping[str, Tensor], name: str, value: Tensor) -> None:
    """Replace what a tensor that holds no codes stands for, where a step of the recipe has changed it.

    What is unlike all of the source stays as the source has it: whether that is right, the logits say.
    """
    if not value.is_floating_point() or any(_same(tensor, value) for tensor in state.values()):
        return
    slot = state.get(name)
    if slot is None or slot.shape != value.shape:
        slot = _most_alike(state, value.reshape(len(value), -1)) if value.dim() in (1, 2) else None
    if slot is not None:
        _replace(slot, value)


def _replace(slot: Tensor, value: Tensor) -> float:
    error = float((slot.reshape_as(value) - value).float().norm() / (slot.float().norm() + 1e-9))
    slot.copy_(value.reshape_as(slot))
    return error


def _most_alike(state: Mapping[str, Tensor], value: Tensor) -> Tensor | None:
    """The part of the source that is most like a matrix, as a view; None where none is like it."""
    best, likeness = None, ALIKE
    wanted = value.float() / value.float().norm().clamp(min=1e-12)
    for parts in _parts(state, *value.shape):
        floats = parts.float()
        cosines = torch.einsum("atnk,nk->at", floats, wanted) / floats.square().sum((-2, -1)).sqrt().clamp(min=1e-12)
        if float(cosines.max()) > likeness:
            likeness = float(cosines.max())
            first, second = divmod(int(cosines.argmax()), cosines.shape[1])
            best = parts[first, second]
    return best


def _parts(state: Mapping[str, Tensor], rows: int, width: int) -> Iterator[Tensor]:
    """Every part of the source that could be a matrix (of one column: a bias), as views (a, t, rows, width)."""
    for tensor in state.values():
        stacked = tensor.unsqueeze(-1) if width == 1 and tensor.dim() == 2 else tensor
        if stacked.dim() not in (2, 3) or not stacked.is_floating_point() or stacked.numel() < rows * width:
            continue
        matrices = stacked if stacked.dim() == 3 else stacked[None]
        for turned in (matrices, matrices.mT):
            times, rest = divmod(turned.shape[1], rows)
            if turned.shape[2] != width or not times:
                continue
            yield turned.unfold(1, rows, gcd(rows, rest)).mT  # of unequal parts, each start that may be one
            if not rest and times > 1:
                yield turned.unflatten(1, (rows, times)).transpose(1, 2)


def _same(first: Tensor, second: Tensor) -> bool:
    return first.numel() == second.numel() and torch.equal(first.flatten(), second.flatten().to(first.dtype))


def _cosine(first: Tensor, second: Tensor) -> float:
    return float(torch.cosine_similarity(first.reshape(1, -1), second.reshape(1, -1))) if second.numel() else 1.0
