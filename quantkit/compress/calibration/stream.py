"""Calibration data on its way through a layer that is run again for each set of linears, without repeating work.

The inputs of a set come from a run of the layer from its start, with the codes of the sets before it. What modules with
final weights gave in one run they give in the next: their outputs are kept, batch by batch, in place of being computed
again. Of a module that ends in the linear whose codes are chosen next the input of that linear is kept instead, since
nothing before it in the module is needed any more. So each linear sees each batch once, and what is left for the last
run is the end of the layer. Modules that cannot be replaced so are run again, which gives the same numbers.
Names of modules are relative to the layer; "" is the layer itself.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from quantkit.compress.calibration.expert_inputs import OnCall, hook_modules, hook_output, probe, removed_after
from quantkit.compress.calibration.hidden_state_store import ActivationStore
from quantkit.huggingface.layer_call import Batch, LayerCall, hidden_states, states_of
from quantkit.huggingface.layer_inputs import Compute, compute_with
from quantkit.models.linear_sets import find_expert

# Outputs of this many times the numbers of the layer's own are not kept: attention weights, for instance.
_MOST_WIDTHS = 16


class End(NamedTuple):
    """Form in which a module returns its last linear's output: as it is, or first in a tuple without other tensors."""

    linear: str
    others: tuple[Any, ...] | None

    def output(self, value: Tensor) -> Any:
        """Return the module's output for this output of the linear."""
        return value if self.others is None else (value, *self.others)


@dataclass(frozen=True, slots=True)
class Structure:
    """Modules of a layer that their kept outputs can replace; with none the layer always runs whole.

    Args:
        modules: linears to quantize in each.
        ends: of those modules that end in a linear.
    """

    modules: dict[str, frozenset[str]] = field(default_factory=dict)
    ends: dict[str, End] = field(default_factory=dict)

    def without(self, linears: Collection[str]) -> list[str]:
        """The outermost modules that have none of these linears."""
        names = [name for name, inside in self.modules.items() if inside.isdisjoint(linears)]
        return [name for name in names if not _is_in_any(name, names)]


NOTHING = Structure()

Value = Callable[[torch.device], Any]
"""Gives what is kept, from memory or from a file: tensors of its own, since layers may add to what modules return."""


class _Kept:
    """Kept tensors of one batch by module: its output, or the input of the linear that it ends in. *Mutable*.

    They are kept on disk where there is a folder for it: those of all batches take much more than the layer does.

    Args:
        store: of the hidden states.
        number: of the batch.
    Attributes:
        values: of each module, and the linear whose input is kept; None = the output is.
    """

    def __init__(self, store: ActivationStore | None, number: int) -> None:
        self._store, self._number = store, number
        self.values: dict[str, tuple[Value, str | None]] = {}

    def keep(self, module: str, value: Any, linear: str | None = None) -> None:
        """Keep the output of a module, or the input of the linear that it ends in."""
        if self._store is None or self._store.beside is None:
            self.values[module] = partial(_copied, _copied(value, "cpu")), linear
            return
        path = self._path(self._store.beside, module)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Of a view, the whole of what it is a view of would be written.
        own = tree_map_only(Tensor, lambda x: x.to("cpu", copy=x.untyped_storage().nbytes() > x.nbytes), value)
        torch.save(own, path)
        self.values[module] = partial(_loaded, path), linear

    def prune(self) -> None:
        """Drop what is inside of what is kept."""
        for module in [name for name in self.values if _is_in_any(name, self.values)]:
            del self.values[module]
            if self._store is not None and self._store.beside is not None:
                self._path(self._store.beside, module).unlink()

    def _path(self, folder: Path, module: str) -> Path:
        return folder / str(self._number) / f"kept-{module}"


