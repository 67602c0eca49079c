"""Rotary position embeddings: which angle belongs to which position, for every scaling that released models use.

Only angles; turning queries and keys by them is `kernels.ops.rotary_`. Where the wavelengths depend on the length of
the sequence (dynamic, longrope), new tokens get those of their sequence's length at that step, as in transformers,
and keys in the cache keep theirs. Shapes: T tokens, R rotated channels of a head.
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
    """Angle per position of each pair of channels.

    Args:
        rope: the rotary embedding.
        length: of the sequence, for the kinds that depend on it.
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
    """Short waves as they are, long ones interpolated, a ramp between."""

    def channel(rotations: float) -> float:
        """The pair that turns this often within the original length."""
        waves = math.log(rope.original_length / (rotations * 2 * math.pi))
        return rope.width * waves / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.width - 1)
    # The ramp divides by their difference.
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Scale frequencies as YaRN does, with a ramp over wavelengths in place of channels."""
    waves = rope.original_length / (2 * math.pi / plain)  # rotations within the original length
    span = rope.high_frequency_factor - rope.low_frequency_factor
    ramp = ((waves - rope.low_frequency_factor) / span).clamp(0, 1)
    return (1 - ramp) * plain / rope.factor + ramp * plain


def query_growth(rope: RopeConfig, positions: Tensor) -> Tensor:
    """Return the factors (T,) float32 of queries at these positions (T,).

    Source: Llama 4, temperature tuning of attention; Nakanishi 2025, Scalable-Softmax.
    """
    return 1 + rope.growth * torch.log1p(torch.div(positions, rope.original_length, rounding_mode="floor").float())


class RopeTable:
    """Cosine and sine by position, computed as far as they have been asked for.

    Args:
        rope: the rotary embedding.
        device: of the model.
    """

    def __init__(self, rope: RopeConfig, device: torch.device) -> None:
        self.rope, self.device = rope, device
        self._length = 0
        self.reserve(_FIRST_ROWS)

    def gather(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each new token.

        Args:
            batch: one step; its positions and lengths are read.
        Returns:
            cos, sin: (T, R/2) float32.
        """
        positions, lengths = batch.in_text()
        longest, limit = max(lengths), self.rope.turning_length
        self.reserve(longest)
        if limit is None or longest <= limit:
            return self._cos[positions], self._sin[positions]
        chunks = torch.split(positions, list(batch.query_lengths))  # type: ignore[no-untyped-call]
        pairs = [
            (self._cos[chunk], self._sin[chunk]) if length <= limit else angles_at(self.rope, chunk, length)
            for chunk, length in zip(chunks, lengths, strict=True)
        ]
        cos, sin = zip(*pairs, strict=True)
        return torch.cat(cos), torch.cat(sin)

    def reserve(self, length: int) -> None:
        """Compute the tables as far as this position; they are not moved before it is passed."""
        if length > self._length:
            # At least doubled: a sequence that grows token by token must not compute a new table in every step.
            self._length = max(length, 2 * self._length)
            # Length 0: the table serves sequences up to the turning length, all with a short one's wavelengths.
            self._cos, self._sin = angles_at(self.rope, torch.arange(self._length, device=self.device))


def angles_at(rope: RopeConfig, positions: Tensor, length: int = 0) -> tuple[Tensor, Tensor]:
    """Cosine and sine (T, R/2) float32 of positions (T,) in a sequence of this length; 0 = a short one."""
    (waves,) = send(positions.device, frequencies(rope, length).numpy())
    # float32 holds positions below 2**24 exactly; bfloat16 would merge neighbours beyond 256.
    angles = positions.float().unsqueeze(1) * waves  # (T, R/2)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
