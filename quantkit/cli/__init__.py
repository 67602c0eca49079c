"""The command line. Each file here whose name has no leading underscore defines the command of that name as `command`.

`--help` imports all these files, so they import nothing heavy, such as torch, outside their functions.
"""

import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from quantkit.cli._output import CommandGroup, end_output, open_streams, report_error
from quantkit.errors import is_panic, suggestion
from quantkit.registry import Registry

__all__ = ["main"]

REGISTRY = Registry(package=__name__, attribute="command", noun="command")


class _Commands(CommandGroup):
    """Group of all commands, one per file of this package. It turns every error into one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return REGISTRY.names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command of that name."""
        if cmd_name.replace("_", "-") not in REGISTRY.names():
            ctx.fail(f"no such command {cmd_name!r}{suggestion(cmd_name, REGISTRY.names())}")
        command: click.Command = REGISTRY.load(cmd_name)
        return command

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        """Run the command. With `standalone_mode` (the default), report an error and end the process with an exit code;
        otherwise return the result or raise the error.
        """
        words = list(sys.argv[1:] if args is None else args)
        if "--verbose" not in words:
            os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # hides its retries; quantkit reports the failure
        if not standalone_mode:
            return super().main(words, standalone_mode=False, **extra)
        open_streams()
        _keep_torch_out_of_tmp()
        stdout = sys.stdout
        failure: BaseException | None = None
        result: Any = 0
        try:
            # click's standalone mode would print errors itself and exit with codes other than those of quantkit.
            result = super().main(words, standalone_mode=False, **extra)
        except SystemExit:
            if sys.stdout is stdout:
                raise
            failure = BrokenPipeError()  # when a pipe breaks, click replaces the streams and exits
        except BaseException as error:
            if not isinstance(error, Exception | KeyboardInterrupt) and not is_panic(error):
                raise
            failure = _mended(error)
        failure = end_output() or failure
        if failure is None:
            sys.exit(result if isinstance(result, int) else 0)
        # After `--`, all words are arguments, even those that look like flags.
        flags = words[: words.index("--")] if "--" in words else words
        # Searched in the raw words, because a usage error comes before options are parsed.
        sys.exit(report_error(failure, as_json="--json" in flags, verbose="--verbose" in flags))


def _keep_torch_out_of_tmp() -> None:
    """Give torch's compiler a cache in the user's own folder, if there is one.

    By default, torch creates a folder in /tmp under a name that anybody can guess. Another user could put a file there,
    or a folder with compiled code.
    """
    # Not Path.expanduser, which raises where this user has no home.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111
    if os.access(cache if cache.is_dir() else cache.parent, os.W_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "quantkit" / "torchinductor"))


def _mended(error: BaseException) -> BaseException:
    """Return the error for an unknown option with a better suggestion, and any other error unchanged.

    Click's own suggestion for `--overwrite` would be `--verify`.
    """
    if not isinstance(error, click.NoSuchOption):
        return error
    known = [] if error.ctx is None else [flag for option in error.ctx.command.params for flag in option.opts]
    near = difflib.get_close_matches(error.option_name, known, n=1, cutoff=0.8)
    return click.NoSuchOption(error.option_name, possibilities=near, ctx=error.ctx)


def _print_version(ctx: click.Context, _option: click.Parameter, is_given: bool) -> None:
    if is_given:
        import quantkit

        click.echo(f"quantkit {quantkit.__version__}")
        ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Print the version."
)
def main() -> None:
    """Compress Hugging Face causal language models, layer by layer, to checkpoints that common engines load.

    \b
    Examples:
      quantkit quantize --recipe awq-int4 --samples 16 -o demo-int4
      quantkit inspect demo-int4
      quantkit recipes list
    """
