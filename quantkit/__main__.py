"""The command line, as `quantkit` and as `python -m quantkit`."""

from quantkit.cli import main as command


def main() -> None:
    """Run the command line."""
    command(prog_name="quantkit")


if __name__ == "__main__":
    main()
