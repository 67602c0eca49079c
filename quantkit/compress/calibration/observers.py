"""Statistics of a linear's inputs, updated batch by batch. Shapes: T tokens, K inputs, G groups of g inputs.

With several processes, each runs different batches of the data. The processes exchange the inputs, not partial sums:
the process that owns a statistic adds every batch in the order of the data. So the result is bit for bit the same as
with one process, and memory holds no second copy of a statistic.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from quantkit.compress.calibration.hidden_state_store import ActivationStore
from quantkit.distributed import assign_work, exchange, fill, rank, world
from quantkit.numerics.matmul import Operand, add_products, multiplies_bfloat16, pack_matrix, packed_size

# Rows of a Gram matrix that are computed at once; only blocks on and below the diagonal are computed.
_PANEL = 512
# Tokens copied at once for the product.
_TOKENS = 1024
# Maximum norm of a token, in units of the median norm; larger tokens are scaled down to it. The first token of a text,
# and a few others, have norms a hundred times as large. These tokens are alike in all texts, so they say hardly
# anything about other tokens.
_LARGEST_NORM = 2.0
# Number of random combinations of outputs that stand for all outputs in an estimate of the error.
_SKETCHED = 256


class Observer(Protocol):
    """An object that collects statistics of a linear's inputs."""

    def update(self, inputs: Tensor) -> None:
        """Add inputs (T, K) of any float dtype; they are not modified."""


