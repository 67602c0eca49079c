"""Run calibration data through a layer once for each set of linears, without repeating work.

Each run computes the inputs of one set, with the codes of the sets before it. Modules whose weights are final give the
same outputs in every later run, so their outputs are stored for each batch and replayed. If a module returns the output
of the linear that is quantized next, the input of this linear is stored instead, because the rest of the module is no
longer needed. So each linear sees each batch once, and the last run computes only the end of the layer. Modules whose
outputs cannot be stored run again, with equal results. Module names are relative to the layer; "" is the layer itself.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from quantkit.checkpoints.reader import value_chunks
from quantkit.compress.calibration.expert_inputs import OnCall, hook_modules, hook_output, probe, removed_after
from quantkit.compress.calibration.hidden_state_store import ActivationStore
from quantkit.huggingface.layer_call import Batch, LayerCall, hidden_states, states_of
from quantkit.huggingface.layer_inputs import Compute, compute_with
from quantkit.models.linear_sets import find_expert

# An output is not stored if it is more than this many times as large as the layer's output, e.g. attention weights.
_MOST_WIDTHS = 16


class End(NamedTuple):
    """How a module returns the output of its last linear: unchanged, or as the first entry of a tuple that has no other
    tensors.

    Args:
        linear: name of the linear.
        others: the other entries of the tuple; None = the module returns no tuple.
    """

    linear: str
    others: tuple[Any, ...] | None

    def output(self, value: Tensor) -> Any:
        """Return the module's output, given the output of its last linear."""
        return value if self.others is None else (value, *self.others)


@dataclass(frozen=True, slots=True)
class Structure:
    """Modules of a layer whose stored outputs can be replayed. If there are none, the whole layer runs each time.

    Args:
        modules: the linears to quantize inside each such module, keyed by the module's name.
        ends: for modules that return the output of their last linear, the form in which they return it, keyed by the
            module's name.
    """

    modules: dict[str, frozenset[str]] = field(default_factory=dict)
    ends: dict[str, End] = field(default_factory=dict)

    def without(self, linears: Collection[str]) -> list[str]:
        """Return the outermost modules that contain none of the given linears."""
        names = [name for name, inside in self.modules.items() if inside.isdisjoint(linears)]
        return [name for name in names if not _is_in_any(name, names)]


NOTHING = Structure()

Value = Callable[[torch.device], Any]
"""Function that returns a stored value on a device, in new tensors, because layers may modify what modules return."""


