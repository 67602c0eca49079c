"""A recipe after reading: every name resolved, every default filled in, every step built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from quantkit.compress.recipe.schema import CalibrationSection
from quantkit.numerics.kv_cache import CacheGoal
from quantkit.numerics.scheme import Scheme

if TYPE_CHECKING:
    from quantkit.compress.algorithms.base import Step


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How to compress a model.

    Args:
        name: short name, also part of the default output directory.
        description: what it does, when to use it, what it costs.
        scheme: which numbers each linear is stored in.
        kv_cache: what keys and values are stored in; None = nothing is said about them.
        steps: how well the numbers are chosen, in running order; none = plain rounding.
        step_names: of `steps`, as written in the file.
        calibration: None when nothing looks at data.
        format: on-disk format.
        seed: of everything that draws random numbers.
        source: the same as plain data with every default filled in, without description and gates; two recipes with
            equal sources give equal checkpoints. Loading it gives this recipe again.
        input_clip: how calibrated scales of inputs are chosen, "absmax" or "mse".
        gates: what `verify` holds the result to, e.g. `recovery>=98.9`; they decide no bit of it.
    """

    name: str
    description: str
    scheme: Scheme
    steps: tuple[Step, ...]
    step_names: tuple[str, ...]
    calibration: CalibrationSection | None
    format: str
    seed: int
    source: dict[str, Any]
    input_clip: Literal["absmax", "mse"] = "absmax"
    gates: tuple[str, ...] = ()
    kv_cache: CacheGoal | None = None
