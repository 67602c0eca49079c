"""Choose the KV cache of a layer: observe its keys and values, calibrate scales, and detect outliers.

A recorder takes the place of the cache object that transformers passes to a layer. It sees keys and values after the
position embedding and any norm, computed with the layer's final weights. Keys and values are rounded by the runtime,
not by this module. The pipeline refuses models that cache a latent vector instead of keys and values.
Statistics are updated batch by batch; their sums are kept in float64.
Shapes: B samples, H key/value heads, T tokens, D channels, S tokens per page.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.observers import own_turns
from quantkit.distributed import gather
from quantkit.errors import CheckpointError, ModelError
from quantkit.huggingface.layer_call import Batch, cache_argument
from quantkit.numerics import kv_cache as schemes
from quantkit.numerics.dtype import FP8
from quantkit.numerics.kv_cache import CacheGoal, hadamard, scheme_to_dict
from quantkit.numerics.scheme import CacheScheme, KVScheme
from quantkit.results import CacheRecord

PAGE_TOKENS = 64
"""Tokens that share a channel's range, as in the pages of the runtime."""

_SAMPLE_TOKENS = 2048
_CLIPS = tuple(1 - 0.05 * step for step in range(13))  # fractions of the largest magnitude: 1.0 down to 0.4

MOST_NOISE = 0.1
"""Largest noise that rounding may add to keys before they count as having outlier channels; see `noise`."""

MOST_FLOAT_NOISE = 0.02
"""Like `MOST_NOISE`, but for float types, whose noise is measured differently. In real models, the noise is 0.002 to
0.005 in ordinary layers and 0.03 to 0.4 in layers with large biases.
"""

_LEAVE = CacheScheme()
_REMEDIES = {"channel": schemes.INT4_CHANNEL, "int8": schemes.INT8_TOKEN, "fp8": schemes.FP8_TOKEN, "leave": _LEAVE}
_BY_CHANNEL = {scheme.dtype: scheme for scheme in (schemes.INT3_CHANNEL, schemes.INT4_CHANNEL, schemes.INT8_CHANNEL)}
_BY_CHANNEL[FP8] = schemes.INT8_CHANNEL


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


class _Seen(Exception):
    """Signal that ends a layer's run; its arguments are the keys and values that the layer passes to its cache."""


def calibrate_cache(layer: LayerContext, goal: CacheGoal) -> CacheRecord:
    """Choose the scales and number types of one layer's cache; call this when the layer's weights are final.

    Args:
        layer: the layer. If `goal.needs_data`, its store must hold the hidden states. A note is added if the chosen
            cache differs from `goal`.
        goal: the cache that the recipe asks for.
    Raises:
        ModelError: the layer does not pass its keys and values to a cache.
        CheckpointError: a key or value is not finite, or all values that share a scale are zero.
    """
    asked = goal.scheme
    if not goal.needs_data:
        return CacheRecord(scheme=scheme_to_dict(asked))
    statistics = observe_cache(layer, rotate=asked.rotation != "none")
    scheme = choose_scheme(statistics, goal)
    record = CacheRecord(
        scheme=scheme_to_dict(scheme),
        # Fixed scales belong to the requested scheme in every layer, because config.json announces it for all layers.
        key_scale=_scales(layer.name, "keys", asked.key, statistics.keys, goal),
        value_scale=_scales(layer.name, "values", asked.value, statistics.values, goal),
        largest_key=statistics.keys.peak.max().item(),
        typical_key=statistics.keys.typical().min().sqrt().item(),
        noise_asked=noise(statistics, asked.key),
        noise=noise(statistics, scheme.key, rotated=scheme.rotation != "none"),
    )
    if scheme != asked:
        layer.chosen.notes.append(_note(layer, statistics, asked, record, scheme))
    return record


def observe_cache(layer: LayerContext, *, rotate: bool = False) -> CacheStatistics:
    """Collect statistics of the keys and values that a layer caches, over all calibration data.

    Args:
        layer: the layer with its final weights.
        rotate: whether to collect statistics of the keys after a Hadamard rotation too.
    Raises:
        ModelError, CheckpointError: see `calibrate_cache`.
    """
    from transformers import DynamicCache

    class Recorder(DynamicCache):  # type: ignore[misc]
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            raise _Seen(key_states, value_states)

    argument = cache_argument(layer.block.forward) or "past_key_values"  # the layer may accept it as one of **kwargs

    def cached(hidden: Batch) -> tuple[Tensor, Tensor]:
        try:
            layer.forward(hidden, **{argument: Recorder()})
        except _Seen as seen:
            keys, values = seen.args
            return keys, values
        raise ModelError(
            f"{layer.name} passes its keys and values to no cache, so they cannot be calibrated; leave kv_cache out"
        )

    statistics = CacheStatistics(rotate=rotate)
    for number in own_turns(layer.store):
        # The statistics cost little compared with the layer, so every process computes them for all batches.
        for states in gather(None if number is None else cached(layer.store[number])):
            if states is not None:
                statistics.update(*states)
    for what, numbers in (("keys", statistics.keys), ("values", statistics.values)):
        if not torch.isfinite(numbers.peak).all():
            raise CheckpointError(f"{layer.name}: its {what} are not finite; the model's weights are broken")
    return statistics


