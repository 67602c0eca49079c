"""Schema of a recipe file: strict pydantic classes for the YAML, and a one-line message for every refused entry.

These objects are not the recipe itself: `load` converts them to the objects that the pipeline uses.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from quantkit.errors import InputError, RecipeError, SchemeError, suggestion
from quantkit.numerics.dtype import find_dtype
from quantkit.numerics.name_patterns import check_pattern
from quantkit.safety.untrusted import shorten

DATA_HELP = "expected bundled, a path to a .txt or .jsonl file, or hub:NAME[:CONFIG]"


def _valid(check: Callable[[str], Any], text: str) -> Any:
    """Return `check(text)`. Convert a SchemeError to ValueError, so that pydantic adds the location in the file."""
    try:
        return check(text)
    except SchemeError as error:
        raise ValueError(str(error)) from None


def _dtype(name: str) -> str:
    return str(_valid(find_dtype, name).name)


def _group_size(value: Any) -> int | str | dict[str, Any]:
    if isinstance(value, Mapping):
        given = GroupSizeSection.model_validate(value)
        return {"size": given.size, "strict": True} if given.strict else given.size
    if type(value) is int and value > 0:
        return value
    if isinstance(value, str) and re.fullmatch(r"auto|channel|tensor|[1-9]\d*x[1-9]\d*", value):
        return value
    raise ValueError(
        "expected a positive whole number, {size: 128, strict: true}, 'channel', 'tensor' or a block such as 128x128, "
        f"found {shorten(value)}"
    )


def _symmetric(value: Any) -> bool | str:
    if isinstance(value, bool):
        return value
    if value == "auto":
        return "auto"
    raise ValueError(f"expected true, false or 'auto', found {shorten(value)}")


def _texts(value: Any, expected: str) -> tuple[str, ...]:
    """Return one text, or a list of texts, as a tuple."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"expected {expected} or a list of them, found {shorten(value)}")
    return tuple(texts)


def _patterns(value: Any) -> tuple[str, ...]:
    patterns = _texts(value, "a module pattern")
    if not all(patterns):
        raise ValueError(f"expected a module pattern or a list of them, found {shorten(value)}")
    for pattern in patterns:
        _valid(check_pattern, pattern)
    return patterns


def _layer_numbers(value: Any) -> tuple[int, ...]:
    numbers = value if isinstance(value, list | tuple) else [value]
    if numbers and all(type(number) is int and number >= 0 for number in numbers):
        return tuple(numbers)
    raise ValueError(f"expected the number of a layer, from 0, or a list of them, found {shorten(value)}")


def _samples(value: Any) -> int | str:
    if type(value) is int and value > 0:
        return value
    if value == "auto":
        return "auto"
    raise ValueError(f"expected 'auto' or a number above 0, found {shorten(value)}")


def _data(value: str) -> str:
    if value == "bundled" or value.endswith((".txt", ".jsonl")) or (value.startswith("hub:") and len(value) > 4):
        return value
    raise ValueError(f"{DATA_HELP}, found {shorten(value)}{suggestion(value, ['bundled'])}")


