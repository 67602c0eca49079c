"""Statistics of one layer's keys and values, updated batch by batch. quantkit uses them to choose the layer's KV cache.

Shapes: B samples, H key/value heads, T tokens, D channels, S tokens per page. Sums are kept in float64.
"""

from typing import Literal

import torch
from torch import Tensor

from quantkit.numerics.dtype import FP8
from quantkit.numerics.kv_cache import hadamard

PAGE_TOKENS = 64
"""Tokens that share a channel's range, as in the pages of the runtime."""

_SAMPLE_TOKENS = 2048
_CLIPS = tuple(1 - 0.05 * step for step in range(13))  # fractions of the largest magnitude: 1.0 down to 0.4


class HeadStatistics:
    """Statistics of the keys, or of the values, of one layer. *Mutable*: `update` adds to them."""

    def __init__(self) -> None:
        self.num_tokens = self._num_pages = 0
        self._sums: dict[str, Tensor] = {}
        self._sample: list[Tensor] = []
        self.peak = self.channel_peak = torch.empty(0)

    def update(self, states: Tensor) -> None:
        """Add keys or values (B, H, T, D) of any float dtype; they are not modified."""
        single = states.detach().float()
        size = single.abs()
        channels = size.amax((0, 2))  # (H, D)
        self.channel_peak = channels if not self.num_tokens else torch.maximum(self.channel_peak, channels)
        self.peak = self.channel_peak.amax(1)  # (H,)
        highest, lowest = single.amax(-1), single.amin(-1)  # (B, H, T)
        self._add("square", single.double().square().sum((0, 2)))
        self._add("range", (highest - lowest).double().square().sum((0, 2)))
        self._add("peak", size.amax(-1).double().square().sum((0, 2)))
        for page in torch.split(single, PAGE_TOKENS, dim=2):
            # Partial pages have narrower ranges, which would lower the mean; they count only if no page came before.
            if page.shape[2] == PAGE_TOKENS or not self._num_pages:
                self._add("page_range", (page.amax(2) - page.amin(2)).double().square().sum(0))
                self._add("page_variance", page.var(2, correction=0).double().sum(0))
                self._num_pages += page.shape[0]
        left = _SAMPLE_TOKENS - sum(part.shape[0] for part in self._sample)
        if left > 0:
            flat = single.transpose(1, 2).flatten(0, 1)  # (B T, H, D)
            # Each update adds only a few tokens, so that the first update does not fill the sample. They are copied,
            # because a slice would keep the whole batch in memory.
            self._sample.append(flat[:: max(1, len(flat) // 256)][:left].clone())
        self.num_tokens += single.shape[0] * single.shape[2]

    def mean_square(self) -> Tensor:
        """Return the mean square of each channel, (H, D)."""
        return self._sums["square"] / self.num_tokens

    def typical(self) -> Tensor:
        """Return the mean square of an ordinary channel of each head, (H,): the median of the mean squares of the
        head's channels, but never zero.
        """
        return self.mean_square().median(1).values.clamp_min(1e-30)

    def mean_square_of_token(self, what: Literal["range", "peak"]) -> Tensor:
        """Return, for each head (H,), the mean square over tokens of the token's range (largest minus smallest number)
        or, for "peak", of the token's largest magnitude.
        """
        return self._sums[what] / self.num_tokens

    def page_ranges(self) -> Tensor:
        """Return, for each head (H,), the median over its channels of this ratio: mean square of the channel's range
        within a page, divided by the mean square of the channel.
        """
        ranges = self._sums["page_range"] / max(1, self._num_pages)
        return (ranges / self.mean_square().clamp_min(1e-30)).median(1).values

    def mean_square_to_variance(self) -> Tensor:
        """Return, for each head (H,), the mean square of its channels, divided by their variance within a page.

        It is 1 if all means are zero, and large if channels have large biases.
        """
        variance = self._sums["page_variance"] / max(1, self._num_pages)
        return self.mean_square().sum(1) / variance.sum(1).clamp_min(1e-30)

    def best_clip(self, peaks: Tensor) -> Tensor:
        """Return the share of the largest magnitude at which clipping gives FP8 codes the least squared error.

        Args:
            peaks: largest magnitude: (1,) for all heads together, or (H,) for each head.
        Returns:
            Shares in the shape of `peaks`; 1.0 = no clipping.
        """
        sample = torch.cat(self._sample)  # (N, H, D)
        errors = []
        for clip in _CLIPS:
            scale = (peaks * clip / FP8.maximum).reshape(1, -1, 1)
            codes = (sample / scale).clamp(FP8.minimum, FP8.maximum).to(FP8.storage).float()
            wrong = (codes * scale - sample).double().square().sum((0, 2))
            errors.append(wrong if len(peaks) > 1 else wrong.sum().reshape(1))
        best = torch.stack(errors).argmin(0)
        return torch.tensor(_CLIPS, device=peaks.device)[best]

    def _add(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums[name] + value if name in self._sums else value


class CacheStatistics:
    """Statistics of one layer's keys and values.

    Args:
        rotate: whether to collect statistics of the keys after a Hadamard rotation too.
    """

    def __init__(self, *, rotate: bool = False) -> None:
        self.rotate = rotate
        self.keys, self.values, self.rotated = HeadStatistics(), HeadStatistics(), HeadStatistics()

    def update(self, keys: Tensor, values: Tensor) -> None:
        """Add keys (B, H, T, D) and values (B, H, T, Dv); they are not modified."""
        self.keys.update(keys)
        self.values.update(values)
        if self.rotate:
            self.rotated.update(keys.float() @ hadamard(keys.shape[-1]).to(keys.device))
