"""Looking at the inputs of a layer's modules, and at those of experts whichever tokens are routed to them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quantkit.models.linear_sets import find_expert

# An expert that saw fewer tokens than this is under_calibrated: its own statistics would be mostly noise.
UNDER_CALIBRATED_TOKENS = 64


class _Enough(Exception):
    """Raised inside a forward pass once there is nothing more to see."""


OnCall = Callable[[str, tuple[Any, ...], dict[str, Any]], None]
"""Told of a module's call: its relative name, arguments, keyword arguments."""


def probe(
    block: nn.Module, modules: Sequence[str], on_call: OnCall, run: Callable[[], object], *, all_tokens: bool = False
) -> None:
    """Call `on_call(name, args, kwargs)` as each module (relative names) is reached, and stop after the last.

    Args:
        block: the layer; what it computes stays the same.
        modules: each is reached once, unless it belongs to an expert.
        on_call: see above.
        run: runs the block.
        all_tokens: experts are shown every token, not those that are routed to them.
    """
    waiting = set(modules)

    def seen(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        on_call(name, args, kwargs)
        waiting.discard(name)
        if not waiting:
            raise _Enough

    inside = [name for name in modules if all_tokens and find_expert(name)]
    handles = hook_modules(block, [name for name in modules if name not in inside], seen)
    if inside:
        handles.append(show_all_tokens(block, inside, seen))
    with removed_after(handles), suppress(_Enough):
        run()


@contextmanager
def removed_after(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """While open, these hooks are in place."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def hook_modules(block: nn.Module, modules: Sequence[str], on_call: OnCall) -> list[RemovableHandle]:
    """Have `on_call(name, args, kwargs)` called before each of these modules; the caller removes the hooks."""
    hooks = {name: lambda module, args, kwargs, name=name: on_call(name, args, kwargs) for name in modules}
    return [block.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True) for name, hook in hooks.items()]


def token_rows(args: tuple[Any, ...]) -> Tensor:
    """(T, K) inputs of a call, the first of its arguments."""
    inputs: Tensor = args[0]
    return inputs.reshape(-1, inputs.shape[-1])


def show_all_tokens(block: nn.Module, modules: Sequence[str], on_call: OnCall) -> RemovableHandle:
    """Have experts look at every token, just before tokens are routed to some of them.

    Args:
        block: the layer; what it computes stays the same.
        modules: linears of experts.
        on_call: called with (name, args, kwargs) before each of them, for all tokens at once.
    """
    first = find_expert(modules[0])
    assert first is not None
    experts = dict.fromkeys(f"{first.container}.{other.number}" for name in modules if (other := find_expert(name)))

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        tokens = token_rows(args)
        for expert in experts:
            inside = [name for name in modules if name.startswith(f"{expert}.")]
            # Hooked for this call alone: when the router calls the expert afterwards, its tokens are not seen twice.
            with removed_after(hook_modules(block, inside, on_call)):
                block.get_submodule(expert)(tokens)

    return block.get_submodule(first.owner).register_forward_pre_hook(before)


def describe_under_calibrated(counts: Mapping[int, int], all_tokens: bool) -> list[str]:
    """A note when some experts are under-calibrated.

    Args:
        counts: tokens routed to each expert.
        all_tokens: whether statistics are of all tokens all the same.
    """
    few = [number for number, count in counts.items() if count < UNDER_CALIBRATED_TOKENS]
    if not few:
        return []
    listed = ", ".join(map(str, few[:8])) + (", ..." if len(few) > 8 else "")
    treated = "their statistics are of all tokens" if all_tokens else "they are rounded to nearest"
    return [
        f"{len(few)} of {len(counts)} experts saw fewer than {UNDER_CALIBRATED_TOKENS} tokens ({listed}); {treated}"
    ]
