"""Create command-line options from the fields of dataclasses, so that each setting is defined once.

A command gets only the values that the user gave; defaults come from the dataclass or from the command.
"""

from __future__ import annotations  # click.ParamType takes a type argument only from 8.4 on

import functools
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Any, NoReturn

import click

from quantkit.runtime.config import EngineConfig, adapter_folders
from quantkit.settings import setting

Decorator = Callable[[Callable[..., None]], Callable[..., None]]
Settings = Mapping[str, "Field[Any]"]  # keyed by name


def settings_of(source: type, *names: str) -> Settings:
    """Return fields of a dataclass that have a command-line flag, keyed by name: those in `names`, or all of them."""
    offered = {field.name: field for field in fields(source) if "flag" in field.metadata}
    return {name: offered[name] for name in names} if names else offered


def option_group(argument: str, settings: Settings, shown: Mapping[str, str] | None = None) -> Decorator:
    """Return a decorator that adds several options to a command. The command receives a dict of the values that the
    user gave, keyed by the name of the setting.

    Args:
        argument: name of the command's argument that receives the dict.
        settings: settings in the order of the help.
        shown: defaults to print in the help, if the command's defaults differ from those of the settings.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(*args: Any, **values: Any) -> None:
            given = {name: _value(field, values.pop(_identifier(name))) for name, field in settings.items()}
            function(*args, **{argument: {name: value for name, value in given.items() if value is not None}}, **values)

        result: Callable[..., None] = command
        for name, field in reversed(list(settings.items())):  # the last decorator's option is printed first
            result = _option(name, field, (shown or {}).get(name))(result)
        return result

    return decorate


def as_arguments(settings: Settings, given: Mapping[str, Any]) -> list[str]:
    """Return the command-line words that give a command these values; the inverse of `option_group`."""
    words: list[str] = []
    for name, value in given.items():
        flag = _flags(settings[name])[0][-1]
        on, _, off = flag.partition("/")
        if _is_flag(settings[name]):
            words += filter(None, [on if value else off])
        else:
            words += [word for each in (value if isinstance(value, tuple) else (value,)) for word in (on, str(each))]
    return words


def _identifier(name: str) -> str:
    return name.replace(".", "_")  # the path of a recipe field contains dots, a keyword cannot


def _value(field: Field[Any], value: Any) -> Any:
    """Return the value that the user gave for a field, parsed; None if the user gave none."""
    if _repeatable(field):
        return (sum(value, ()) if "commas" in field.metadata else value) or None
    return field.metadata["read"](value) if "read" in field.metadata and value is not None else value


def _repeatable(field: Field[Any]) -> bool:
    return isinstance(field.default, tuple)


def _option(name: str, field: Field[Any], shown: str | None) -> Decorator:
    meta = field.metadata
    flags, metavar = _flags(field)
    shown = shown or meta.get("shown") or _shown(field.default)
    return click.option(
        *flags,
        _identifier(name),
        # None = not given, even for a flag, which click would set to False: the dataclass has the default.
        default=None,
        is_flag=_is_flag(field),
        multiple=_repeatable(field),
        type=_accepted(field),
        metavar=metavar,
        help=meta["text"] + (f"  [default: {shown}]" if shown else ""),
    )


def _flags(field: Field[Any]) -> tuple[list[str], str | None]:
    """Split `-o --output FILE` into the flags and the placeholder of the value."""
    words = field.metadata["flag"].split()
    flags = [word for word in words if word.startswith("-")]
    return flags, next((word for word in words if word not in flags), None)


def _is_flag(field: Field[Any]) -> bool:
    return isinstance(field.default, bool) or any("/" in flag for flag in _flags(field)[0])


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return "" if default is None or isinstance(default, bool) else str(default)


def _accepted(field: Field[Any]) -> Any:
    meta = field.metadata
    if _is_flag(field):
        return None
    default: Any = field.default
    one = default[0] if _repeatable(field) and default else default
    bounds = {name: meta[name] for name in ("minimum", "maximum", "above", "below") if name in meta}
    kind = meta.get("kind") or type(next((value for value in (one, *bounds.values()) if value not in (None, ())), ""))
    accepted: click.ParamType[Any] = click.STRING
    if "choices" in meta:
        accepted = click.Choice(meta["choices"])
    elif kind in (int, float):
        accepted = _number(kind, bounds)
    elif kind is not str:
        accepted = click.Path(path_type=kind)
    return _Listed(accepted) if "commas" in meta else accepted


def _number(kind: type, bounds: Mapping[str, float]) -> click.ParamType[Any]:
    if not bounds:
        return click.INT if kind is int else click.FLOAT
    low, high = (bounds.get("minimum", bounds.get("above")), bounds.get("maximum", bounds.get("below")))
    limits: dict[str, Any] = {"min": low, "max": high, "min_open": "above" in bounds, "max_open": "below" in bounds}
    return click.IntRange(**limits) if kind is int else _FiniteRange(**limits)


class _FiniteRange(click.FloatRange):
    """A range of finite numbers; click's own ranges accept `nan`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        result = super().convert(value, param, ctx)
        if not math.isfinite(result):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return result


