"""Observe the inputs of a layer's modules; experts can be shown all tokens, not only those routed to them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quantkit.models.linear_sets import ExpertLocation, find_expert

# An expert that saw fewer tokens than this is under-calibrated: statistics of so few tokens are mostly noise.
UNDER_CALIBRATED_TOKENS = 64


class _Enough(Exception):
    """Signal that ends a forward pass after the last module to observe."""


OnCall = Callable[[str, tuple[Any, ...], dict[str, Any]], None]
"""Function that is called with a module's relative name, arguments and keyword arguments."""


def probe(
    block: nn.Module,
    modules: Sequence[str],
    on_call: OnCall,
    run: Callable[[], object],
    *,
    all_tokens: bool = False,
    finish: Iterable[str] = (),
) -> None:
    """Run a layer and call `on_call(name, args, kwargs)` before each of these modules runs; stop after the last call.

    Args:
        block: the layer; its output does not change.
        modules: relative names. A run must call each of these modules once; only modules of experts may stay uncalled.
        on_call: the function to call.
        run: runs the block.
        all_tokens: whether experts are shown every token instead of only those routed to them.
        finish: modules that must also return before the run stops.
    """
    waiting, running = set(modules), set(finish)

    def stop() -> None:
        if not waiting and not running:
            raise _Enough

    def seen(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        on_call(name, args, kwargs)
        waiting.discard(name)

    def reached(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen(name, args, kwargs)
        stop()

    def returned(name: str, _: object) -> None:
        running.discard(name)
        stop()

    inside = [name for name in modules if all_tokens and find_expert(name)]
    handles = hook_modules(block, [name for name in modules if name not in inside], reached)
    handles += [hook_output(block, name, returned) for name in running]
    if inside:
        handles.append(show_all_tokens(block, inside, seen, stop))
    with removed_after(handles), suppress(_Enough):
        run()


@contextmanager
def removed_after(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove these hooks when the context ends."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def hook_modules(block: nn.Module, modules: Sequence[str], on_call: OnCall) -> list[RemovableHandle]:
    """Add hooks that call `on_call(name, args, kwargs)` before each of these modules; the caller removes the hooks."""
    hooks = {name: lambda module, args, kwargs, name=name: on_call(name, args, kwargs) for name in modules}
    return [block.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True) for name, hook in hooks.items()]


def hook_output(block: nn.Module, module: str, on_return: Callable[[str, Any], None]) -> RemovableHandle:
    """Add a hook that calls `on_return(name, output)` after a module has run; the caller removes the hook."""
    return block.get_submodule(module).register_forward_hook(lambda _, __, output: on_return(module, output))


def token_rows(args: tuple[Any, ...]) -> Tensor:
    """Return the first argument of a call as input rows (T, K)."""
    inputs: Tensor = args[0]
    return inputs.reshape(-1, inputs.shape[-1])


def show_all_tokens(
    block: nn.Module,
    modules: Sequence[str],
    on_call: OnCall,
    then: Callable[[], None],
    choose: Callable[[Tensor], Tensor] = lambda tokens: tokens,
) -> RemovableHandle:
    """Add a hook that shows every token to experts, just before the layer routes each token to some of the experts.

    The caller removes the hook.

    Args:
        block: the layer; its output does not change.
        modules: linears of the experts.
        on_call: called with (name, args, kwargs) for each linear; args hold the inputs for all tokens at once.
        then: called after the last linear.
        choose: given all tokens (T, K), returns the tokens to show.
    """
    first = find_expert(modules[0])
    assert first is not None
    experts = dict.fromkeys(f"{first.container}.{other.number}" for name in modules if (other := find_expert(name)))

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        tokens = choose(token_rows(args))
        for expert in experts:
            inside = [name for name in modules if name.startswith(f"{expert}.")]
            # The hooks exist only during this call, so tokens are not seen again when the router calls the expert.
            probe(block, inside, on_call, partial(block.get_submodule(expert), tokens))
        then()

    return block.get_submodule(first.owner).register_forward_pre_hook(before)


def count_tokens(
    block: nn.Module, experts: Sequence[ExpertLocation], runs: Iterable[Callable[[], object]]
) -> dict[int, int]:
    """Return the number of tokens that a layer's router assigns to each expert, keyed by the expert's number.

    Args:
        block: the layer.
        experts: the experts whose tokens are counted.
        runs: functions that each run the layer on some data.
    """
    counts = dict.fromkeys(sorted(expert.number for expert in experts), 0)
    names = {f"{experts[0].container}.{number}": number for number in counts}

    def count(name: str, args: tuple[Any, ...], _: dict[str, Any]) -> None:
        counts[names[name]] += len(token_rows(args))

    # Hooks on the experts themselves, because only their inputs show how many tokens each one gets.
    with removed_after(hook_modules(block, list(names), count)):
        for run in runs:
            run()
    return counts


def describe_under_calibrated(counts: Mapping[int, int], all_tokens: bool) -> list[str]:
    """Return a list with one note if some experts are under-calibrated, otherwise an empty list.

    Args:
        counts: number of tokens routed to each expert, keyed by the expert's number.
        all_tokens: whether the statistics of experts use all tokens instead of the routed ones.
    """
    few = [number for number, count in counts.items() if count < UNDER_CALIBRATED_TOKENS]
    if not few:
        return []
    listed = ", ".join(map(str, few[:8])) + (", ..." if len(few) > 8 else "")
    treated = "their statistics use all tokens" if all_tokens else "they are rounded to nearest"
    return [
        f"{len(few)} of {len(counts)} experts saw fewer than {UNDER_CALIBRATED_TOKENS} tokens ({listed}); {treated}"
    ]
