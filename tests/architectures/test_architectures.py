"""Every family file names modules that its transformers model really has, and fused sets share their input."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantkit.architectures import find, find_compressible, supported
from quantkit.errors import ModelError
from tests.helpers import EXPERT_FAMILIES, FAMILIES, MORE_FAMILIES, tiny_config


def test_every_family_is_found_by_its_class_name():
    names = supported()
    assert {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"} <= set(names)
    for name, architecture in names.items():
        assert find({"architectures": [name]}) is architecture


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_the_names_exist_and_cover_every_linear_of_a_layer(family):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family))
    architecture = find({"architectures": [type(model).__name__]})
    layer = model.get_submodule(architecture.layers)[0]
    linears = {name for name, module in layer.named_modules() if isinstance(module, torch.nn.Linear)}
    assert set(architecture.linears) == linears
    for part in (architecture.backbone, architecture.embedding, architecture.head):
        assert model.get_submodule(part) is not None
    for group in architecture.linear_sets:
        assert layer.get_submodule(group.parent) is not None
        assert group.source is None or layer.get_submodule(group.source) is not None


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_linears_of_a_set_see_the_same_tensor(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family))
    architecture = find({"architectures": [type(model).__name__]})
    layer, seen = model.get_submodule(architecture.layers)[0], {}
    for name in architecture.linears:
        layer.get_submodule(name).register_forward_pre_hook(lambda m, args, name=name: seen.update({name: args[0]}))
    model(input_ids=torch.arange(12)[None])
    for group in architecture.linear_sets:
        assert all(seen[name] is seen[group.linears[0]] for name in group.linears)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no 'architectures' entry"),
        ({"architectures": []}, "no 'architectures' entry"),
        ({"architectures": ["BertModel"]}, "'BertModel' is not supported; supported: .*, LlamaForCausalLM"),
    ],
)
def test_unknown_families_are_refused(config, message):
    with pytest.raises(ModelError, match=message):
        find(config)


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_families_with_experts_run_but_are_not_compressed(family):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family))
    config = {"architectures": [type(model).__name__]}
    architecture = find(config)
    for part in (architecture.backbone, architecture.embedding, architecture.head, architecture.final_norm):
        assert model.get_submodule(part) is not None
    with pytest.raises(ModelError, match=f"{type(model).__name__} can be run but not compressed: its experts"):
        find_compressible(config)


def test_every_family_here_has_a_tiny_model_in_the_tests():
    tested = set()
    for family in (*FAMILIES, *MORE_FAMILIES, *EXPERT_FAMILIES):
        with torch.device("meta"):
            tested.add(type(AutoModelForCausalLM.from_config(tiny_config(family))).__name__)
    assert tested == set(supported())