class _Listed(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """Type of an option with several values separated by commas, such as `1,8`."""

    name = "list"

    def __init__(self, one: click.ParamType[Any]) -> None:
        self.one = one

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return tuple(self.one.convert(part.strip(), param, ctx) for part in value.split(",") if part.strip())


engine_options = option_group("engine", settings_of(EngineConfig))
"""The engine's options, which become keywords of `LLM`."""


def runtime_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the engine's options to a command whose requests all use the same adapter."""

    @functools.wraps(function)
    def command(*args: Any, engine: dict[str, Any], **values: Any) -> None:
        function(*args, engine=with_one_adapter(engine), **values)

    return engine_options(command)


def with_one_adapter(engine: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of `LLM` that make all requests use the given adapter.

    Raises:
        UsageError: several adapters are given.
    """
    names = list(adapter_folders(engine.get("adapters", ())))
    if len(names) > 1:
        raise click.UsageError(
            f"--adapter is given {len(names)} times, but this command uses one adapter; give --adapter once (only "
            "`quantkit serve` takes several)"
        )
    return {**engine, "adapter": names[0]} if names else engine


def engine_choice(function: Callable[..., None]) -> Callable[..., None]:
    """Add `--engine` and `--engine-option` to a command. The command receives `vllm`: settings of vLLM, or None if
    quantkit's engine runs the model.
    """

    @click.option(
        "--engine",
        "engine_name",
        type=click.Choice(["quantkit", "vllm"]),
        default="quantkit",
        show_default=True,
        help="Engine that runs the model.",
    )
    @click.option(
        "--engine-option",
        "engine_options",
        multiple=True,
        metavar="NAME=VALUE",
        help="A setting of vLLM, e.g. tensor_parallel_size=2; repeatable.",
    )
    @functools.wraps(function)
    def command(*args: Any, engine_name: str, engine_options: tuple[str, ...], **values: Any) -> None:
        if engine_options and engine_name == "quantkit":
            raise click.UsageError("--engine-option works only with --engine vllm")
        vllm = None if engine_name == "quantkit" else dict(map(_engine_option, engine_options))
        function(*args, vllm=vllm, **values)

    return command


def launch_ranks(nproc: int) -> NoReturn:
    """Run this command in several processes on this machine, and exit with their exit code."""
    from quantkit.distributed import launch
    from quantkit.machine.system import QUANTKIT, python

    click.get_current_context().exit(launch(nproc, [*python(QUANTKIT), *sys.argv[1:]]))


def ranks_option(function: Callable[..., None], refusal: str = "") -> Callable[..., None]:
    """Add `--nproc`, which runs the command in several processes. Processes started by torchrun share the work too.

    Args:
        function: the command.
        refusal: why the command does not support several processes; empty = it supports them.
    """

    @click.option(
        "--nproc", type=click.IntRange(1), metavar="N", help="Share the work among N processes.  [default: 1]"
    )
    @functools.wraps(function)
    def command(*args: Any, nproc: int | None, **values: Any) -> None:
        from quantkit.cli._output import explain
        from quantkit.distributed import is_launched, is_writer, joined
        from quantkit.errors import GateFailure

        verdict: Exception | None = None
        with joined(explain):
            several = is_launched() or (nproc or 1) > 1
            if several and (refusal or values.get("vllm") is not None):
                raise click.UsageError(
                    refusal
                    or (
                        "--engine vllm starts its own processes: use --engine-option "
                        "tensor_parallel_size=N instead of --nproc"
                    )
                )
            if several and not is_launched():
                launch_ranks(nproc or 1)
            try:
                function(*args, **values)
            except (GateFailure, click.exceptions.Exit) as error:
                # Raised later: raised in this block, a verdict would end other processes, which may still be writing.
                verdict = error if is_writer() else None
        if verdict is not None:
            raise verdict

    return command


def _engine_option(text: str) -> tuple[str, Any]:
    """Parse `NAME=VALUE`, where the value is YAML (JSON is a part of YAML)."""
    from quantkit.errors import RequestError
    from quantkit.safety.untrusted import parse_yaml

    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise click.UsageError(f"--engine-option {text!r} is not NAME=VALUE; write e.g. tensor_parallel_size=2")
    return name.strip().replace("-", "_"), parse_yaml(value, f"--engine-option {name}", RequestError)


RUN: Settings = {
    "device": settings_of(EngineConfig)["device"],
    "resume": setting(
        True, "Continue where an interrupted run stopped, or start over.", flag="--resume/--no-resume", shown="resume"
    ),
    "overwrite": setting(False, "Replace an existing output.", flag="--overwrite"),
}
"""Options that several commands share: device, resume and overwrite."""

set_option = click.option(
    "--set", "changes", metavar="FIELD=VALUE", multiple=True, help="Change a recipe field; repeatable."
)
push_option = click.option("--push-to-hub", metavar="USER/NAME", help="Upload the output with a model card.")


def push_output(output: str, repo: str | None, source: str | None) -> None:
    """Upload an output, made from the model `source` (None = the demo model), if `--push-to-hub` is given."""
    if repo:
        from quantkit.upload import push

        push(output, repo, source=source)