class _File:
    """An unnamed file that holds stored tensors of one module. *Mutable*: it grows. Its disk space is freed when
    nothing refers to the file any more, or when the process ends.

    Args:
        folder: folder on the disk to use; created if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it stays open

    def add(self, value: Any) -> Value:
        """Write the tensors of a nested structure, and return a function that reads them."""
        tensors = tree_map_only(Tensor, self._write, value)
        return lambda device: tree_map_only(_Extent, lambda extent: self._read(extent).to(device), tensors)

    def _write(self, tensor: Tensor) -> "_Extent":
        start = self._file.seek(0, os.SEEK_END)
        for chunk in value_chunks(tensor):
            self._file.write(chunk)
        return _Extent(start, tensor.dtype, tensor.shape)

    def _read(self, extent: "_Extent") -> Tensor:
        value = torch.empty(extent.shape, dtype=extent.dtype)
        self._file.seek(extent.start)
        self._file.readinto(value.view(-1).view(torch.uint8).numpy().data)
        return value


@dataclass(frozen=True, slots=True)
class _Extent:
    """Position of a tensor in a file."""

    start: int
    dtype: torch.dtype
    shape: torch.Size


Kept = dict[str, tuple[Value, str | None]]
"""Stored tensors of one batch: for each module, its output (with None), or the input of its last linear, with the name
of this linear.
"""


class Stream:
    """A layer of one model, which can run on its inputs batch by batch. *Mutable*: for each batch, it stores results
    that are the same in every run.

    Args:
        block: the layer.
        store: inputs of the layer; None = no calibration data.
        arguments: given a batch, returns the arguments, other than hidden states, with which the model calls the layer.
        next_call: given the layer's call and its computation, returns the call of the next layer; needed only if layers
            exchange more than hidden states.
    Attributes:
        device: device of the weights, except those that `drop_complete` has freed.
        structure: modules that can be replayed; None = not known yet, so nothing is stored.
    """

    def __init__(
        self,
        block: nn.Module,
        store: ActivationStore | None = None,
        arguments: Callable[[Batch], dict[str, Any]] = lambda _: {},
        next_call: Callable[[LayerCall, Compute], LayerCall] | None = None,
    ) -> None:
        self.block, self.store, self.arguments, self._next_call = block, store, arguments, next_call
        self.device = next(block.parameters()).device
        self.structure: Structure | None = None
        self._kept: dict[int, Kept] = {}
        self._files: WeakValueDictionary[str, _File] = WeakValueDictionary()

    @torch.inference_mode()
    def forward(self, batch: Batch, **extra: Any) -> Tensor:
        """Return the layer's output for hidden states (B, T, D) or a `LayerCall`; `extra` are additional arguments."""
        batch = batch.to(self.device)
        return hidden_states(self.block(states_of(batch), **{**self.arguments(batch), **extra}))

    @torch.inference_mode()
    def advance(self, number: int, batch: Batch) -> Batch:
        """Run the layer on batch `number` of its inputs, and return the corresponding input of the next layer."""
        with self.replaying(number):
            if isinstance(batch, Tensor):
                return self.forward(batch)
            assert self._next_call is not None, "no next_call, but layers exchange more than hidden states"
            return self._next_call(batch, compute_with(self.block))

    def run(
        self,
        number: int,
        run: Callable[[], object],
        linears: tuple[str, ...],
        on_call: OnCall,
        changing: Collection[str],
        needed: Collection[str],
        *,
        all_tokens: bool = False,
    ) -> None:
        """Run a batch with `probe`, replaying the results stored for this batch, and store further results.

        Args:
            number: number of the batch.
            run: runs the layer on the batch.
            linears: linears whose inputs are observed.
            on_call: receives these inputs; see `probe`.
            changing: linears without final weights; results that depend on them are not stored.
            needed: linears that must run again later. A module that contains none of them, and none of `changing`, runs
                to its end, so that its output can be stored.
            all_tokens: see `probe`.
        """
        kept, structure = self._kept.setdefault(number, {}), self.structure or NOTHING
        ends = _next_ends(structure, linears, changing)
        # Modules inside a module M of `ends` are not needed after this run, which stores the input of M's last linear.
        known = {*(name for name, (_, linear) in kept.items() if linear is None), *linears}
        to_keep = [
            name
            for name in structure.without({*changing, *needed})
            if name not in known and not _is_in_any(name, ends.values())
        ]
        final = True  # whether no changing linear has run yet in this run

        def keep_output(name: str, output: Any) -> None:
            if final:
                kept[name] = self._keep(name, output), None

        def keep_input(name: str, args: tuple[Any, ...], _: dict[str, Any]) -> None:
            if final:
                kept[ends[name]] = self._keep(ends[name], args[0]), name

        def change(*_: object) -> None:
            nonlocal final
            final = False

        hooks = [hook_output(self.block, name, keep_output) for name in to_keep]
        hooks += hook_modules(self.block, list(ends), keep_input)
        hooks += hook_modules(self.block, list(changing), change)
        finish = [name for name in to_keep if any(_is_inside(linear, name) for linear in linears)]
        with removed_after(hooks), self.replaying(number, linears):
            probe(self.block, linears, on_call, run, all_tokens=all_tokens, finish=finish)
        # Results of modules inside a module whose result is stored are no longer needed.
        for module in [name for name in kept if _is_in_any(name, kept)]:
            del kept[module]

    @contextmanager
    def replaying(self, number: int, linears: Collection[str] = ()) -> Iterator[None]:
        """While open, the layer replays the stored results of batch `number`, except results whose replay would skip
        one of `linears`.
        """
        kept, ends = self._kept.get(number), (self.structure or NOTHING).ends
        with ExitStack() as stack:
            for name, (value, end) in kept.items() if kept else ():
                if not any((_is_inside(linear, name) or linear == name) and linear != end for linear in linears):
                    given = value if end is None else partial(self._end, ends[name], value)
                    stack.enter_context(self._replaced(name, given))
            yield

    def forget(self) -> None:
        """Discard all stored results, because the layer's computation has changed."""
        self._kept.clear()

    def drop_complete(self) -> None:
        """Free the weights of modules whose outputs are stored for all batches of this process."""
        whole = (name for kept in self._kept.values() for name, (_, linear) in kept.items() if linear is None)
        counts = Counter(whole)
        for name, count in counts.items():
            if self.store is not None and count == len(self.store.own):
                self.block.get_submodule(name).to("meta")

    def _keep(self, module: str, value: Any) -> Value:
        """Store a nested structure of tensors: on disk if the store has a folder, because the stored tensors of all
        batches need much more memory than the layer.
        """
        if self.store is None or self.store.beside is None:
            return partial(_copied, _copied(value, "cpu"))
        file = self._files.get(module) or _File(self.store.beside)
        self._files[module] = file
        return file.add(value)

    def _end(self, end: End, value: Value, device: torch.device) -> Any:
        return end.output(self.block.get_submodule(end.linear)(value(device)))

    @contextmanager
    def _replaced(self, name: str, output: Callable[[torch.device], Any]) -> Iterator[None]:
        """While open, a module returns `output(device)` instead of computing its own output."""
        attributes = vars(self.block.get_submodule(name))
        attributes["forward"] = lambda *_, **__: output(self.device)  # overrides the class's method
        try:
            yield
        finally:
            del attributes["forward"]


