"""Arguments of one decoder layer for one sequence, for models whose layers exchange more than hidden states.

Some models pass more from layer to layer: indices of the tokens to attend to, states of a router, keys and values that
later layers reuse, or token embeddings. A `LayerCall` keeps the tensors that the shape of the hidden states does not
determine. They are keyed by their path: the name of the layer's argument, then keys and indices inside the argument.
Shapes: T tokens.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

_NUMBER = "#"  # in a path, marks a number that is a key of a dict; other numbers are positions in a tuple or list
# Names of the cache argument of layers and models; transformers 5.24 introduces `cache` and warns about older names.
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """Return the name of the cache argument of a transformers layer or model; None if there is no such argument."""
    known = inspect.signature(forward).parameters
    return next((name for name in _CACHES if name in known), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCall:
    """Call of one layer for one sequence, in a model whose layers exchange more than hidden states.

    Args:
        token_ids: (1, T) int64.
        hidden: hidden states before the layer, (1, T, ...) or with a leading dimension of residual streams.
        beside: other tensors that the layer receives, keyed by path, e.g. `prev_topk_indices` or
            `shared_kv_states/full_attention/0`.
        inputs: arguments of the language model that the token ids do not determine: a nested structure of tensors and
            plain data, on the CPU. None = the token ids determine all arguments. See `image_inputs`.
        absent: paths of arguments that are tensors in other calls of the same shape, but not in this one.
    """

    token_ids: Tensor
    hidden: Tensor
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    inputs: Mapping[str, Any] | None = None
    absent: tuple[str, ...] = ()

    @property
    def shape(self) -> torch.Size:
        """(1, T): sequences and tokens."""
        return self.token_ids.shape

    def __getitem__(self, rows: slice) -> "LayerCall":
        """Return the call itself: it is one sequence and serves as a batch of one."""
        return self

    def to(self, device: torch.device | str, *, copy: bool = False) -> "LayerCall":
        """Move the hidden states and the tensors in `beside` to a device; token ids and `inputs` are not moved."""
        beside = {path: value.to(device, copy=copy) for path, value in self.beside.items()}
        return replace(self, hidden=self.hidden.to(device, copy=copy), beside=beside)

    def tensors(self) -> dict[str, Tensor]:
        """Return everything in the call as tensors, keyed by name, for saving; see `of_tensors`."""
        beside = {f"beside/{path}": value.contiguous() for path, value in self.beside.items()}
        saved = {"token_ids": self.token_ids, "hidden": self.hidden.contiguous(), **beside}
        if self.inputs is None:
            return saved
        plain = {"inputs": self.inputs, "absent": self.absent}
        form = json.dumps(plain, default=lambda _: None).encode()  # everything except the tensors
        inputs = {f"inputs/{path}": value.contiguous() for path, value in _leaves(self.inputs)}
        return {**saved, "form": torch.frombuffer(bytearray(form), dtype=torch.uint8), **inputs}

    @classmethod
    def of_tensors(cls, saved: Mapping[str, Tensor]) -> "LayerCall":
        """Create the call from its saved `tensors`."""
        beside, inputs = (
            {name.removeprefix(kind): value for name, value in saved.items() if name.startswith(kind)}
            for kind in ("beside/", "inputs/")
        )
        form = json.loads(saved["form"].numpy().tobytes()) if "form" in saved else {}
        return cls(
            token_ids=saved["token_ids"],
            hidden=saved["hidden"],
            beside=beside,
            inputs=merged(form["inputs"], inputs) if form else None,
            absent=tuple(form.get("absent", ())),
        )


Batch = Tensor | LayerCall
"""Input of a layer: hidden states (B, T, D) of sequences of equal length, or the full call for one sequence."""


def states_of(batch: Batch) -> Tensor:
    """Return the hidden states of a layer's input."""
    return batch if isinstance(batch, Tensor) else batch.hidden


def hidden_states(output: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the hidden states of a module's output: transformers wraps some outputs into tuples."""
    return output if isinstance(output, Tensor) else output[0]


def tensors_beside(
    arguments: Any, known: Any, same: Callable[[Tensor, Tensor], bool] = torch.equal
) -> dict[str, Tensor]:
    """Return the tensors in `arguments` that are missing from `known` or differ there, keyed by path.

    Args:
        arguments: arguments of a layer, a nested structure of dicts, tuples and lists.
        known: arguments of the same structure to compare with.
        same: predicate that decides whether two tensors are equal.
    """
    others = dict(_leaves(known))
    leaves = _leaves(arguments)
    return {path: value for path, value in leaves if path not in others or not same(others[path], value)}


def tensors_missing(arguments: Any, known: Any) -> list[str]:
    """Return the paths at which `known` has a tensor but `arguments` has none."""
    present = dict(_leaves(arguments))
    return [path for path, _ in _leaves(known) if path not in present]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    for part, item in _items(value):
        yield from _leaves(item, f"{path}/{part}" if path else part)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{_NUMBER}{key}" if isinstance(key, int) else str(key), item) for key, item in value.items())
    elif isinstance(value, (tuple, list)):
        yield from ((str(position), item) for position, item in enumerate(value))


def merged(arguments: Any, beside: Mapping[str, Tensor]) -> Any:
    """Copy a layer's arguments and insert tensors; the containers are new, so the layer may modify them.

    Args:
        arguments: a nested structure of dicts, tuples and lists, not modified.
        beside: tensors to insert, keyed by path.
    """
    if "" in beside:
        return beside[""]
    inner: dict[str, dict[str, Tensor]] = {}
    for path, value in beside.items():
        part, _, rest = path.partition("/")
        inner.setdefault(part, {})[rest] = value
    present = dict(_items(arguments))
    parts = {part: merged(present.get(part), inner.get(part, {})) for part in dict.fromkeys((*present, *inner))}
    if isinstance(arguments, Mapping):
        return _mapping(arguments, parts)
    if isinstance(arguments, (tuple, list)) or parts:  # a new container with positions is a tuple
        items = [parts[part] for part in sorted(parts, key=int)]
        return items if isinstance(arguments, list) else tuple(items)
    return arguments


def _mapping(like: Mapping[Any, Any], parts: Mapping[str, Any]) -> Any:
    items = {int(part[1:]) if part.startswith(_NUMBER) else part: value for part, value in parts.items()}
    return items if type(like) is dict else type(like)(items)  # type: ignore[call-arg]


def hand_back(arguments: Any, used: Any, device: torch.device | str) -> None:
    """Copy the dict entries of a layer's merged arguments back to the model's own arguments.

    The layer may have added entries to these dicts, which later layers read.

    Args:
        arguments: the model's arguments, keyed by name; modified.
        used: the arguments that `merged` returned, after the layer ran.
        device: device of the copied tensors.
    """
    for name, value in arguments.items():
        if isinstance(value, MutableMapping):
            value.update(moved(used[name], device))


def moved(value: Any, device: torch.device | str, *, copy: bool = False) -> Any:
    """Move the tensors of a nested structure to another device, in new containers."""
    return merged(value, {path: tensor.to(device, copy=copy) for path, tensor in _leaves(value)})
