"""Where tasks, suites and their items are: folders shipped with quantkit, and the folders a user names."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from quantkit.demo import bundled_folder, is_demo
from quantkit.errors import DataError
from quantkit.evaluate.engine import Evaluated
from quantkit.safety.untrusted import MAX_TEXT_BYTES, read_text, shorten

LEDGERS = "demo/demo_recall.jsonl"
LEDGER_TEXT = "demo/demo_text.txt"


def speaks_demo(llm: Evaluated) -> bool:
    """Whether a model is of the demo language: the demo model, or whatever was made from it."""
    return is_demo(llm.path)


def find_items(pattern: str, folders: Sequence[Path]) -> list[str]:
    """Files of items, from the first folder that has any.

    Args:
        pattern: path below the folder; `*` stands for any name.
        folders: where to look, in order.
    """
    # Sorted: the order of glob depends on the file system, and items must be numbered alike everywhere.
    items = (sorted(map(str, folder.expanduser().glob(pattern))) for folder in folders)
    return next(filter(None, items), [])


def read_named_text(name: str, folders: Sequence[Path]) -> str:
    """A text to score.

    Args:
        name: `demo`, a file, or a path below one of the folders.
        folders: where to look, in order.
    Raises:
        DataError: there is no such file, or it is no UTF-8 text.
    """
    texts: list[str] = []
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # a name that no file can have, or of nobody's home
        path = bundled_folder("tasks") / LEDGER_TEXT if name == "demo" else Path(name).expanduser()
        # glob raises for an absolute pattern instead of finding nothing.
        texts = [str(path)] if path.is_file() else [] if path.is_absolute() else find_items(name, folders)
    if not texts:
        looked = ", ".join(map(str, folders)) or "no --data folder was given"
        raise DataError(f"text {shorten(name, 300)} is no file here and not below --data ({looked}); pass --text FILE")
    return read_text(Path(texts[0]), DataError, MAX_TEXT_BYTES)
