"""The command line as users call it."""

from __future__ import annotations

import pytest

from quantkit.cli import main


@pytest.fixture
def run(capsys):
    """Run `quantkit ...`; exit code, stdout, stderr."""

    def command(*args):
        with pytest.raises(SystemExit) as exit_:
            main(list(map(str, args)))
        captured = capsys.readouterr()
        return exit_.value.code, captured.out, captured.err

    return command