def noise(statistics: CacheStatistics, scheme: CacheScheme, *, rotated: bool | None = None) -> float:
    """Estimate the noise that rounding adds to an ordinary key channel, as a share of its mean square, for the worst
    head.

    Keys have outlier channels if this value exceeds `MOST_NOISE`, or `MOST_FLOAT_NOISE`. An outlier (a large bias of
    the key projection, or a few channels far above the rest) widens the range that all channels of a token share. The
    rounding step grows with the range. The noise is the step's mean square divided by 12, and is equal for all
    channels. An ordinary channel's mean square is the median over the head's channels, which a few outliers do not
    change. With ranges per channel, each channel has its own noise, and the result is the median over the channels.

    With a float type, the error of a number is proportional to the number. Large biases, which are about equal for all
    tokens, thus get errors that differ between tokens. So the noise is the mean squared error of all channels, as a
    share of their variance within a page. Only subnormal numbers, which are very small, have a fixed step.

    Args:
        statistics: statistics of one layer.
        scheme: scheme of the keys.
        rotated: whether keys are rotated before rounding; None = yes if the statistics include rotated keys, else no.
    """
    if scheme.dtype is None:
        return 0.0
    keys, turned = statistics.keys, statistics.rotate if rotated is None else rotated
    typical = keys.typical()  # (H,)
    if scheme.dtype is FP8:
        peak = keys.peak.square() if scheme.is_fixed else keys.mean_square_of_token("peak")
        # E4M3 has subnormals 2^-9 apart, in units of the scale, which is the peak over 448.
        subnormal = peak / FP8.maximum**2 * 2.0**-18 / 12
        # Three mantissa bits: steps of 2^-3 of the power of two below x, so (step / x)^2 / 12 is 2^-6 / 24 on average.
        return (2.0**-6 / 24 * keys.mean_square_to_variance() + subnormal / typical).max().item()
    if scheme.granularity == "channel":
        return (keys.page_ranges() / scheme.dtype.full_range**2 / 12).max().item()
    rounded = statistics.rotated if turned else keys
    if scheme.symmetric:
        steps = rounded.mean_square_of_token("peak") / float(scheme.dtype.maximum) ** 2
    else:
        steps = rounded.mean_square_of_token("range") / scheme.dtype.full_range**2
    return (steps / 12 / typical).max().item()


def choose_scheme(statistics: CacheStatistics, goal: CacheGoal) -> KVScheme:
    """Return the requested cache or, if the keys have outlier channels, a cache with the first remedy that makes the
    noise of the keys small enough.

    Remedies are tried in order of cost: ranges per channel instead of per token, 8 bits, unquantized keys. If the
    recipe names a remedy, only that remedy is tried, and the keys stay unquantized if it does not help.
    """
    if not goal.outliers or _is_small(goal.scheme.key, noise(statistics, goal.scheme.key)):
        return goal.scheme
    names = tuple(_REMEDIES) if goal.remedy == "auto" else (goal.remedy, "leave")
    for name in names:
        dtype = goal.scheme.key.dtype
        # The remedy "channel" keeps the number of bits.
        remedy = _BY_CHANNEL.get(dtype, goal.scheme.key) if name == "channel" and dtype else _REMEDIES[name]
        if remedy == goal.scheme.key:
            continue
        # A remedy also replaces the rotation.
        if _is_small(remedy, noise(statistics, remedy, rotated=False)):
            return KVScheme(key=remedy, value=goal.scheme.value)
    return KVScheme(value=goal.scheme.value)


def _is_small(scheme: CacheScheme, value: float) -> bool:
    return value <= (MOST_FLOAT_NOISE if scheme.dtype is FP8 else MOST_NOISE)


def _scales(layer: str, what: str, scheme: CacheScheme, numbers: HeadStatistics, goal: CacheGoal) -> tuple[float, ...]:
    """Return the fixed scales of keys or values: one, or one per head; empty if the scheme has none."""
    if not scheme.is_fixed:
        return ()
    peaks = numbers.peak if scheme.granularity == "head" else numbers.peak.max().reshape(1)
    if not bool((peaks > 0).all()):
        head = int(peaks.argmin())
        where = f" of head {head}" if scheme.granularity == "head" else ""
        raise CheckpointError(
            f"{layer}: all {what}{where} are zero on the calibration data, so they have no scale; "
            "give other data, or set kv_cache.granularity=token"
        )
    best = numbers.best_clip(peaks) if goal.clip == "mse" else torch.ones_like(peaks)
    return tuple((peaks * best / FP8.maximum).float().tolist())


def _note(
    layer: LayerContext, statistics: CacheStatistics, asked: KVScheme, record: CacheRecord, scheme: KVScheme
) -> str:
    head, channel = divmod(int(statistics.keys.channel_peak.argmax()), statistics.keys.channel_peak.shape[1])
    rotated = ", rotated" if asked.rotation != "none" else ""
    biases = [p.abs().max().item() for name, p in layer.block.named_parameters() if name.endswith("k_proj.bias")]
    said = f", bias of the key projection up to {biases[0]:.3g}" if biases else ""
    return (
        f"KV cache: keys have outlier channels. Stored as {asked.key.describe()}{rotated}, their rounding noise would "
        f"be {record.noise_asked:.2g} (largest |key| {record.largest_key:.3g} in head {head}, "
        f"channel {channel}, ordinary {record.typical_key:.3g}{said}). They are stored as {scheme.key.describe()}, "
        f"with noise {record.noise:.2g}"
    )