def _name(value: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        return value
    raise ValueError(
        f"expected letters, digits, '.', '_' and '-' (it becomes part of a directory name), found {shorten(value)}"
    )


DTypeName = Annotated[str, AfterValidator(_dtype)]
GroupSize = Annotated[int | str | dict[str, Any], PlainValidator(_group_size)]
Symmetric = Annotated[bool | str, PlainValidator(_symmetric)]
Patterns = Annotated[tuple[str, ...], PlainValidator(_patterns)]
Gates = Annotated[tuple[str, ...], PlainValidator(partial(_texts, expected="a gate such as 'recovery>=98.9'"))]
Positive = Annotated[int, Field(gt=0)]
LayerNumbers = Annotated[tuple[int, ...], PlainValidator(_layer_numbers)]
NumSamples = Annotated[int | str, PlainValidator(_samples)]

# With `samples: auto`: on real models, GPTQ gains little from more tokens than this per input of the widest linear.
_TOKENS_PER_INPUT = 16
_FEWEST_SAMPLES, _MOST_SAMPLES = 32, 128


class RecipeSection(BaseModel):
    """A mapping in a recipe file with strict types; unknown keys are refused with a list of the valid ones."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, data: Any) -> Any:
        names = ", ".join(cls.model_fields) or "none"
        if not isinstance(data, Mapping):
            raise ValueError(f"expected a mapping with the keys {names}, found {shorten(data)}")
        for key in data:
            if key not in cls.model_fields:
                raise ValueError(
                    f"unknown key {shorten(key)}{suggestion(str(key), cls.model_fields)}; valid keys: {names}"
                )
        return data


class GroupSizeSection(RecipeSection):
    """`group_size:` of weights as a mapping. With `strict: true`, refuse linears whose number of inputs is
    not a multiple of the size, instead of lowering the size.
    """

    size: Positive
    strict: bool = False


class WeightsSection(RecipeSection):
    """The section `weights:` of a recipe: number type, granularity and zero points of the weights."""

    dtype: DTypeName
    group_size: GroupSize = "auto"
    symmetric: Symmetric = True
    signed_scales: bool = True


def _mtp(value: Any) -> "WeightsSection | None":
    if value in (None, "keep"):
        return None
    if not isinstance(value, Mapping) and value != "int8":
        raise ValueError(
            f"expected int8, keep or a mapping such as {{dtype: int4, group_size: 64}}, found {shorten(value)}"
        )
    return WeightsSection.model_validate({"dtype": "int8"} if value == "int8" else value)


class WeightChanges(RecipeSection):
    """The section `weights:` of an override; fields that are None are taken from the recipe's own `weights:`."""

    dtype: DTypeName | None = None
    group_size: GroupSize | None = None
    symmetric: Symmetric | None = None
    signed_scales: bool | None = None


class ActivationsSection(RecipeSection):
    """The section `activations:` of a recipe: how the inputs of linears are quantized."""

    dtype: DTypeName
    dynamic: bool = True
    group_size: Positive | None = None
    clip: Literal["absmax", "mse"] = "absmax"


Granularity = Literal["tensor", "head", "token", "channel"]


class CacheSide(RecipeSection):
    """`keys:` or `values:` of `kv_cache:`. Fields that are None are taken from `kv_cache:` itself; if `granularity` is
    None there too, the default of the number type applies.
    """

    dtype: DTypeName | None = None
    granularity: Granularity | None = None


class CacheLayers(RecipeSection):
    """One entry of `kv_cache.layers`: different number types of keys, values or both in some layers. Keys or values
    that the entry omits are as in `kv_cache:` itself. With `skip: true`, the cache of these layers is not quantized.
    """

    numbers: LayerNumbers
    keys: CacheSide | None = None
    values: CacheSide | None = None
    skip: Literal[True] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "CacheLayers":
        if [self.keys or self.values, self.skip].count(None) != 1:
            raise ValueError("give 'keys', 'values' or both, or give only 'skip: true'")
        return self


class KVCacheSection(RecipeSection):
    """The section `kv_cache:` of a recipe: how keys and values are quantized."""

    dtype: DTypeName
    granularity: Granularity | None = None
    keys: CacheSide = CacheSide()
    values: CacheSide = CacheSide()
    layers: list[CacheLayers] = []
    rotation: Literal["none", "hadamard"] = "none"
    outliers: Literal["detect", "off"] = "detect"
    remedy: Literal["auto", "channel", "int8", "fp8", "leave"] = "auto"
    clip: Literal["absmax", "mse"] = "absmax"


class Override(RecipeSection):
    """One entry of `overrides:`. For the linears that match `modules`, it changes `weights`, skips quantization or
    keeps the source's codes.
    """

    modules: Patterns
    weights: WeightChanges | None = None
    skip: Literal[True] | None = None
    keep: Literal["source"] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "Override":
        # With `keep`, `weights` is the scheme in which the source's codes are written without loss.
        if [self.weights or self.keep, self.skip].count(None) != 1:
            raise ValueError("give 'weights', 'keep: source' or both, or give only 'skip: true'")
        return self


class CalibrationSection(RecipeSection):
    """The section `calibration:`: samples for the steps and for static scales.

    Args:
        data: "bundled", a path to a .txt or .jsonl file, or `hub:NAME[:CONFIG]`.
        samples: number of sequences, or "auto"; see `enough_samples`.
        sequence_length: tokens per sequence.
        field: key of the text in a .jsonl line or a hub row.
        split: name of the split of a hub data set.
        images: "bundled", a folder of image files, or a .jsonl file with images; for multimodal models.
        experts: whether statistics of experts use "all" tokens, or only those "routed" to each expert.
        inputs: what a layer is calibrated on: outputs of the earlier layers in the "quantized" or the "original" model.
    """

    data: Annotated[str, AfterValidator(_data)] = "bundled"
    samples: NumSamples = 128
    sequence_length: Annotated[int, Field(ge=8)] = 512
    field: str = "text"
    split: str = "train"
    images: Annotated[str, Field(min_length=1)] | None = None
    experts: Literal["all", "routed"] = "all"
    inputs: Literal["quantized", "original"] = "quantized"

    @property
    def plain(self) -> dict[str, Any]:
        """Return the section as plain data; omit the default of `inputs`, which older recipes do not have."""
        return self.model_dump(exclude=None if self.inputs == "original" else {"inputs"})

    @property
    def num_samples(self) -> int:
        """Return the number of sequences; while it is "auto", the largest number that "auto" can become."""
        return self.samples if isinstance(self.samples, int) else _MOST_SAMPLES

    def enough_samples(self, num_inputs: int) -> int:
        """Return how many sequences `auto` stands for, if the widest linear to quantize has `num_inputs` inputs: 16
        tokens per input, but at least 32 and at most 128 sequences.
        """
        enough = -(-_TOKENS_PER_INPUT * num_inputs // self.sequence_length)
        return max(_FEWEST_SAMPLES, min(enough, _MOST_SAMPLES))


class Measured(RecipeSection):
    """The section `measured:`, which a search writes for the reader; it does not affect the checkpoint.

    Args:
        kl: mean KL of the compressed model to the original, in nats per token.
        text, text_sha256: name and SHA-256 of the text that the KL was measured on.
        tokens: number of tokens of that text.
    """

    kl: float
    text: str
    text_sha256: str
    tokens: Positive


class Document(RecipeSection):
    """A whole recipe file; `build_steps` checks the entries of `steps` against the fields of the algorithms."""

    name: Annotated[str, AfterValidator(_name)]
    description: str = ""
    weights: WeightsSection | None = None
    activations: ActivationsSection | None = None
    kv_cache: KVCacheSection | None = None
    mtp: Annotated[WeightsSection | None, PlainValidator(_mtp)] = None
    ignore: Patterns = ()
    overrides: list[Override] = []
    steps: list[Any] = []
    calibration: CalibrationSection | None = None
    format: str = "compressed-tensors"
    embedding: str = ""
    imatrix: str = ""
    gates: Gates = ()
    measured: Measured | None = None
    seed: Annotated[int, Field(ge=0)] = 0


S = TypeVar("S", bound=BaseModel)

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
}


@contextmanager
def as_recipe_error(path: str) -> Iterator[None]:
    """Convert errors in this context to RecipeError with a message that begins with `path`: a file, or a location in a
    recipe.
    """
    try:
        yield
    except (InputError, ValueError) as error:
        kind = type(error) if isinstance(error, RecipeError) else RecipeError
        raise kind(f"{path}: {error}") from None


def validate(model: type[S], data: Any, prefix: str = "") -> S:
    """Convert plain data to an instance of a pydantic class.

    Args:
        model: a pydantic class.
        data: plain data.
        prefix: dotted path of `data` inside the file, for messages.
    Raises:
        RecipeError: the message gives the dotted path, the value found, and the valid values.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False)
        path = _dotted(details[0]["loc"], prefix)
        others = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
        raise RecipeError(f"{path}{': ' if path else ''}{_explain(details[0])}{others}") from None


def _dotted(location: tuple[int | str, ...], text: str) -> str:
    """Return the path of a field as users write it, such as `overrides[0].weights.dtype`.

    Args:
        location: keys and list indices.
        text: path of the field that contains them; "" = the whole recipe.
    """
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _explain(details: Any) -> str:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "missing":
        return "is required but missing"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        # pydantic writes Python's True, but the file is YAML.
        expected = context["expected"].replace("True", "true")
        options = re.findall(r"'([^']*)'", expected)
        return f"expected {expected}, found {shorten(value)}{suggestion(shorten(value), options)}"
    text = f"expected {_EXPECTED[kind]}" if kind in _EXPECTED else details["msg"][:1].lower() + details["msg"][1:]
    return f"{text}, found {shorten(value)}"
