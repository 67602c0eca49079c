"""Split experts that a model stores as two 3-D parameters into linears: find the linears' names and order of rows.

Nothing states how the outputs of gate and up are ordered in one tensor. So each order is tried with random numbers, and
the order whose result equals the module's output is used.
Shapes: T tokens, H hidden width, I width of an expert, E experts, k of them for each token.
"""

import copy
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from quantkit.checkpoints.model_reader import expert_parts
from quantkit.errors import ModelError
from quantkit.huggingface.experts import LinearExperts, holds_stacked_experts, set_parameter
from quantkit.models.family import Experts

_TOKENS = 8
_NAMES = ("gate_proj", "up_proj", "down_proj")


def find_experts(
    names: Sequence[str], prefix: str, layers: nn.Module, loaded: Callable[[str], list[str]] = lambda name: []
) -> Experts | None:
    """Return the description of a model's stacked experts; None if no layer has experts in 3-D parameters.

    Args:
        names: names of the checkpoint's tensors.
        prefix: prefix of the layers' tensors in these names, up to a layer's number.
        layers: the list of layers, on the meta device.
        loaded: function from the name of a stacked tensor to the names that loaders expect for the linears of one
            expert in it.
    Raises:
        ModelError: the experts cannot be split.
    """
    for index, layer in enumerate(layers.children()):
        for name, module in layer.named_modules():
            if holds_stacked_experts(module):
                gate, up, down = _stored_names(names, f"{prefix}{index}.{name}", loaded)
                own = f"{name}.{{expert}}"
                data = Experts(
                    up=(f"{own}.{gate}", f"{own}.{up}"),
                    down=f"{own}.{down}",
                    stacked_up=f"{name}.gate_up_proj",
                    stacked_down=f"{name}.down_proj",
                )
                return _with_order(name, module, data)
    return None


def _stored_names(names: Sequence[str], owner: str, loaded: Callable[[str], list[str]]) -> tuple[str, str, str]:
    """Return the names of an expert's gate, up and down projections.

    If the files store each expert separately, these are the names in the files. If the files stack the experts in one
    tensor, these are the names that loaders expect for separate experts.
    """
    pattern = re.compile(rf"{re.escape(owner)}\.0\.([^.]+)\.weight")
    leaves = sorted(match.group(1) for name in names if (match := pattern.fullmatch(name)))
    if not leaves:
        parts = (*loaded(f"{owner}.gate_up_proj"), *loaded(f"{owner}.down_proj"))
        return parts if len(parts) == 3 else _NAMES
    for known in (_NAMES, ("w1", "w3", "w2")):
        if set(known) == set(leaves):
            return known
    raise ModelError(
        f"experts of {owner} consist of the linears {', '.join(leaves)}; quantkit only supports experts that consist "
        "of gate_proj, up_proj and down_proj, or of w1, w3 and w2"
    )


def _with_order(name: str, module: nn.Module, data: Experts) -> Experts:
    """Return `data` with the order of rows for which plain linears give the same result as the module."""
    up, down = module.get_parameter("gate_up_proj").shape, module.get_parameter("down_proj").shape
    fused = copy.deepcopy(module).eval()
    fill_randomly(fused, torch.Generator().manual_seed(0))
    for transposed, interleaved in itertools.product((False, True), repeat=2):
        option = replace(data, transposed=transposed, interleaved=interleaved)
        # Shapes rule most orders out before anything is computed.
        (hidden, wide), (width, other) = (up[1:], down[1:]) if transposed else (up[:0:-1], down[:0:-1])
        if wide == 2 * width and other == hidden and _same(name, fused, option, hidden):
            return option
    raise ModelError(f"experts {name} are 3-D tensors that cannot be taken apart into gate, up and down")


def _same(name: str, fused: nn.Module, data: Experts, hidden: int) -> bool:
    """Whether experts that consist of plain linears give the same result as the module `fused`."""
    apart = LinearExperts(fused, data)
    for key, parameter in fused.named_parameters(recurse=False):
        for linear, part in expert_parts(key, f"{name}.{key}", tuple(parameter.shape), data):
            set_parameter(apart, linear.removeprefix(f"{name}."), part.of(parameter.data[part.expert]).contiguous())
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(_TOKENS, hidden, generator=generator)
    count = fused.get_parameter("down_proj").shape[0]
    weights, chosen = torch.rand(_TOKENS, count, generator=generator).topk(min(2, count), dim=-1)
    # The module gets the router's choice, or tokens that are already routed.
    for given in ((states, chosen, weights), (states.repeat(count, 1),)):
        with torch.inference_mode():
            try:
                expected: Tensor = fused(*given)
            except (TypeError, RuntimeError, IndexError):  # the module takes other arguments
                continue
            return torch.allclose(apart(*given), expected, rtol=1e-4, atol=1e-5)
    return False


def fill_randomly(module: nn.Module, generator: torch.Generator) -> None:
    """Fill parameters with random numbers, so that matrices roughly preserve the norm of their input, the weights of
    norms are near one, and biases are small.
    """
    for name, parameter in list(module.named_parameters()):
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2:
            values /= parameter.shape[-1] ** 0.5
        else:
            values = 1 + 0.2 * values if name.endswith("weight") else 0.1 * values
        set_parameter(module, name, values)
