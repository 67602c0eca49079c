"""Rotary position embeddings: angles by position, for every scaling method that released models use.

This module computes angles; `kernels.ops.rotary_` rotates queries and keys. If wavelengths depend on the sequence
length (dynamic, longrope), new tokens use the length at their step, as in transformers; cached keys are not changed.
Shapes: T tokens, R rotated channels of a head.
Source: Su et al. 2021 (RoFormer); Peng et al. 2023 (YaRN, which also describes linear and dynamic); Ding et al. 2024
(LongRoPE); transformers `modeling_rope_utils.py` for the meaning of the keys.
"""

import math

import torch
from torch import Tensor

from quantkit.kernels.transfer import send
from quantkit.kernels.types import ForwardBatch
from quantkit.models.rope import RopeConfig

_FIRST_ROWS = 1024


def frequencies(rope: RopeConfig, length: int) -> Tensor:
    """Return the angle per position of each pair of channels.

    Args:
        rope: the rotary embedding.
        length: sequence length, for methods that depend on it.
    Returns:
        (R/2,) float32.
    """
    exponents = torch.arange(0, rope.width, 2, dtype=torch.float32) / rope.width
    plain: Tensor = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "dynamic":
        stretch = rope.factor * max(length, rope.max_length) / rope.max_length - (rope.factor - 1)
        return plain / stretch ** (exponents * (rope.width / (rope.width - 2)))
    if rope.kind == "longrope":
        factors = rope.long_factors if length > rope.original_length else rope.short_factors
        return plain / torch.tensor(factors, dtype=torch.float32)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    return plain


def _yarn(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Keep high frequencies, divide low frequencies by the factor, and blend the two results in between."""

    def channel(rotations: float) -> float:
        """Return which pair of channels makes this many rotations within the original length, as a fractional index."""
        waves = math.log(rope.original_length / (rotations * 2 * math.pi))
        return rope.width * waves / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.width - 1)
    # The ramp divides by high - low, which must not be zero.
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Scale frequencies like YaRN, with a ramp over wavelengths instead of channels."""
    waves = rope.original_length / (2 * math.pi / plain)  # rotations within the original length
    span = rope.high_frequency_factor - rope.low_frequency_factor
    ramp = ((waves - rope.low_frequency_factor) / span).clamp(0, 1)
    return (1 - ramp) * plain / rope.factor + ramp * plain


def query_growth(rope: RopeConfig, positions: Tensor) -> Tensor:
    """Return the factors (T,) float32 by which queries at these positions (T,) are multiplied.

    Source: Llama 4, temperature tuning of attention; Nakanishi 2025, Scalable-Softmax.
    """
    return 1 + rope.growth * torch.log1p(torch.div(positions, rope.original_length, rounding_mode="floor").float())


class RopeTable:
    """Table of cosines and sines by position. *Mutable*: it grows when a sequence is longer than the table.

    Args:
        rope: the rotary embedding.
        device: device of the model.
    Attributes:
        cos, sin: (positions, R/2) float32; `reserve` replaces them.
    """

    def __init__(self, rope: RopeConfig, device: torch.device) -> None:
        self.rope, self.device = rope, device
        self._length = 0
        self.reserve(_FIRST_ROWS)

    def gather(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of each new token.

        Args:
            batch: one step; its positions and lengths are read.
        Returns:
            cos, sin: (T, R/2) float32.
        """
        positions, lengths = batch.in_text()
        longest, limit = max(lengths), self.rope.turning_length
        self.reserve(longest)
        if limit is None or longest <= limit:
            return self.cos[positions], self.sin[positions]
        chunks = torch.split(positions, list(batch.query_lengths))  # type: ignore[no-untyped-call]
        pairs = [
            (self.cos[chunk], self.sin[chunk]) if length <= limit else angles_at(self.rope, chunk, length)
            for chunk, length in zip(chunks, lengths, strict=True)
        ]
        cos, sin = zip(*pairs, strict=True)
        return torch.cat(cos), torch.cat(sin)

    def reserve(self, length: int) -> None:
        """Make sure that the tables hold all positions below `length`; replace them only if they are too short."""
        if length > self._length:
            # At least doubled: a sequence that grows token by token must not compute a new table in every step.
            self._length = max(length, 2 * self._length)
            # Length 0: the table serves sequences up to the turning length, which all have the same wavelengths.
            self.cos, self.sin = angles_at(self.rope, torch.arange(self._length, device=self.device))


def angles_at(rope: RopeConfig, positions: Tensor, length: int = 0) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, each (T, R/2) float32, at positions (T,) of a sequence.

    Args:
        rope: the rotary embedding.
        positions: (T,) positions.
        length: sequence length, for methods that depend on it; 0 = a short sequence.
    """
    (waves,) = send(positions.device, frequencies(rope, length).numpy())
    # float32 holds positions below 2**24 exactly; bfloat16 would merge neighbours beyond 256.
    angles = positions.float().unsqueeze(1) * waves  # (T, R/2)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
