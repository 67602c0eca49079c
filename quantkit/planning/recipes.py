"""Effect of a recipe on a model of known shape: number types of each matrix, and why the recipe may be impossible.

Loading a recipe imports torch; plans without a recipe do not use this module.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.compress.algorithms.base import Step
from quantkit.engine_rules import StoredModel
from quantkit.errors import InputError
from quantkit.models.families import UNKNOWN
from quantkit.models.kv_sizes import KVForm, form_of_schemes
from quantkit.planning.counting import TOWERS
from quantkit.planning.memory import WeightChoice, WeightForm, from_linear
from quantkit.planning.shape import ModelShape

if TYPE_CHECKING:
    from quantkit.numerics.kv_cache import CacheGoal
    from quantkit.numerics.scheme import KVScheme


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipePlan:
    """What a recipe does to a model.

    Args:
        name: name of the recipe.
        format: on-disk format.
        scheme: form of each matrix, for the sums in `memory`.
        forms: the distinct forms that matrices get.
        num_tokens: number of calibration tokens; 0 without calibration.
        samples: number of calibration sequences; 0 without calibration.
        steps: steps in running order.
        hands_on: whether layers pass on more than hidden states.
        conflicts: reasons why the recipe cannot run, one line each; an error quotes the first.
        cache: form of the KV cache, ignoring outliers; None = unchanged.
        stored: description of the resulting checkpoint, for predictions of which engines read it.
        notes: one sentence for each case in which groups are smaller than the recipe asks for.
    """

    name: str
    format: str
    scheme: WeightChoice
    forms: tuple[WeightForm, ...]
    num_tokens: int
    samples: int
    steps: tuple[Step, ...]
    hands_on: bool
    conflicts: tuple[str, ...]
    cache: KVForm | None = None
    stored: StoredModel
    notes: tuple[str, ...] = ()


def plan_recipe(shape: ModelShape, recipe: Any, head: WeightForm | None = None) -> RecipePlan:
    """Assign a recipe's schemes to a model's matrices.

    Args:
        shape: sizes of a model whose layers are known.
        recipe: a `quantkit.compress.recipe.Recipe`.
        head: form of the output head in memory; None = as stored.
    """
    from quantkit.compress.recipe.assignment import assign, conflicts, fit, stored_model
    from quantkit.compress.recipe.linears import LayerLinears, group_notes

    layers, family = [], shape.family or UNKNOWN
    for index, layer in enumerate(shape.layers):
        sizes = {m.first: (m.out_features, m.in_features) for m in layer.matrices if m.quantizable}
        sets = family.sets_of_layer(sizes.__contains__)
        layers.append(LayerLinears(f"{shape.prefix}.{index}", sizes, sets))
    unlisted, asked = TOWERS in shape.remarks, recipe
    with suppress(InputError):  # `conflicts` below lists the problems
        recipe = fit(recipe, family, layers, shape.stored, unlisted=unlisted)[0]
    assigned = assign(recipe, layers, shape.stored)
    schemes = {scheme for of_layer in assigned for scheme in of_layer.values() if scheme is not None}
    forms: dict[Any, WeightForm] = {scheme: from_linear(scheme, recipe.format) for scheme in schemes}
    calibration, goal = recipe.calibration, recipe.kv_cache
    samples = calibration.num_samples if calibration else 0

    return RecipePlan(
        name=recipe.name,
        format=recipe.format,
        scheme=WeightChoice(
            name=recipe.name,
            choose=lambda index, matrix: forms.get(assigned[index].get(matrix.first)),
            head=head,
            mtp=None if recipe.mtp is None else from_linear(recipe.mtp, recipe.format),
            beside=_cache_scale_bytes(shape, goal),
            ends_bytes=_ends_bytes(shape, recipe.embedding),
        ),
        forms=tuple(sorted(forms.values(), key=lambda form: form.name)),
        num_tokens=samples * calibration.sequence_length if calibration else 0,
        samples=samples,
        steps=tuple(recipe.steps.values()),
        hands_on=family.hands_on or recipe.has_images,
        conflicts=tuple(map(str, conflicts(recipe, layers, assigned, unlisted))),
        cache=None if goal is None else form_of_schemes("recipe", _cache_schemes(shape, goal), shape.dtype_bytes),
        stored=stored_model(recipe, family, layers, assigned, shape.hidden_size),
        notes=group_notes(asked, layers, assigned),
    )


def _ends_bytes(shape: ModelShape, type_name: str | None) -> int | None:
    """Return the bytes of embedding and head in a GGUF file that stores both in this type; None = as in the source."""
    if type_name is None or not shape.hidden_size:
        return None
    from quantkit.formats.gguf import matrix_bytes

    return sum(
        matrix_bytes(type_name, count // shape.hidden_size, shape.hidden_size)
        for count in (shape.embedding, shape.head)
        if count
    )


def _cache_schemes(shape: ModelShape, goal: CacheGoal) -> list[KVScheme]:
    """Return the KV cache scheme of each layer; if the layers are unknown, only the recipe's usual scheme."""
    return [goal.of_layer(index).scheme for index in range(len(shape.layers))] or [goal.scheme]


def _cache_scale_bytes(shape: ModelShape, goal: CacheGoal | None) -> int:
    """Return the bytes of fixed scales of keys and values: float32, one per layer or per head."""
    if goal is None or not goal.has_fixed_scales:
        return 0
    by_head = goal.scheme.key.granularity == "head"
    return sum(2 * 4 * (layer.attention.num_kv_heads if by_head else 1) for layer in shape.layers)
