"""`python -m quantkit` is the command line."""

from quantkit.cli import main

main(prog_name="quantkit")