class Stream:
    """A layer of one model, and its runs. *Mutable*: keeps what does not change from run to run, batch by batch.

    Args:
        block: the layer.
        store: what enters it; None where there is no calibration data.
        arguments: what the model calls the layer with, besides the hidden states.
        next_call: what the model calls the next layer with after this one, where that is more than hidden states.
    Attributes:
        device: of its weights, those included that nothing needs any more.
        structure: of the layer; nothing is kept without one.
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
        self._kept: dict[int, _Kept] = {}

    @torch.inference_mode()
    def forward(self, batch: Batch, **extra: Any) -> Tensor:
        """Output of the layer, for hidden states (B, T, D) or a call; `extra` are further arguments of it."""
        batch = batch.to(self.device)
        return hidden_states(self.block(states_of(batch), **{**self.arguments(batch), **extra}))

    @torch.inference_mode()
    def advance(self, number: int, batch: Batch) -> Batch:
        """Inputs of the next layer, given a batch that enters this one and its number."""
        with self.replaying(number):
            if isinstance(batch, Tensor):
                return self.forward(batch)
            assert self._next_call is not None, "nobody has said how this model's layers hand on"
            return self._next_call(batch, compute_with(self.block))

    def learn(self, linears: Collection[str], run: Callable[[], Tensor]) -> None:
        """Keep from here on what runs have in common; see `learn_structure`."""
        self.structure = learn_structure(self.block, linears, run)

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
        """`probe` a batch, with what is kept of it, and keep more.

        Args:
            number: of the batch.
            run: runs the layer on it.
            linears: whose inputs are looked at.
            on_call: told of them.
            changing: linears that have no final weights yet: nothing that comes after them is kept.
            needed: linears whose inputs are looked at in this run or later; modules without any are run to their end.
            all_tokens: see `probe`.
        """
        kept, structure = self._kept.setdefault(number, _Kept(self.store, number)), self.structure or NOTHING
        ends = _next_ends(structure, linears, changing)
        # What is in a module of which the end's input will be kept is not needed after this run.
        known = {*(name for name, (_, linear) in kept.values.items() if linear is None), *linears}
        to_keep = [
            name
            for name in structure.without({*changing, *needed})
            if name not in known and not _is_in_any(name, ends.values())
        ]
        final = True  # so far in this run

        def keep_output(name: str, output: Any) -> None:
            if final:
                kept.keep(name, output)

        def keep_input(name: str, args: tuple[Any, ...], _: dict[str, Any]) -> None:
            if final:
                kept.keep(ends[name], args[0], name)

        def change(*_: object) -> None:
            nonlocal final
            final = False

        hooks = [hook_output(self.block, name, keep_output) for name in to_keep]
        hooks += hook_modules(self.block, list(ends), keep_input)
        hooks += hook_modules(self.block, list(changing), change)
        finish = [name for name in to_keep if any(_is_inside(linear, name) for linear in linears)]
        with removed_after(hooks), self.replaying(number, linears):
            probe(self.block, linears, on_call, run, all_tokens=all_tokens, finish=finish)
        kept.prune()

    @contextmanager
    def replaying(self, number: int, linears: Collection[str] = ()) -> Iterator[None]:
        """While open, the layer gives back what is kept of a batch, but where that would hide one of these linears."""
        kept, ends = self._kept.get(number), (self.structure or NOTHING).ends
        with ExitStack() as stack:
            for name, (value, end) in kept.values.items() if kept else ():
                if not any((_is_inside(linear, name) or linear == name) and linear != end for linear in linears):
                    given = value if end is None else partial(self._end, ends[name], value)
                    stack.enter_context(self._replaced(name, given))
            yield

    def forget(self) -> None:
        """Keep nothing of what was kept: the layer computes something else now."""
        self._kept.clear()

    def batch(self, number: int) -> Batch:
        """Inputs of the layer."""
        assert self.store is not None, "nobody has said what enters the layer"
        return self.store[number]

    def drop_complete(self) -> None:
        """Drop the weights of modules whose outputs for all of this process's batches are kept: nothing needs them."""
        whole = (name for kept in self._kept.values() for name, (_, linear) in kept.values.items() if linear is None)
        counts = Counter(whole)
        for name, count in counts.items():
            if self.store is not None and count == len(self.store.own):
                self.block.get_submodule(name).to("meta")

    def _end(self, end: End, value: Value, device: torch.device) -> Any:
        return end.output(self.block.get_submodule(end.linear)(value(device)))

    @contextmanager
    def _replaced(self, name: str, output: Callable[[torch.device], Any]) -> Iterator[None]:
        """While open, a module returns this in place of what it would compute."""
        attributes = vars(self.block.get_submodule(name))
        attributes["forward"] = lambda *_, **__: output(self.device)  # in front of the class's own
        try:
            yield
        finally:
            del attributes["forward"]


def _next_ends(structure: Structure, linears: Collection[str], changing: Collection[str]) -> dict[str, str]:
    """The modules that end in one of these linears and have no other changing one, by that linear."""
    return {
        end.linear: module
        for module, end in structure.ends.items()
        if end.linear in linears and structure.modules[module].intersection(changing) == {end.linear}
    }


def learn_structure(block: nn.Module, linears: Collection[str], run: Callable[[], Tensor]) -> Structure:
    """Look at one run of a layer.

    Args:
        block: the layer.
        linears: those to quantize.
        run: runs it, best on little data, and gives its output.
    """
    inside = _linears_by_module(linears)
    calls: dict[str, list[tuple[Any, Any]]] = {name: [] for name in inside}

    def returned(name: str, output: Any) -> None:
        # With a copy, since a module may change in place what its last linear has returned.
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
    """Linears in each module around them; what is inside of an expert is left out."""
    inside: dict[str, list[str]] = {}
    for linear in linears:
        parts = linear.split(".")
        for name in (".".join(parts[:count]) for count in range(len(parts) + 1)):
            if find_expert(name) is None:
                inside.setdefault(name, []).append(linear)
    return inside


def _is_usable(module: nn.Module, calls: list[tuple[Any, Any]], limit: int) -> bool:
    """Whether it is called at most once, and returns tensors of moderate size; an expert may have seen no token."""
    if len(calls) != 1:
        return not calls and not isinstance(module, nn.ModuleList)
    leaves = tree_leaves(calls[0][0])
    plain = all(leaf is None or isinstance(leaf, (Tensor, bool, int, float)) for leaf in leaves)
    return plain and sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)) <= limit


def _find_end(linear: str, module_calls: list[tuple[Any, Any]], linear_calls: list[tuple[Any, Any]]) -> End | None:
    """Find how a module returns the output of this linear, if it does."""
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
    """A nest with its tensors copied: layers may add to what modules return."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), value)


def _loaded(path: Path, device: torch.device) -> Any:
    """A nest that was saved, on a device."""
    return tree_map_only(Tensor, lambda x: x.to(device), torch.load(path, map_location="cpu", weights_only=True))


def _is_inside(name: str, module: str) -> bool:
    return name != module and (not module or name.startswith(f"{module}."))


def _is_in_any(name: str, modules: Collection[str]) -> bool:
    return any(_is_inside(name, module) for module in modules)