def _next_ends(structure: Structure, linears: Collection[str], changing: Collection[str]) -> dict[str, str]:
    """Return, for each of `linears`, the module that returns its output and contains no other linear of `changing`.

    Linears without such a module are left out.
    """
    return {
        end.linear: module
        for module, end in structure.ends.items()
        if end.linear in linears and structure.modules[module].intersection(changing) == {end.linear}
    }


def learn_structure(block: nn.Module, linears: Collection[str], run: Callable[[], Tensor]) -> Structure:
    """Find the modules of a layer that can be replayed, by observing one run.

    Args:
        block: the layer.
        linears: linears to quantize.
        run: runs the layer, preferably on little data, and returns its output.
    """
    inside = _linears_by_module(linears)
    calls: dict[str, list[tuple[Any, Any]]] = {name: [] for name in inside}

    def returned(name: str, output: Any) -> None:
        # With a copy, because a module may modify its last linear's output in place.
        calls[name].append((output, _copied(output, "cpu")))

    with removed_after([hook_output(block, name, returned) for name in inside]):
        limit = _MOST_WIDTHS * run().numel()
    usable = {
        name: frozenset(inside[name]) for name in inside if _is_usable(block.get_submodule(name), calls[name], limit)
    }
    ends = {
        module: end
        for module, own in usable.items()
        for linear in own
        if linear != module and (end := _find_end(linear, calls[module], calls.get(linear, [])))
    }
    return Structure(usable, ends)


def _linears_by_module(linears: Collection[str]) -> dict[str, list[str]]:
    """Return, for each module, the linears in it; a linear is also a module that contains itself. Modules inside an
    expert are left out.
    """
    inside: dict[str, list[str]] = {}
    for linear in linears:
        parts = linear.split(".")
        for name in (".".join(parts[:count]) for count in range(len(parts) + 1)):
            if find_expert(name) is None:
                inside.setdefault(name, []).append(linear)
    return inside


def _is_usable(module: nn.Module, calls: list[tuple[Any, Any]], limit: int) -> bool:
    """Whether a module's output can be stored: the module ran at most once (an expert may get no token), and it
    returned only tensors of moderate total size and plain values.
    """
    if len(calls) != 1:
        return not calls and not isinstance(module, nn.ModuleList)
    leaves = tree_leaves(calls[0][0])
    plain = all(leaf is None or isinstance(leaf, (Tensor, bool, int, float)) for leaf in leaves)
    return plain and sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)) <= limit


def _find_end(linear: str, module_calls: list[tuple[Any, Any]], linear_calls: list[tuple[Any, Any]]) -> End | None:
    """Return the `End` of a module for this linear; None if the module does not return the linear's output."""
    if len(module_calls) != 1 or len(linear_calls) != 1:
        return None
    (output, copy), (returned, before) = module_calls[0], linear_calls[0]
    wrapped = type(output) is tuple
    (first, *others), unchanged = (output, copy[0]) if wrapped else ((output,), copy)
    if first is not returned or not torch.equal(unchanged, before):
        return None
    if any(isinstance(leaf, Tensor) for leaf in tree_leaves(others)):
        return None
    return End(linear, tuple(others) if wrapped else None)


def _copied(value: Any, device: torch.device | str) -> Any:
    """Copy a nested structure and its tensors, because layers may modify the tensors that modules return."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), value)


def _is_inside(name: str, module: str) -> bool:
    return name != module and (not module or name.startswith(f"{module}."))


def _is_in_any(name: str, modules: Collection[str]) -> bool:
    return any(_is_inside(name, module) for module in modules)
