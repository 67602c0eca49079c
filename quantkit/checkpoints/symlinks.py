"""Refuse links that lead out of a model's folder: through them, quantkit would read and copy the user's own files.

The check runs when a folder is opened, so it covers files that transformers reads. It does not protect against a folder
that changes afterwards.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from quantkit.errors import ModelError, first_line
from quantkit.safety.untrusted import read_object, shorten

# Folders inside a model's folder that transformers reads.
_READ_FOLDERS = ("additional_chat_templates",)


def check_links(folder: Path, *, deep: bool = False) -> None:
    """Refuse links that lead out of a model's folder, and entries that are neither files nor folders.

    A link may lead into the folder or, for a snapshot in the hub's cache, to the blobs of that cache:

        models--X/snapshots/<revision>/config.json -> ../../blobs/<hash>

    Args:
        folder: folder of the model; may itself be reached through a link.
        deep: whether to check all folders inside `folder`, not only those that transformers reads.
    Raises:
        ModelError: a link leads to any other place, or an entry is a pipe, a socket or a device; the message names it.
    """
    root = Path(os.path.realpath(folder))
    blobs = _blobs(root)
    try:
        for path in _entries(root, deep):
            _check_entry(path, folder / path.relative_to(root), root, blobs)
    except OSError as error:
        raise ModelError(f"cannot read the folder {folder}: {first_line(error)}; check its permissions") from None


def check_pointers(folder: Path) -> None:
    """Refuse files that make transformers load a vocabulary from outside the folder, or a different model.

    Args:
        folder: folder of the model.
    Raises:
        ModelError: there is such a file; the message names it.
    """
    if (folder / "config.json").is_file() and (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"{folder} has a model and an adapter_config.json, which makes transformers load a different model; move "
            "the adapter to a separate folder, and give that folder as --adapter"
        )
    try:
        settings = read_object(folder / "tokenizer_config.json", ModelError)
    except ModelError:  # missing or damaged: the tokenizer's loader reports this
        return
    root = Path(os.path.realpath(folder))
    for key, name in settings.items():
        # Tokenizers open these entries (`vocab_file`, `merges_file`) as paths, wherever they lead.
        if key.endswith("_file") and isinstance(name, str) and "\0" not in name:
            target = Path(os.path.realpath(root / name))
            if target.exists() and not target.is_relative_to(root):
                raise ModelError(
                    f"{folder / 'tokenizer_config.json'}: {key} is {shorten(name)}, a file outside the model's folder; "
                    "remove the entry"
                )


def _blobs(root: Path) -> Path | None:
    """Return the blobs folder that belongs to a snapshot in the hub's cache; None for other folders."""
    model = root.parent.parent
    blobs = model / "blobs"
    # If the blobs folder is itself a link, it could lead anywhere.
    if root.parent.name != "snapshots" or not model.name.startswith("models--") or blobs.is_symlink():
        return None
    return blobs


def _entries(folder: Path, deep: bool) -> Iterator[Path]:
    """Yield the entries of a folder, sorted by name, then the entries of the folders inside it.

    If not `deep`, enter only the folders that transformers reads.
    """
    with os.scandir(folder) as entries:
        inside = sorted(entries, key=lambda entry: entry.name)
    for entry in inside:
        yield folder / entry.name
    for entry in inside:
        if (deep or entry.name in _READ_FOLDERS) and entry.is_dir(follow_symlinks=False):
            yield from _entries(folder / entry.name, deep)


def _check_entry(path: Path, shown: Path, root: Path, blobs: Path | None) -> None:
    if path.is_symlink():
        target = Path(os.path.realpath(path))
        if not (target.is_relative_to(root) or (blobs is not None and target.parent == blobs)):
            raise ModelError(
                f"{shown} is a link to {target}, outside the model's folder; replace it with the file itself, "
                "or give the folder that holds the files"
            )
    try:
        # Opening a pipe would wait for its other end, and a device may never end.
        mode = path.stat().st_mode
    except OSError:  # a broken link: the reader of the file reports it as missing
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ModelError(f"{shown} is a pipe, a socket or a device, not a file; remove it")
