"""Rebuild decoder layers so that every weight to quantize is an `nn.Linear` that is named as in checkpoints.

transformers 5 stacks the experts of a layer in two tensors, GPT-2 stores its linears transposed, and in some families
module names differ between code and files. This module rebuilds a layer on the meta device and hides these differences
from algorithms; the layer's output does not change. `checkpoints.model_reader` handles the tensors on disk.
Shapes: T tokens, H hidden size, I intermediate size of an expert, E experts, k chosen experts per token.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.models.family import Experts, Family


def set_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter of a module, e.g. one on the meta device; the new parameter has no gradient.

    Args:
        module: module to modify.
        name: dotted name relative to the module.
        value: the new value, which is not copied.
    """
    owner, _, leaf = name.rpartition(".")
    module.get_submodule(owner).register_parameter(leaf, nn.Parameter(value, requires_grad=False))


def set_stored(module: nn.Module, name: str, value: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Set a parameter or persistent buffer of a module; a buffer keeps its dtype, because it may hold indices or flags.

    Args:
        module: module to modify.
        name: dotted name relative to the module.
        value: the new value.
        dtype: dtype of a parameter.
        device: device of the parameter or buffer.
    """
    owner, _, leaf = name.rpartition(".")
    buffers = module.get_submodule(owner)._buffers
    if (buffer := buffers.get(leaf)) is not None:
        buffers[leaf] = value.to(device, buffer.dtype)
    else:
        set_parameter(module, name, value.to(device, dtype))


class Expert(nn.Module):
    """One expert built of `nn.Linear` modules.

    Args:
        names: names of the expert's linears in the checkpoint: gate and up, or up alone, then down.
        hidden, width: H and I.
        bias: whether the linears have biases.
        gate: function that maps the outputs (T, I) of gate and up, or of up alone, to the activation (T, I).
    """

    def __init__(
        self, names: tuple[str, ...], hidden: int, width: int, bias: bool, gate: Callable[..., Tensor]
    ) -> None:
        super().__init__()
        self._names, self._gate = names, gate
        for name in names[:-1]:
            self.add_module(name, nn.Linear(hidden, width, bias=bias, device="meta"))
        self.add_module(names[-1], nn.Linear(width, hidden, bias=bias, device="meta"))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute the expert: (T, H) -> (T, H)."""
        *up, down = (self.get_submodule(name) for name in self._names)
        output: Tensor = down(self._gate(*(linear(hidden_states) for linear in up)))
        return output


class LinearExperts(nn.ModuleList):
    """Replacement, with the same call signature, for a module that stacks all experts of a layer in 3-D parameters.

    Args:
        fused: the replaced module, which provides shapes and activation; its weights are not used.
        data: the family's description of experts.
    """

    def __init__(self, fused: nn.Module, data: Experts) -> None:
        down = fused.get_parameter("down_proj")
        hidden, width = (down.shape[2], down.shape[1]) if data.transposed else (down.shape[1], down.shape[2])
        bias = "gate_up_proj_bias" in dict(fused.named_parameters())
        names = tuple(name.rpartition(".")[2] for name in (*data.up, data.down))
        assert len(names) == 2 + data.gated, f"an expert has gate, up and down, or no gate, not {names}"
        gate = functools.partial(_activated, fused, data.interleaved) if data.gated else fused.get_submodule("act_fn")
        super().__init__([Expert(names, hidden, width, bias, gate) for _ in range(down.shape[0])])

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None
    ) -> Tensor:
        """Compute the same output as the replaced module.

        Args:
            hidden_states: (..., H). Without the other arguments: (E * T, H), a weighted copy of all tokens for each
                expert.
            top_k_index: (T, k) chosen experts of each token.
            top_k_weights: (T, k) weights of the chosen experts, or (T, E) weights of all experts.
        Returns:
            Tensor of the shape of `hidden_states`.
        """
        if top_k_index is None or top_k_weights is None:
            tokens = hidden_states.view(len(self), -1, hidden_states.shape[-1])
            return torch.cat([expert(own) for expert, own in zip(self, tokens, strict=True)])
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        if top_k_weights.shape != top_k_index.shape:
            top_k_weights = top_k_weights.gather(1, top_k_index)
        output = torch.zeros_like(flat)
        for number, expert in enumerate(self):
            tokens, slots = torch.where(top_k_index == number)
            if len(tokens):
                weighed = expert(flat[tokens]) * top_k_weights[tokens, slots, None]
                # The router's weights may be float32, and index_add_ takes only one dtype.
                output.index_add_(0, tokens, weighed.to(output.dtype))
        return output.view_as(hidden_states)


