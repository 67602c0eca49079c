"""What quantkit's messages say of other libraries' errors."""

import pytest

from quantkit.errors import first_line

EXPLAINED = "attempted to run this operator with Meta tensors. You may have run into this " + "while compiling " * 20


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("", "ValueError"),
        ("\n no file. Look again.\nTraceback", "no file. Look again."),
        (EXPLAINED, "attempted to run this operator with Meta tensors"),
    ],
)
def test_a_librarys_message_is_one_line(message: str, line: str) -> None:
    assert first_line(ValueError(message)) == line