def options_of(value: object) -> Hashable:
    """Return a key for the type, sizes and options of an observer that has seen no inputs. Observers with equal keys
    are interchangeable.
    """
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, Mapping):
        return tuple((name, options_of(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(options_of, value))
    return (type(value), options_of(vars(value))) if hasattr(value, "__dict__") else repr(value)


class Workspace:
    """Memory for copies of inputs, which observers use one after another. Allocating new memory for each copy would
    take as long as copying.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def operand(self, values: Tensor, purpose: str) -> Operand:
        """Prepare a matrix for multiplication: pack it, convert it to float32, or return it unchanged.

        Args:
            values: (T, K), any float dtype; not modified.
            purpose: name of the memory to use. The result is valid until the next call with the same name.
        """
        if values.dtype == torch.bfloat16 and multiplies_bfloat16(values.device):
            return pack_matrix(values, self.empty((packed_size(*values.shape),), purpose, values))
        if values.dtype == torch.float32:
            return values
        return self.empty(values.shape, purpose, values, torch.float32).copy_(values)

    def empty(self, shape: tuple[int, ...], purpose: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return uninitialized memory on the device of `like`, and in the dtype of `like` unless `dtype` is given. It
        is valid until the next call with the same purpose.
        """
        dtype, size = dtype or like.dtype, math.prod(shape)
        held = self._held.get((purpose, dtype))
        if held is None or held.numel() < size:
            held = self._held[purpose, dtype] = torch.empty(size, dtype=dtype, device=like.device)
        return held[:size].view(shape)

    def clear(self) -> None:
        """Free all memory."""
        self._held.clear()


class _MeanMatrix:
    """Sum over tokens of (R, K) float32 matrices, computed in panels of rows. `finish` returns parts that add up to the
    mean, and can be called only once, because it frees the sums.

    Args:
        width: K.
        device: device of the matrix.
        rows: R; None = K.
        parts: number of separate sums; each uses an equal share of every update's tokens.
        split: whether, with several processes, every process gets all inputs and sums only some of the panels.
        workspace: memory shared with other observers; None = separate memory.
    """

    def __init__(
        self,
        width: int,
        device: torch.device,
        rows: int | None = None,
        *,
        parts: int = 1,
        split: bool = False,
        workspace: Workspace | None = None,
    ) -> None:
        self._workspace = workspace or Workspace()
        self._shape, self._device, self._parts = (rows or width, width), device, parts
        self.is_split = split
        starts = range(0, self._shape[0], _PANEL)
        panels = [slice(start, min(start + _PANEL, self._shape[0])) for start in starts]
        # Costs are those of a Gram matrix, where each panel is wider than the one before.
        self._shared = list(zip(panels, assign_work([panel.stop for panel in panels]), strict=True))
        self.sums = [
            (panel, [torch.zeros(self._part(panel), dtype=torch.float32, device=device) for _ in range(parts)])
            for panel, owner in self._shared
            if not split or owner == rank()
        ]
        self.num_tokens = 0

    def _part(self, panel: slice) -> tuple[int, int]:
        """Return the shape of the stored part of the rows `panel`: all columns or, in a subclass, the first ones."""
        return panel.stop - panel.start, self._shape[1]

    def chunks(self, *rows: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """Divide tensors (T, ...) along the tokens into pieces that fit the workspace. Yield for each piece the number
        of the part that sums it, and the piece of each tensor.
        """
        for part, own in enumerate(zip(*(torch.tensor_split(each, self._parts) for each in rows), strict=True)):
            for start in range(0, len(own[0]), _TOKENS):
                yield part, [each[start : start + _TOKENS] for each in own]

    def finish(self) -> list[Tensor]:
        """Return the parts, which add up to the mean, and free the observer's memory. If the sum is split, all
        processes must call this.
        """
        self._workspace, own = Workspace(), self.sums[::-1]
        self.sums = []
        # Not zeros: memory that is never written to is not allocated. In a Gram matrix, this is nearly half of it.
        parts = [torch.empty(self._shape, dtype=torch.float32, device=self._device) for _ in range(self._parts)]
        for panel, owner in self._shared:
            mine = not self.is_split or owner == rank()
            totals = own.pop()[1] if mine else [torch.empty(self._part(panel), device=self._device) for _ in parts]
            for part, total in zip(parts, totals, strict=True):
                if self.is_split:
                    fill(total, owner)
                part[panel, : total.shape[1]] = total.div_(max(self.num_tokens, 1))
        return parts


class Gram(_MeanMatrix):
    """Mean of x x' over tokens, with very large x scaled down. It is GPTQ's Hessian up to a constant factor.

    Entries above the diagonal are undefined.
    """

    def _part(self, panel: slice) -> tuple[int, int]:
        return panel.stop - panel.start, panel.stop

    def update(self, inputs: Tensor) -> None:
        """Add (T, K) inputs."""
        for part, (rows, shares) in self.chunks(inputs, _token_shares(inputs)):
            values = self._workspace.operand(_scaled(rows, shares), "inputs")
            for panel, totals in self.sums:
                add_products(totals[part], values, panel, values, lower=True)
        self.num_tokens += inputs.shape[0]


class CrossErrors(NamedTuple):
    """Errors of earlier layers, as a set of linears sees them.

    Args:
        mean: E (K, K), the mean of (o - x) x', where x is the input and o the original model's input; or, for each
            linear i, W_i E (N_i, K).
        halves: S W E (R, K) of each half of the tokens; the two add up to S W E of all tokens. S (R, N) combines
            outputs.
    """

    mean: Tensor | tuple[Tensor, ...]
    halves: list[Tensor]


class CrossGram(_MeanMatrix):
    """Mean of (o - x) x' over tokens, where x is a linear's input, o is its input in the original model, and o - x is
    the error of x.

    For linears with few outputs, the smaller matrix W (o - x) x' is enough. Work is always split between processes.
    Tokens are scaled as in `Gram`.

    Args:
        weights: (N_i, K) weights of all linears that read the input; must not change until the mean is computed.
        workspace: see `_MeanMatrix`.
    """

    def __init__(self, weights: Sequence[Tensor], workspace: Workspace | None = None) -> None:
        sizes, (_, width), device = [len(weight) for weight in weights], weights[0].shape, weights[0].device
        # W (o - x) x' costs one more product per token, so it is used only for at most half as many outputs as inputs.
        self._sizes = sizes if 2 * sum(sizes) <= width else None
        self._weights = list(weights) if self._sizes else []
        super().__init__(width, device, sum(sizes) if self._sizes else None, split=True, workspace=workspace)
        self._sketch = _sketch(weights)
        self._halves = _MeanMatrix(width, device, len(self._sketch), parts=2, split=True)

    def update(self, inputs: Tensor, original: Tensor) -> None:
        """Add inputs (T, K), and the inputs of the same tokens in the original model; neither is modified."""
        for half, (rows, others, shares) in self._halves.chunks(inputs, original, _token_shares(inputs)):
            if torch.equal(others, rows):  # inputs of the first layer
                continue
            # Subtract first: the difference of the sums of o x' and x x' would be little more than rounding noise.
            wrong = torch.sub(others, rows, out=self._workspace.empty(rows.shape, "errors", rows))
            wrong, values = _scaled(wrong, shares), self._workspace.operand(_scaled(rows, shares), "inputs")
            left = None if self._weights else self._workspace.operand(wrong, "left")
            for panel, (total,) in self.sums:
                if left is None:
                    self._add_outputs(total, wrong, self._rows(panel), values)
                else:
                    add_products(total, left, panel, values)
            for _, totals in self._halves.sums:
                self._add_outputs(totals[half], wrong, self._sketch, values)
        self.num_tokens += inputs.shape[0]
        self._halves.num_tokens = self.num_tokens

    def _add_outputs(self, total: Tensor, errors: Tensor, weight: Tensor, values: Operand) -> None:
        outputs = self._workspace.operand(linear(errors, weight.to(errors.dtype)), "left")
        add_products(total, outputs, slice(0, len(total)), values)

    def _rows(self, panel: slice) -> Tensor:
        """Return the rows `panel` of the stacked weights; this copies at most one panel."""
        starts = accumulate((len(weight) for weight in self._weights[:-1]), initial=0)
        return torch.cat(
            [
                weight[max(0, panel.start - start) : max(0, panel.stop - start)]
                for weight, start in zip(self._weights, starts, strict=True)
            ]
        )

    def errors(self) -> CrossErrors:
        """Return the sums as `CrossErrors`, and free the memory; see `finish`."""
        (mean,), self._weights = self.finish(), []
        return CrossErrors(mean if self._sizes is None else torch.split(mean, self._sizes), self._halves.finish())


def _token_shares(inputs: Tensor) -> Tensor:
    """Return the factor by which to scale each token of inputs (T, K), as (T, 1) float32, at most 1; see
    `_LARGEST_NORM`.

    AWQ and range search do not use these factors, because these methods do not compensate for errors. With the factors,
    their KL was a third larger.
    """
    norms = torch.linalg.vector_norm(inputs, dim=1, keepdim=True, dtype=torch.float32)
    if not len(norms):  # an expert without tokens
        return norms  # type: ignore[no-any-return]
    return (_LARGEST_NORM * norms.median() / norms).nan_to_num_(1.0).clamp_(max=1.0)  # type: ignore[no-any-return]


def _scaled(rows: Tensor, shares: Tensor) -> Tensor:
    return rows if (shares == 1).all() else rows * shares.to(rows.dtype)


def _sketch(weights: Sequence[Tensor]) -> Tensor:
    """Return R random combinations of the rows of weights (N_i, K), as (R, K), or all rows if there are at most R."""
    count = sum(len(weight) for weight in weights)
    if count <= _SKETCHED:
        return torch.cat(list(weights))
    generator = torch.Generator().manual_seed(count)
    signs = torch.randint(2, (_SKETCHED, count), generator=generator).mul_(2).sub_(1)
    signs = (signs / _SKETCHED**0.5).to(weights[0].device, weights[0].dtype)
    parts = torch.split(signs, [len(weight) for weight in weights], dim=1)
    return torch.stack([part @ weight for part, weight in zip(parts, weights, strict=True)]).sum(0)


class GroupGram:
    """Mean of x x' inside each group of inputs; it gives the output error that a change to the group's weights causes.

    Args:
        width: K.
        group: g; must divide K.
        device: device of the (G, g, g) float32 tensor.
    """

    def __init__(self, width: int, group: int, device: torch.device) -> None:
        self._sum = torch.zeros(width // group, group, group, dtype=torch.float32, device=device)
        self.num_tokens = 0

    def update(self, inputs: Tensor) -> None:
        """Add (T, K) inputs."""
        by_group = inputs.float().view(inputs.shape[0], *self._sum.shape[:2]).permute(1, 0, 2)  # (G, T, g)
        self._sum.baddbmm_(by_group.transpose(1, 2), by_group)
        self.num_tokens += inputs.shape[0]

    @property
    def mean(self) -> Tensor:
        """Return the mean, (G, g, g) float32."""
        return self._sum / max(self.num_tokens, 1)


class Magnitude:
    """Mean |x|, largest |x| and mean x^2 of each input channel, each (K,) float32.

    Args:
        width: K.
        device: device of the vectors.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self._sum = torch.zeros(width, dtype=torch.float32, device=device)
        self._square = torch.zeros_like(self._sum)
        self.largest = torch.zeros_like(self._sum)
        self.num_tokens = 0

    def update(self, inputs: Tensor) -> None:
        """Add (T, K) inputs."""
        size = inputs.float().abs()
        self._sum += size.sum(0)
        self.largest = torch.maximum(self.largest, size.amax(0))
        self._square += size.square_().sum(0)
        self.num_tokens += inputs.shape[0]

    @property
    def mean(self) -> Tensor:
        """Return the mean |x| of each channel, (K,)."""
        return self._sum / max(self.num_tokens, 1)

    @property
    def mean_square(self) -> Tensor:
        """Return the mean x^2 of each channel, (K,)."""
        return self._square / max(self.num_tokens, 1)


def spread_rows(inputs: Tensor, count: int) -> Tensor:
    """Return at most `count` rows of inputs (T, K) in float32, spread evenly over all rows; both counts must be > 0."""
    count = min(count, len(inputs))
    return inputs[torch.linspace(0, len(inputs) - 1, count, device=inputs.device).long()].float()


Handler = Callable[[str, Tensor], None]
"""Function that receives the name of a linear and its input rows (T, K)."""


class Deliveries:
    """Exchange of input rows between processes, one batch per process at a time.

    Args:
        handlers: functions that receive the rows, keyed by the kind of rows. They are called in the order of the
            batches and, within a batch, in the order of `send`.
        recipients: function that returns the processes that need the rows of a linear.
        device: device of all rows.
    """

    def __init__(
        self, handlers: Mapping[str, Handler], recipients: Callable[[str], Iterable[int]], device: torch.device
    ) -> None:
        self._handlers, self._recipients, self._device = handlers, recipients, device
        self._waiting: list[dict[tuple[int, str, str], Tensor]] = [{} for _ in range(world())]
        self._count = 0

    def send(self, kind: str, name: str, rows: Tensor) -> None:
        """Pass rows to the handler of their kind: now if there is one process, otherwise in the next `deliver`.

        Args:
            kind: kind of the rows, a key of `handlers`.
            name: linear that was called with the rows.
            rows: (T, K) input rows.
        """
        if world() == 1:
            self._handlers[kind](name, rows)
            return
        rows = rows.clone()  # the layer may modify its inputs in place
        self._count += 1
        for to in self._recipients(name):
            self._waiting[to][self._count, kind, name] = rows

    def deliver(self) -> None:
        """Exchange the rows that the processes have sent, and call the handlers. All processes call this after each
        turn.
        """
        if world() == 1:
            return
        for rows in exchange(self._waiting, self._device):
            for (_, kind, name), values in rows.items():
                self._handlers[kind](name, values)
        self._waiting = [{} for _ in range(world())]


def own_turns(store: ActivationStore) -> Iterator[int | None]:
    """Yield, once per turn, the index of the batch that this process runs; None = no batch is left for it. In each
    turn, every process runs at most one batch.
    """
    for first in range(0, len(store), world()):
        number = first + rank()
        yield number if number < len(store) else None
