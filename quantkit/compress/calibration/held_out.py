"""Measure the errors of a layer's linears on held-out tokens, compared with the outputs of the original model.

*Held-out tokens* are calibration text that no statistic uses.

For a linear with the weight W, let o be its inputs in the original model, and x its inputs in the model being
quantized, for the same tokens. All earlier layers, and the earlier linears of the same layer, are already quantized
when x is computed.

    error           ||Q x - W o|| / ||W o||     Q: dequantized weight of the chosen codes
    rounding_error  ||R x - W o|| / ||W o||     R: W, rounded to nearest in full ranges

Q and R are in the model's dtype, because engines convert dequantized weights to it. Both errors use the same target and
the same input, so they can be compared. Both contain the errors of earlier layers, so neither is 0 if those layers have
errors. Biases are left out. If activations are quantized, x is taken before it is rounded. Scales that a step folded
into W or into its outputs are undone first. `dataset` chooses the held-out tokens.
Shapes: T tokens, N outputs, K inputs of a linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.compress.calibration.errors import plainly_rounded, row_blocks, weight_error
from quantkit.compress.calibration.expert_inputs import OnCall, hook_modules, removed_after, show_all_tokens, token_rows
from quantkit.compress.calibration.hidden_state_store import ActivationStore
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.observers import spread_rows
from quantkit.distributed import broadcast
from quantkit.errors import CheckpointError
from quantkit.huggingface.layer_call import Batch
from quantkit.models.linear_sets import find_expert
from quantkit.results import LinearRecord

# Minimum and maximum number of tokens for measuring errors; between these limits, one per `_SHARE` calibration tokens.
_LEAST_ROWS, _MOST_ROWS, _SHARE = 64, 512, 128
# An error counts as worse than that of plain rounding if it is more than this many times as large. Less may be chance.
_WORSE = 1.02
# Maximum number of elements in a layer's targets (64 MiB), which are held while the layer is compressed. With hundreds
# of experts, each linear gets fewer rows.
_TARGETS = 1 << 24


@dataclass(kw_only=True, slots=True)
class HeldOut:
    """Held-out hidden states of both models at the current layer, and the target outputs of its linears. *Mutable*.

    Args:
        original: inputs of the layer in the original model: one batch, which only the first process runs.
        quantized: inputs in the model being quantized; None = equal to `original` (`calibration.inputs: original`).
        measure: "held-out", or "calibration" if no text was left to hold out. In the second case, the tokens are
            calibration tokens, which statistics use too.
        num_tokens: number of calibration tokens, which decides how many held-out tokens are measured.
        layer: name of the layer to which the targets belong.
        targets: original outputs W o of each linear, (T, N) float32, keyed by relative name.
    """

    original: ActivationStore
    quantized: ActivationStore | None
    measure: str
    num_tokens: int
    layer: str = ""
    targets: dict[str, Tensor] = field(default_factory=dict)

    @property
    def stores(self) -> list[ActivationStore]:
        """Return the stores of both models, or the only store if both models have equal inputs."""
        return [self.original] if self.quantized is None else [self.original, self.quantized]

    def aim(self, layer: LayerContext, *, is_last: bool) -> None:
        """Compute the targets of a layer before it is quantized, and advance the original model's states past it.

        Args:
            layer: the layer as it was read.
            is_last: whether this is the last layer.
        """
        if layer.name == self.layer:  # already computed in the run of another recipe
            return
        rows = self._pass(layer, self.original, advances=not is_last and self.quantized is not None)
        self.layer, self.targets = layer.name, {}
        for group in layer.sets:
            inputs = rows.get(group.linears[0])
            if inputs is None:
                continue
            for name in group.linears:
                if name in layer.schemes:
                    self.targets[name] = inputs @ layer.weight(name).float().T

    def judge(self, layer: LayerContext, original: Callable[[str], Tensor], *, is_last: bool) -> str | None:
        """Write the errors of a quantized layer's linears into the layer's records, and advance the quantized model's
        states past the layer.

        If rounding to nearest gives a clearly smaller error than a step's codes, the rounded codes replace the step's.
        If a step has scaled the inputs of the linear, the original weight can no longer be rounded. Then the layer must
        be quantized again without these scales, and the states are not advanced.

        Args:
            layer: the finished layer; modified if codes are replaced.
            original: function that returns the weight W of a linear as read from the source.
            is_last: whether this is the last layer.
        Returns:
            The first linear of the set whose scales must be left out; None = the layer is done.
        """
        store, rounded = self.quantized or self.original, list[str]()
        # Linears that keep the codes of the source already have an error.
        new = [name for name, record in layer.chosen.records.items() if math.isnan(record.error)]

        def weight(name: str) -> Tensor:
            return original(name).to(layer.device, layer.weight(name).dtype)

        while True:
            rows = self._pass(layer, store, advances=False)
            for name in new if self.original.own else ():
                record = layer.chosen.records[name]
                layer.chosen.records[name] = self._judged(layer, record, weight(name), rows.get(layer.set_key(name)))
            worse = broadcast(self._worse(layer, [name for name in new if name not in rounded]))
            first = next((group for group in layer.sets if not set(group.linears).isdisjoint(worse)), None)
            if first is None:
                break
            if (key := first.linears[0]) in layer.data.divisors and key not in layer.data.unscaled:
                return key
            for name in worse:
                if name in first.linears:  # the errors of later sets change with the outputs of this set
                    layer.round_plainly(name, _divided(weight(name), layer.data.output_divisors.get(name)))
                    rounded.append(name)
        if rounded:
            layer.chosen.notes.append(f"{', '.join(rounded)}: rounded to nearest, for a smaller held-out error")
        if not is_last and self.quantized is not None:
            self._pass(layer, store, advances=True)
        return None

    def _worse(self, layer: LayerContext, names: list[str]) -> list[str]:
        """Return the linears that have a larger error than plain rounding and can be quantized in another way."""
        return [
            name
            for name in names
            if name in layer.chosen.solved
            and (record := layer.chosen.records[name]).measure == self.measure
            and record.error > _WORSE * record.rounding_error
            # The error does not include the rounding of activations, which the scales may be meant to improve.
            and (layer.set_key(name) not in layer.data.divisors or layer.schemes[name].activation is None)
        ]

    def _judged(self, layer: LayerContext, record: LinearRecord, weight: Tensor, inputs: Tensor | None) -> LinearRecord:
        """Return a linear's record with the errors of its outputs or, if these cannot be compared, of its weight.

        Outputs cannot be compared if no held-out token reached the linear in one of the two models, because the layer
        did not use it there, or if different numbers of tokens reached it in the two models.
        """
        name, now, target = record.name, layer.weight(record.name), self.targets.get(record.name)
        rounded, one = plainly_rounded(layer, name, weight), torch.ones(1, device=now.device)
        columns = layer.data.divisors.get(layer.set_key(name), one)
        outputs = layer.data.output_divisors.get(name, one.expand(len(now)))

        def unscaled(rows: slice) -> Tensor:
            return now[rows].float() * outputs[rows].unsqueeze(1)

        def plain(rows: slice) -> Tensor:
            return rounded(rows).to(now.dtype)

        if inputs is None or target is None or len(inputs) != len(target):
            error = weight_error(weight, lambda rows: unscaled(rows) / columns)
            rounding_error = weight_error(weight, plain)
            return replace(record, error=error, rounding_error=rounding_error, measure="weight")
        return replace(
            record,
            error=output_error(target, inputs, unscaled),
            rounding_error=output_error(target, inputs * columns, plain),
            measure=self.measure,
        )

    def _pass(self, layer: LayerContext, store: ActivationStore, *, advances: bool) -> dict[str, Tensor]:
        """Run the layer on the hidden states in a store. For each set of linears, return some rows of the input that
        they read, keyed by the set's first linear.

        A store has one batch, which only the first process runs; the other processes return an empty dict.

        Args:
            layer: the layer with its current weights.
            store: inputs of the layer.
            advances: whether to replace the store's states by the layer's outputs.
        """
        rows: dict[str, Tensor] = {}
        count = self._num_rows(layer)

        def keep(name: str, args: tuple[Any, ...], _: dict[str, Any]) -> None:
            if name not in rows:
                rows[name] = spread_rows(token_rows(args), count)
                if not torch.isfinite(rows[name]).all():
                    raise CheckpointError(
                        f"{layer.name}: the input of {name} is not finite; the model's weights are broken"
                    )

        def run(_: int, batch: Batch) -> Batch:
            with self._watched(layer, keep, count):
                # `advance` would replay stored results, which belong to calibration batches. But a `LayerCall` needs
                # `advance` to compute the next layer's call, and nothing is stored for `LayerCall`s.
                return layer.advance(0, batch) if advances and not isinstance(batch, Tensor) else layer.forward(batch)

        if advances:
            store.advance(run)
        else:
            for number in store.own:
                run(number, store[number])
        return rows

    def _watched(self, layer: LayerContext, keep: OnCall, count: int) -> AbstractContextManager[None]:
        names = [group.linears[0] for group in layer.sets if any(name in layer.schemes for name in group.linears)]
        experts = [name for name in names if find_expert(name) is not None]
        handles = hook_modules(layer.block, [name for name in names if name not in experts], keep)
        if experts:  # the two models may route different tokens to an expert
            handles.append(
                show_all_tokens(
                    layer.block, experts, keep, lambda: None, lambda tokens: spread_rows(tokens, count).to(tokens.dtype)
                )
            )
        return removed_after(handles)

    def _num_rows(self, layer: LayerContext) -> int:
        outputs = sum(len(layer.weight(name)) for name in layer.schemes)
        asked = min(max(self.num_tokens // _SHARE, _LEAST_ROWS), _MOST_ROWS)
        return max(1, min(asked, _TARGETS // max(1, outputs)))


def _divided(weight: Tensor, outputs: Tensor | None) -> Tensor:
    """Divide the rows of a weight (N, K) by the factors by which its outputs have been divided."""
    return weight if outputs is None else (weight.float() / outputs.unsqueeze(1)).to(weight.dtype)


def output_error(target: Tensor, inputs: Tensor, weight: Callable[[slice], Tensor]) -> float:
    """Return ||X W' - Y|| / ||Y||, computed in blocks of rows of W.

    Args:
        target: (T, N) float32 Y, outputs of the original model's linear.
        inputs: (T, K) float32 X.
        weight: function that, given a slice, returns these rows of W (N, K).
    """
    wrong = total = 0.0
    for rows in row_blocks(target.shape[1], inputs.shape[1]):
        aim = target[:, rows]
        wrong += torch.addmm(aim, inputs, weight(rows).float().T, beta=-1).square().sum().item()
        total += aim.square().sum().item()
    return math.sqrt(wrong / total) if total > 0 else 0.0
