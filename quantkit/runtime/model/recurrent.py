"""Recurrent layers in place of attention: gated delta nets and Mamba 2; see `models.recurrent` for their definitions.

Shapes: T new tokens of all sequences, B sequences with n new tokens each; C, G, N, H, P as in `models.recurrent`.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.kernels.reference.recurrence import causal_conv, scan
from quantkit.kernels.types import Angles, ForwardBatch, Linear
from quantkit.models.layer_state_sizes import StateShape
from quantkit.models.recurrent import Recurrent
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.cache.non_paged import runs


@dataclass(kw_only=True, slots=True, eq=False)
class RecurrentMixer:
    """One recurrent layer.

    Args:
        kind: update rule of the state.
        layer: layer number in the cache.
        qkv: linear (T, hidden) -> (T, C + H P + H). Its outputs are queries, keys and values (C channels), the gate
            (H P channels), and one number per head; for "gated_delta", there are two numbers per head (2 H).
        output: output projection, (T, H P) -> (T, hidden).
        shape: shape of the layer's state.
        conv: (W, C) float32, weight of the convolution.
        conv_bias: (C,) float32, bias of the convolution; None = no bias.
        decay: (H,) float32, negative factor that maps a step size to the logarithm of the decay.
        step_bias: (H,) float32, bias of the step size before its softplus.
        least_step: lower bound of the step size.
        skip: (H,) float32, factor on the values, which are then added to the output; None = nothing is added.
        norm: (groups, H P / groups) or (P,) float32, weight of the norm.
        eps: epsilon of the norm.
    """

    kind: Literal["gated_delta", "mamba2"]
    layer: int
    qkv: Linear
    output: Linear
    shape: StateShape
    conv: Tensor
    conv_bias: Tensor | None
    decay: Tensor
    step_bias: Tensor
    least_step: float
    skip: Tensor | None
    norm: Tensor
    eps: float

    @property
    def linears(self) -> tuple[Linear, ...]:
        """See `AnyAttention`."""
        return self.qkv, self.output

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: KVCache, angles: Angles | None) -> Tensor:
        """Compute the layer's outputs for the new tokens, and store the new states; see `Attention`."""
        shape, pool = self.shape, cache.states[self.layer]
        projected = self.qkv(x)
        rest = projected.shape[1] - shape.channels - shape.values
        mixed, gate, numbers = projected.split((shape.channels, shape.values, rest), 1)  # type: ignore[no-untyped-call]
        outputs = []
        for run in runs(batch):
            past, state = pool.read(run)
            count = len(run.rows)
            channels, past = causal_conv(mixed[run.tokens].unflatten(0, (count, -1)), self.conv, self.conv_bias, past)
            output, state = self._mix(channels, numbers[run.tokens].unflatten(0, (count, -1)).float(), state)
            pool.write(run, past, state)
            outputs.append(output.flatten(0, 1))
        return self.output(self._gated_norm(torch.cat(outputs), gate.float()).to(projected.dtype))

    def _mix(self, channels: Tensor, numbers: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Update the states with n new tokens of each sequence, and read the outputs from the states.

        Args:
            channels: (B, n, C), queries, keys and values after the convolution.
            numbers: outputs of `qkv` that control the update, before bias and activation. For "mamba2", (B, n, H): one
                step size per head. For "gated_delta", (B, n, 2 H): one rate per head, then one step size per head. The
                step sizes also determine the decay.
            state: (B, H, N, P), states before the new tokens.
        Returns:
            Outputs (B, n, H, P) before the norm and the gate, and the states (B, H, N, P) after the new tokens.
        """
        shape = self.shape
        width = shape.key_heads * shape.key_dim
        query, key, value = channels.split((width, width, shape.values), -1)  # type: ignore[no-untyped-call]
        query, key = (part.unflatten(-1, (shape.key_heads, shape.key_dim)) for part in (query, key))
        value = value.unflatten(-1, (shape.value_heads, shape.value_dim))
        step = F.softplus(numbers[..., -shape.value_heads :] + self.step_bias).clamp_min(self.least_step)
        decay = step * self.decay
        if self.kind == "gated_delta":
            rate = numbers[..., : shape.value_heads].sigmoid()
            return scan(_unit(query) * shape.key_dim**-0.5, _unit(key), value, decay, rate, state)
        output, state = scan(query, key, value * step.unsqueeze(-1), decay, None, state)
        return output if self.skip is None else output + value * self.skip.unsqueeze(-1), state

    def _gated_norm(self, output: Tensor, gate: Tensor) -> Tensor:
        """Apply the norm and the gates (T, H P) to outputs (T, H, P); return (T, H P).

        Mamba applies the gates before the norm, gated delta nets after the norm.
        """
        opened, flat = F.silu(gate), output.flatten(1)
        flat = flat if self.kind == "gated_delta" else flat * opened
        grouped = flat.view(len(flat), -1, self.norm.shape[-1])
        normed = (F.rms_norm(grouped, grouped.shape[-1:], eps=self.eps) * self.norm).flatten(1)
        return normed * opened if self.kind == "gated_delta" else normed


def _unit(x: Tensor) -> Tensor:
    """Scale vectors to length one, as the kernels used in training do."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def stored_rows(data: Recurrent, shape: StateShape) -> dict[str, Tensor]:
    """Return indices that put the rows of stored weights in the order that `RecurrentMixer` needs, keyed by module.

    This order is: queries, keys, values, then the gate, then the numbers of all heads. Modules that are stored in this
    order are left out.
    """
    keys, values, heads = shape.key_heads * shape.key_dim, shape.values, shape.value_heads
    if data.kind == "mamba2":  # gate, values, keys (B), queries (C), numbers
        sizes = [values, values, keys, keys, heads]
        gate, value, key, query, numbers = torch.arange(sum(sizes)).split(sizes)  # type: ignore[no-untyped-call]
        mixed = torch.cat([query, key, value])
        return {data.inputs[0]: torch.cat([mixed, gate, numbers]), "conv1d": mixed - values}
    if not data.by_head:
        return {}
    own, rows = values // shape.key_heads, {}  # values of the heads that share a key head
    for name, sizes in (
        (data.inputs[0], [shape.key_dim, shape.key_dim, own, own]),
        (data.gates[0], [heads // shape.key_heads] * 2),
    ):
        by_head = torch.arange(shape.key_heads * sum(sizes)).view(shape.key_heads, -1)
        parts = by_head.split(sizes, dim=1)  # type: ignore[no-untyped-call]
        rows[name] = torch.cat([part.flatten() for part in parts])
    return rows
