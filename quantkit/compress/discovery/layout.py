"""Where the parts of a language model are: its decoder layers, embedding, final norm, head, and what runs them.

Found in a transformers model without weights, by asking it for its embedding and head and by passing hidden states
through the lists of modules near the embedding. A language model inside a multimodal wrapper is found in the same way.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from quantkit.checkpoints.experts import set_parameter
from quantkit.checkpoints.layer_inputs import pass_through
from quantkit.compress.calibration.expert_inputs import removed_after
from quantkit.errors import ModelError, first_line
from quantkit.models.family import Family

# Token ids of the trial run, one per row of a table of as many embeddings.
_IDS = torch.arange(12).view(2, 6)


def find_model_layout(model: Any) -> Family:
    """Find the parts of a language model.

    Args:
        model: a transformers model on the meta device, buffers real; parameters outside its layers are replaced.
    Returns:
        a family that only says where they are: `final_norm` is empty when there is none with weights.
    Raises:
        ModelError: it is no causal language model, or no list of layers is one that hidden states pass through; one
            line says which.
    """
    kind = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ModelError(f"{kind} is an encoder with a decoder; only models of decoder layers alone can be compressed")
    table = output = None
    if model.can_generate():
        table, output = model.get_input_embeddings(), model.get_output_embeddings()
    if output is None or not isinstance(table, nn.Module):
        raise ModelError(f"{kind} is no causal language model: transformers knows no next-token head of it")
    embedding, head = _name_of(model, table), _name_of(model, output)
    _fill_table(table)
    reasons: list[str] = []
    for layers in _candidates(model, embedding):
        backbone = _backbone(model, layers)
        try:
            _blank(model.get_submodule(backbone), (layers, embedding), backbone)
            called = _try(model, backbone, layers, table)
        except Exception as error:  # whatever a model raises that is not called as it expects
            reasons.append(f"{layers}: {first_line(error)}")
            continue
        return Family(
            backbone=backbone,
            layers=layers,
            embedding=embedding,
            final_norm=_final_norm(model, layers, embedding, called),
            head=head,
            native=False,
        )
    why = "; ".join(reasons) or "it has no list of modules with linears beside its embedding"
    raise ModelError(f"{kind}: no decoder layers found that hidden states pass through ({why})")


def _name_of(model: nn.Module, part: nn.Module) -> str:
    names: list[str] = [name for name, module in model.named_modules() if module is part]
    return names[0]


def owners(name: str) -> Iterator[str]:
    """Names of the modules around one, the innermost first; the last is "", the whole model."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _candidates(model: nn.Module, embedding: str) -> list[str]:
    """Lists of modules with linears, those around the embedding first, then the least nested, then the longest."""
    lengths: dict[str, int] = {}
    for name, module in model.named_modules():
        # A list inside another one is part of a layer, e.g. its experts.
        inside = any(name.startswith(f"{other}.") for other in lengths)
        if isinstance(module, nn.ModuleList) and not inside and any(p.dim() >= 2 for p in module.parameters()):
            lengths[name] = len(module)
    for owner in owners(embedding):
        near = [name for name in lengths if not owner or name.startswith(f"{owner}.")]
        if near:
            return sorted(near, key=lambda name: (name.count("."), -lengths[name]))
    return []


def _backbone(model: nn.Module, layers: str) -> str:
    """The innermost module around the layers that takes hidden states in place of token ids."""

    def takes_states(name: str) -> bool:
        return "inputs_embeds" in inspect.signature(model.get_submodule(name).forward).parameters

    return next(name for name in owners(layers) if not name or takes_states(name))


def _fill_table(table: nn.Module) -> None:
    """A few random embeddings in place of all; a padding token would be another row of them."""
    width = table.get_parameter("weight").shape[1]
    rows = torch.randn(_IDS.numel(), width, generator=torch.Generator().manual_seed(0))
    table.__dict__["padding_idx"] = None
    set_parameter(table, "weight", rows)


def _blank(backbone: nn.Module, but: tuple[str, ...], name: str) -> None:
    """Zeros that take no memory in place of parameters without values; what comes before the layers may use them."""
    known = tuple(f"{other.removeprefix(f'{name}.')}." for other in but)
    for key, parameter in list(backbone.named_parameters()):
        if parameter.is_meta and not key.startswith(known):
            set_parameter(backbone, key, torch.zeros((), dtype=torch.float32).expand(parameter.shape))


def _try(model: nn.Module, backbone: str, layers: str, table: nn.Module) -> set[nn.Module]:
    """Pass token ids and their embeddings through; the modules that were called on the way.

    Raises:
        ModelError: the layers do not see the same in both cases.
    """
    called: set[nn.Module] = set()
    handles = [m.register_forward_hook(lambda m, args, out: called.add(m)) for m in model.modules()]
    with removed_after(handles):
        by_ids = pass_through(model, backbone, layers, input_ids=_IDS)[0].hidden
        with torch.inference_mode():
            hidden = table(_IDS)
        by_hidden = pass_through(model, backbone, layers, inputs_embeds=hidden)[0].hidden
    if by_ids is None or by_hidden is None or by_ids.shape != by_hidden.shape or not torch.allclose(by_ids, by_hidden):
        raise ModelError("its layers see more of the token ids than their embeddings")
    return called


def _final_norm(model: nn.Module, layers: str, embedding: str, called: set[nn.Module]) -> str:
    """The last module beside the layers with a weight per channel that was not called before them."""
    owner = layers.rpartition(".")[0]
    children = [(name, module) for name, module in model.get_submodule(owner).named_children() if module not in called]
    weights = {name: module._parameters.get("weight") for name, module in children}
    norms = [name for name, weight in weights.items() if weight is not None and weight.dim() == 1]
    return f"{owner}.{norms[-1]}".removeprefix(".") if norms else ""
