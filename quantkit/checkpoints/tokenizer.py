"""The tokenizer of a model's folder, tried out before it is trusted with a text."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.child import ends_well
from quantkit.errors import ModelError, first_line

_TIMEOUT_S, _MAX_BYTES = 20.0, 1 << 30
# Digits, accents, an emoji, another script, spaces and a run: what tokenizers have steps of their own for.
_SAMPLE = "The quick brown fox, 12.5 km/h: à l'été — \U0001f98a 狐狸\n\tdef f(x):  return x_1**2  # aaaaaaaa\n"


def load_tokenizer(folder: Path) -> Any:
    """A transformers tokenizer. Code that comes with it is never run, nor is anybody asked to.

    Args:
        folder: of the model.
    Raises:
        ModelError: it is missing or broken, or a line of text takes it more time or memory than any should.
    """
    from transformers import AutoTokenizer

    try:
        with quiet_stdout():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # many classes for missing and broken files, and Rust's panics are no Exception
        raise ModelError(f"{folder}: its tokenizer cannot be loaded: {first_line(error)}") from error

    # A step that replaces nothing by something, thirty times, turns a line into gigabytes.
    if not ends_well(partial(_try_out, tokenizer), seconds=_TIMEOUT_S, num_bytes=_MAX_BYTES):
        raise ModelError(
            f"{folder}: its tokenizer fails on a line of text, or takes more than {_TIMEOUT_S:.0f} s or 1 GiB for it; "
            "download or copy it again"
        )
    return tokenizer


def _try_out(tokenizer: Any) -> None:
    tokenizer.decode(tokenizer(_SAMPLE, verbose=False)["input_ids"])


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """Rust's `println!` about options of a file that it does not know goes to stderr: stdout is for results."""
    try:
        stdout = os.dup(1)
    except OSError:  # closed
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