def _activated(fused: Any, interleaved: bool, gate: Tensor, up: Tensor) -> Tensor:
    """Apply the activation of a fused module to separate gate and up outputs."""
    activated: Tensor
    if hasattr(fused, "_apply_gate"):
        activated = fused._apply_gate(
            torch.stack((gate, up), dim=-1).flatten(-2) if interleaved else torch.cat((gate, up), dim=-1)
        )
    elif interleaved:  # gpt-oss before transformers 5
        gate, up = gate.clamp(max=fused.limit), up.clamp(min=-fused.limit, max=fused.limit)
        activated = (up + 1) * gate * torch.sigmoid(gate * fused.alpha)
    else:
        activated = fused.act_fn(gate) * up
    return activated


def rebuild_layer(layer: nn.Module, family: Family) -> None:
    """Replace a layer's stacked experts and transposed linears with `nn.Linear`s, and name modules as in checkpoints.

    Args:
        layer: layer on the meta device; modified.
        family: family of the model.
    """
    gated = family.experts is None or family.experts.gated
    stacked = [name for name, module in layer.named_modules() if holds_stacked_experts(module, gated)]
    # If several modules stack experts, e.g. for text and for images, rebuild only the one that the family names.
    named = [name for name in stacked if family.experts is not None and family.experts.down.startswith(f"{name}.")]
    for name, module in list(layer.named_modules()):
        if family.experts is not None and name in (named or stacked):
            _replace(layer, name, LinearExperts(module, family.experts))
        elif type(module).__name__ == "Conv1D" and name in family.transposed:
            width, rows = module.get_parameter("weight").shape
            _replace(layer, name, nn.Linear(width, rows, device="meta"))
    _rename(layer, family.stored_modules)


def holds_stacked_experts(module: nn.Module, gated: bool = True) -> bool:
    """Whether a module stacks experts in two 3-D parameters with the same number of experts E.

    False for LongCat: its `gate_up_proj` has further entries for experts that compute nothing.
    """
    parameters = dict(module.named_parameters(recurse=False))
    names = ("gate_up_proj" if gated else "up_proj", "down_proj")
    stacked = [parameters[name] for name in names if name in parameters]
    return [item.dim() for item in stacked] == [3, 3] and stacked[0].shape[0] == stacked[1].shape[0]


def _replace(layer: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(layer.get_submodule(owner), leaf, module)


def _rename(layer: nn.Module, stored: Mapping[str, str]) -> None:
    """Register modules under their names in checkpoints; the layer's code still finds them under the names it uses."""
    for name, other in stored.items():
        owner, _, leaf = name.rpartition(".")
        try:
            parent = layer.get_submodule(owner)
            module = parent.get_submodule(leaf)
        except AttributeError:
            continue  # this transformers version, or this layer, already uses the stored name
        del parent._modules[leaf]
        # Bypass nn.Module's registry: the layer's code finds the module, but its parameters have only the stored name.
        parent.__dict__[leaf] = module
        owner, _, leaf = other.rpartition(".")
        *outer, last = owner.split(".")
        if last and last not in layer.get_submodule(".".join(outer))._modules:
            layer.get_submodule(".".join(outer)).add_module(last, nn.Module())  # exists only in checkpoints' names
        layer.get_submodule(owner).add_module(leaf, module)
