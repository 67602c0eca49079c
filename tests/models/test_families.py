"""Every family file names modules that its transformers model really has, and fused sets share their input."""

from __future__ import annotations

import dataclasses
import typing

import pytest
import torch
from pydantic import TypeAdapter
from transformers import AutoModelForCausalLM

from quantkit.errors import ModelError
from quantkit.huggingface.experts import rebuild_layer
from quantkit.models.description import describe
from quantkit.models.families import find, known, supported
from tests.helpers import COMPRESSED_ONLY, EVERY_FAMILY, EXPERT_FAMILIES, known_to_transformers, tiny_config


def test_every_family_is_found_by_its_class_name():
    names = supported()
    assert {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"} <= set(names)
    for name, family in names.items():
        assert find({"architectures": [name]}) is family


def test_every_value_has_the_type_of_its_field():
    """YAML could hold a name in place of a list of names, or `1e-5`, which is text there: it wants `1.0e-5`."""
    for family in known().values():
        parts = [getattr(family, field.name) for field in dataclasses.fields(family)]
        for part in (family, *filter(dataclasses.is_dataclass, parts)):
            for name, kind in typing.get_type_hints(type(part)).items():
                if not callable(value := getattr(part, name)):
                    TypeAdapter(kind).validate_python(value, strict=True)
        assert not [text for text in family.defaults.values() if isinstance(text, str) and text[0].isdigit()]


def rebuilt_layers(name, device):
    """The family, the model, and its layers with a linear for every weight."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(tiny_config(name)).eval()
    family = find({"architectures": [type(model).__name__]})
    layers = model.get_submodule(family.layers)
    return family, model, layers


def sets_of(family, model, layer):
    names = {name.removesuffix(".weight") for name, _ in layer.named_parameters()}
    return family.sets_of_layer(names.__contains__, model.config.to_dict())


GROUPED = {"self_attn.o_a_proj"}  # DeepSeek-V4's product of each group of heads by itself, which no loader quantizes


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_the_names_exist_and_cover_every_linear_of_a_layer(name):
    family, model, layers = rebuilt_layers(name, "meta")
    for part in (family.backbone, family.embedding, family.head, family.final_norm):
        assert model.get_submodule(part) is not None
    for layer in layers:
        rebuild_layer(layer, family)
        sets = sets_of(family, model, layer)
        linears = {name for name, module in layer.named_modules() if isinstance(module, torch.nn.Linear)}
        listed = [name for group in sets for name in group.linears]
        assert len(listed) == len(set(listed))
        assert set(listed) == linears - {name for group in sets for name in group.beside} - GROUPED
        for group in sets:
            assert layer.get_submodule(group.parent) is not None
            assert group.source is None or layer.get_parameter(f"{group.source}.weight") is not None
            assert all(layer.get_parameter(f"{name}.weight").dim() == 2 for name in group.beside)


@pytest.mark.parametrize("name", [name for name in EVERY_FAMILY if name not in EXPERT_FAMILIES])
def test_linears_of_a_set_see_the_same_tensor(name):
    family, model, layers = rebuilt_layers(name, "cpu")
    layer, seen = layers[0], {}
    sets = sets_of(family, model, layer)
    for name in (name for group in sets for name in group.linears if "experts." not in name):
        layer.get_submodule(name).register_forward_pre_hook(lambda m, args, name=name: seen.update({name: args[0]}))
    model(input_ids=torch.arange(12)[None])
    for group in sets:
        first = seen[group.linears[0]]
        for name in group.linears:
            assert seen[name] is first or seen[name].data_ptr() == first.data_ptr()  # a view of it is the same


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no 'architectures' entry"),
        ({"architectures": []}, "no 'architectures' entry"),
        ({"architectures": ["BertModel"]}, "'BertModel' is not supported by quantkit's own layers"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "exaone"}, "is not supported by quantkit's own layers"),
    ],
)
def test_unknown_families_are_refused(config, message):
    with pytest.raises(ModelError, match=message):
        find(config)


def test_every_family_here_has_a_tiny_model_in_the_tests():
    tested = set()
    for family in EVERY_FAMILY:
        with torch.device("meta"):
            tested.add(
                id(find({"architectures": [type(AutoModelForCausalLM.from_config(tiny_config(family))).__name__]}))
            )
    missing = [name for name, data in supported().items() if id(data) not in tested]
    assert not missing or not all(known_to_transformers(name) for name in COMPRESSED_ONLY)


def test_the_familys_own_name_wins_over_a_stray_one():
    """transformers ignores `intermediate_size` in a config of GPT-2, whose `n_inner` says null: 4 times the width."""
    config = {"architectures": ["GPT2LMHeadModel"], "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 16}
    config |= {"vocab_size": 32, "intermediate_size": 20}
    family = find(config)
    assert describe({**config, "n_inner": None}, family).width == 32
    assert describe({**config, "n_inner": 24}, family).width == 24
