"""Families of models as data. Each file holds one family or a few related ones; `find` picks one by config.json.

A YAML file has an entry for each family, with the fields of `Family`. A value that describes a part, such as `experts`,
has the fields of the part's class. Its optional entry `like` names a value in `_BASES`, from which the fields that are
not listed are taken. If data cannot express what a family computes, a Python file defines the family as `FAMILY`.
"""

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from quantkit.errors import InputError, ModelError
from quantkit.models.config import NotNative
from quantkit.models.family import BALANCED_EXPERTS, SHARED_EXPERTS, Family, Window
from quantkit.models.linear_sets import MLA_SETS, LinearSet
from quantkit.models.stored_names import GGUF_EXPERTS, GGUF_NUMBERS

# Classes of the fields of `Family` that have fields of their own, keyed by the field's name.
_PARTS: dict[str, Any] = {
    name: kind
    for name, hint in get_type_hints(Family).items()
    for kind in (hint, *get_args(hint))
    if is_dataclass(kind)
}
_BASES: dict[str, Any] = {
    "shared": SHARED_EXPERTS,
    "balanced": BALANCED_EXPERTS,
    "usual": GGUF_NUMBERS,
    "with_experts": {**GGUF_NUMBERS, **GGUF_EXPERTS},
}


def known() -> dict[str, Family]:
    """Return all families, keyed by name."""
    return dict(_read(tuple(__path__)))


@functools.cache
def _read(folders: tuple[str, ...]) -> dict[str, Family]:
    families: dict[str, Family] = {}
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for file in (file for folder in folders for file in Path(folder).glob("*.yaml")):
        for name, entry in yaml.load(file.read_text(encoding="utf-8"), loader).items():
            try:
                families[name] = _family(entry)
            except (LookupError, TypeError, ValueError) as error:
                raise InputError(f"{file}: the family {name!r} is not valid: {error}") from error
    for name in (module.name for module in pkgutil.iter_modules(folders)):
        families[name.replace("_", "-")] = importlib.import_module(f"{__name__}.{name}").FAMILY
    return dict(sorted(families.items()))


def _family(entry: Mapping[str, Any]) -> Family:
    """Return the family that an entry of a YAML file describes."""
    fields = {name: _plain(value, _PARTS.get(name, dict)) for name, value in entry.items()}
    if "linear_sets" in fields:
        fields["linear_sets"] = tuple(LinearSet(**one) for one in fields["linear_sets"])
    return Family(**fields)


def _plain(value: Any, kind: type = dict) -> Any:
    """Convert a value from YAML: a list to a tuple, a mapping to a `kind` object or, with `like`, to a changed copy."""
    if isinstance(value, list):
        return tuple(map(_plain, value))
    if not isinstance(value, dict):
        return value
    fields = {name: _plain(item) for name, item in value.items() if name != "like"}
    if "like" not in value:
        return kind(**fields)
    base = _BASES[value["like"]]
    return {**base, **fields} if isinstance(base, dict) else replace(base, **fields)


def supported() -> dict[str, Family]:
    """Return all families that checkpoints can name, keyed by class name in `architectures` of config.json."""
    return {name: data for data in known().values() for name in data.hf_names}


# Why quantkit refuses a model, keyed by `model_type`: these models differ from the family that their name suggests.
_REFUSED = {"deepseek_v41": "unlike DeepSeek-V4, its layers share caches and look up n-gram tables"}


def _refuse(config: Mapping[str, Any]) -> None:
    why = _REFUSED.get(str(config.get("model_type")))
    if why is not None:
        raise ModelError(f"config.json: model_type {config['model_type']!r} is not supported: {why}")


# Model types that transformers runs with a known family's class, although their files use other tensor names.
_RENAMED = ("exaone", "sarvam_moe")


def find(config: Mapping[str, Any]) -> Family:
    """Return the family that a model's config.json names.

    Raises:
        NotNative: config.json names a class that no family file describes.
        ModelError: config.json names no class, or a model that quantkit refuses.
    """
    _refuse(config)
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelError(
            "config.json has no 'architectures' entry, so the model's family is unknown; add the model's class name"
        )
    by_class = supported()
    for name in map(str, names):
        family = by_class.get(name)
        if family is not None and family.describes(config) and config.get("model_type") not in _RENAMED:
            return family
    raise NotNative(f"architecture {names[0]!r}")


def find_language_model(config: Mapping[str, Any]) -> tuple[Family, Mapping[str, Any]]:
    """Return the family and the config.json of a model, or of the language model inside a known multimodal wrapper.

    Raises:
        NotNative, ModelError: see `find`.
    """
    names, text = config.get("architectures"), config.get("text_config")
    if not isinstance(names, list) or not isinstance(text, Mapping):
        return find(config), config
    for family in known().values():
        if not set(family.wrappers) & set(map(str, names)):
            continue
        inner = {**config, **text, "tie_word_embeddings": config.get("tie_word_embeddings")}  # the head is outside
        del inner["text_config"]
        moved = {
            part: "model.language_model" + getattr(family, part).removeprefix(family.backbone)
            for part in ("backbone", "layers", "embedding", "final_norm")
        }
        return replace(family, **moved, unread=(*family.unread, "model.visual.")), inner
    return find(config), config


# Planning counts a model that no file describes as if it were a Llama, perhaps with DeepSeek's latent attention and
# experts.
UNKNOWN = Family(
    linear_sets=tuple(replace(group, optional=True) for group in (*MLA_SETS, *Family(experts=SHARED_EXPERTS).sets)),
    window=Window(rule="upper", switch="use_sliding_window"),
    experts=SHARED_EXPERTS,
    mlp_ratio=4,
    native=False,
    known=False,
)


def family_for_counting(config: Mapping[str, Any]) -> Family:
    """Return the family that matches the classes or the `model_type` in a config.json; `UNKNOWN` if none matches.

    Raises:
        ModelError: the config.json looks like that of a known family, but quantkit refuses the model.
    """
    _refuse(config)
    with suppress(ModelError):
        return find(config)
    inner = config.get("text_config")
    model_type = str((inner if isinstance(inner, Mapping) else config).get("model_type") or "llama")
    for name, family in known().items():
        if model_type in (name.replace("-", "_"), *family.model_types) and family.describes(config):
            return family
    return UNKNOWN
