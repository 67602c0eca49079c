"""Find the parts of a language model: decoder layers, embedding, final norm, head, and the module that runs the layers.

The model is built without weights. transformers says which modules are the model's embedding and head. To find the
decoder layers, hidden states are passed through the lists of modules near the embedding. The same works for a language
model inside a multimodal wrapper.
"""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.compress.calibration.expert_inputs import removed_after
from quantkit.errors import ModelError, first_line
from quantkit.huggingface.experts import set_parameter
from quantkit.huggingface.layer_call import tensors_beside
from quantkit.huggingface.layer_inputs import Recorder, pass_through
from quantkit.models.family import Family

# Token ids of the trial run: each id occurs once, and `_fill_table` creates one embedding for each.
_IDS = torch.arange(12).view(2, 6)


def find_model_layout(model: Any) -> tuple[Family, str]:
    """Find the parts of a language model.

    Args:
        model: a transformers model on the meta device with real buffers; its parameters outside the layers are
            replaced.
    Returns:
        A family that only has the names of the parts, and the reason why hidden states do not pass through the layers;
        "" if they do. If they do not, the layers are only the most likely candidate. `final_norm` is empty if no final
        norm has weights.
    Raises:
        ModelError: the model is not a causal language model, or has no modules that could be its layers.
    """
    kind = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ModelError(f"{kind} is an encoder-decoder model; quantkit compresses only decoder-only models")
    table = output = None
    if model.can_generate():
        table, output = model.get_input_embeddings(), model.get_output_embeddings()
    if output is None or not isinstance(table, nn.Module):
        raise ModelError(f"{kind} is not a causal language model: transformers has no next-token head for it")
    embedding, head = _name_of(model, table), _name_of(model, output)
    _fill_table(table)
    reasons: list[str] = []
    options = _candidates(model, embedding)
    for layers in options:
        family = Family(backbone=_backbone(model, layers), layers=layers, embedding=embedding, head=head, native=False)
        try:
            _blank(model.get_submodule(family.backbone), (layers, embedding), family.backbone)
            called, hands_on = _try(model, family.backbone, layers, table)
        except Exception as error:  # a model that is called in an unexpected way may raise anything
            reasons.append(f"{layers}: {first_line(error)}")
            continue
        return replace(family, final_norm=_final_norm(model, layers, called), hands_on=hands_on), ""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for layers in options:  # otherwise the first list of the right length
        if len(model.get_submodule(layers)._modules) == count:
            family = Family(backbone=_backbone(model, layers), layers=layers, embedding=embedding, head=head)
            return replace(family, final_norm=_final_norm(model, layers, set()), native=False), "; ".join(reasons)
    why = "; ".join(reasons) or "the model has no list of modules with weight matrices"
    raise ModelError(f"{kind}: found no decoder layers through which hidden states pass ({why})")


def _name_of(model: nn.Module, part: nn.Module) -> str:
    names: list[str] = [name for name, module in model.named_modules() if module is part]
    return names[0]


def module_ancestors(name: str) -> Iterator[str]:
    """Yield the names of the modules around a module, innermost first; the last is "", the whole model."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _candidates(model: nn.Module, embedding: str) -> list[str]:
    """Return the names of the module lists that contain weight matrices and are nearest to the embedding. The least
    nested list comes first; of equally nested lists, the longest comes first.
    """
    lengths: dict[str, int] = {}
    for name, module in model.named_modules():
        # A list inside another one is part of a layer, e.g. its experts.
        inside = any(name.startswith(f"{other}.") for other in lengths)
        if isinstance(module, nn.ModuleList) and not inside and any(p.dim() >= 2 for p in module.parameters()):
            lengths[name] = len(module)
    for owner in module_ancestors(embedding):
        near = [name for name in lengths if not owner or name.startswith(f"{owner}.")]
        if near:
            return sorted(near, key=lambda name: (name.count("."), -lengths[name]))
    return []


def _backbone(model: nn.Module, layers: str) -> str:
    """Return the innermost module around the layers that accepts hidden states instead of token ids."""

    def takes_states(name: str) -> bool:
        return "inputs_embeds" in inspect.signature(model.get_submodule(name).forward).parameters

    return next(name for name in module_ancestors(layers) if not name or takes_states(name))


def _fill_table(table: nn.Module) -> None:
    """Replace the weights of an embedding table with a few random rows."""
    width = table.get_parameter("weight").shape[1]
    rows = torch.randn(_IDS.numel(), width, generator=torch.Generator().manual_seed(0))
    table.__dict__["padding_idx"] = None
    set_parameter(table, "weight", rows)


def _blank(backbone: nn.Module, but: tuple[str, ...], name: str) -> None:
    """Replace the backbone's meta parameters, except those of the modules `but`, with zeros that need no memory.

    Modules before the layers may read these parameters. `name` is the name of the backbone.
    """
    known = tuple(f"{other.removeprefix(f'{name}.')}." for other in but)
    for key, parameter in list(backbone.named_parameters()):
        if parameter.is_meta and not key.startswith(known):
            set_parameter(backbone, key, torch.zeros((), dtype=torch.float32).expand(parameter.shape))


def _try(model: nn.Module, backbone: str, layers: str, table: nn.Module) -> tuple[set[nn.Module], bool]:
    """Run token ids, and then their embeddings, through the model. Return the modules that were called before the end
    of the layers, and whether the layers use the token ids directly.
    """
    called: set[nn.Module] = set()
    handles = [m.register_forward_hook(lambda m, args, out: called.add(m)) for m in model.modules()]
    with removed_after(handles):
        by_ids = pass_through(model, backbone, layers, input_ids=_IDS)
        with torch.inference_mode():
            hidden = table(_IDS)
        try:
            by_states = pass_through(model, backbone, layers, inputs_embeds=hidden)
        except Exception:  # a model that needs the ids may raise anything
            return called, True
    alike = (_sees_same(ours, theirs) for ours, theirs in zip(by_ids, by_states, strict=True))
    return called, not all(alike)


def _sees_same(left: Recorder, right: Recorder) -> bool:
    """Whether two runs call a layer with the same tensors: the same hidden states and the same other arguments."""
    same = left.hidden is not None and right.hidden is not None and _close(left.hidden, right.hidden)
    return same and not tensors_beside(left.arguments, right.arguments, _close)


def _close(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(left.float(), right.float())


def _final_norm(model: nn.Module, layers: str, called: set[nn.Module]) -> str:
    """Return the name of the final norm: the last module in the layers' parent that has one weight per channel and was
    not called before the end of the layers. "" if there is none.
    """
    owner = layers.rpartition(".")[0]
    children = [(name, module) for name, module in model.get_submodule(owner).named_children() if module not in called]
    weights = {name: module._parameters.get("weight") for name, module in children}
    norms = [name for name, weight in weights.items() if weight is not None and weight.dim() == 1]
    return f"{owner}.{norms[-1]}".removeprefix(".") if norms else ""
