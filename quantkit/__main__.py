"""The command line, as `quantkit` and as `python -m quantkit`."""

import sys

from quantkit.errors import ResourceError, require_linux


def main() -> None:
    """Run the command line; on systems other than Linux, print a one-line error, because imports would fail there."""
    try:
        require_linux()
    except ResourceError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    from quantkit.cli import main as command

    command(prog_name="quantkit")


if __name__ == "__main__":
    main()
