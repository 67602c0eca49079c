"""A work folder: a folder that holds quantkit's marker file and is locked by one process.

quantkit deletes files only in folders with the marker, and writes the marker only into a folder that is new or empty.
"""

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from io import FileIO
from pathlib import Path
from typing import Any

from quantkit.errors import OutputError
from quantkit.machine.system import CAN_DELETE_OPEN_FILES, lock, sync_folder, user_id
from quantkit.output.writer import writing

MARKER = ".quantkit-work"  # marks the folder as quantkit's; the process locks this file
_OURS = {"written_by": "quantkit", "version": 1}  # entries of every marker
# Do not follow a link in place of the marker, do not wait for a pipe, do not translate line ends. No system has all
# three flags.
_SAFELY = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))


@dataclass(kw_only=True, slots=True)
class WorkFolder:
    """A locked work folder: while it is open, only this process may write to it or delete its contents.

    Args:
        path: path of the folder.
        output: final path of the output that is made in the folder; None = the output stays in the folder.
        resumable: whether a later run can use its contents.
        adopted: whether the folder existed before this run, empty and without a marker.
        known: contents of the marker when the folder was opened; empty for a new folder.
    """

    path: Path
    output: Path | None
    resumable: bool
    adopted: bool
    known: dict[str, Any]
    _marker: FileIO

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Return the fields to pickle for another process: all but the open marker file, which holds the lock."""
        return None, {each.name: getattr(self, each.name) for each in fields(self) if each.name != "_marker"}

    @property
    def checkpoint(self) -> Path:
        """Folder that becomes the output, if the output is a directory."""
        return self.path / "checkpoint"

    @property
    def replaced(self) -> Path:
        """Path to which the old output is moved while it is replaced."""
        return self.path / "replaced"

    def clear(self) -> None:
        """Delete everything but the marker. Files go first, so a killed run leaves no file about a deleted folder."""
        self.put_back()
        for entry in sorted(self._entries(), key=Path.is_dir):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def put_back(self) -> None:
        """Move an old output back from the work folder to its path if no new output is at that path.

        Raises:
            OutputError: something else is at the path now; nothing is changed.
        """
        if self.output is None or not os.path.lexists(self.replaced):
            return
        if not os.path.lexists(self.output):
            self.replaced.rename(self.output)
            sync_folder(self.output.parent)
        elif os.path.lexists(self.checkpoint):
            raise OutputError(
                f"an interrupted run moved the old {self.output} to {self.replaced}, but {self.output} exists again; "
                "move one of the two away"
            )

    def check_held(self) -> None:
        """Check that the folder still belongs to this run.

        Raises:
            OutputError: somebody removed the folder, or another run uses it.
        """
        if not _is_at(self._marker, self.path / MARKER):
            raise OutputError(f"the work folder {self.path} was removed during this run; run the command again")

    def leave(self) -> None:
        """Delete contents that no later run can use; then, if the folder is empty, delete the marker and the folder."""
        # Errors are ignored: the marker remains, so the next run cleans up.
        with contextlib.suppress(OSError, OutputError):
            if not _is_at(self._marker, self.path / MARKER):
                return
            if not self.resumable:
                self.clear()
            if not self._entries():
                if not CAN_DELETE_OPEN_FILES:  # so that `unlink` fails if another run has opened the marker meanwhile
                    self._marker.close()
                (self.path / MARKER).unlink()
                if self.output is not None or not self.adopted:
                    self.path.rmdir()

    def _entries(self) -> list[Path]:
        return [entry for entry in self.path.iterdir() if entry.name != MARKER]


@contextmanager
def work_folder(
    path: Path, kind: str, *, output: Path | None = None, resumable: bool = True, option: str = "--output"
) -> Iterator[WorkFolder]:
    """Lock a work folder while the block runs. The folder is new, or was left by an earlier run of the same command.

    At the end, the folder is deleted if it is empty or if a later run cannot use its contents.

    Args:
        path: path of the folder.
        kind: name of the command.
        output: final path of the output that is made in the folder; None = the output stays in the folder.
        resumable: keep the contents for a later run.
        option: command-line option that determines the folder, for messages.
    Raises:
        OutputError: the folder was not created by quantkit, is a link, contains links, or is used by another process.
        ResourceError: the disk is full.
    """
    with contextlib.ExitStack() as stack:
        with writing(path):
            work = _claim(path, output, resumable, option)
            stack.callback(work._marker.close)
            _check_links(path, option)
            # Before anything is deleted: the old output that an interrupted run moved here may be the user's only copy.
            work.put_back()
            _take_over(work, kind)
        # Called before the marker is closed, so that the folder is cleaned up under its lock.
        stack.callback(work.leave)
        yield work


def _claim(path: Path, output: Path | None, resumable: bool, option: str) -> WorkFolder:
    """Lock the marker of a folder; create the folder and the marker if they do not exist."""
    while True:
        created = _create(path, option)
        try:
            marker = FileIO(os.open(path / MARKER, os.O_RDWR | os.O_CREAT | _SAFELY, 0o666), "r+")
        except FileNotFoundError:
            continue  # another run has just removed the folder
        with contextlib.ExitStack() as stack:
            stack.callback(marker.close)
            try:
                lock(marker.fileno(), wait=False)
            except BlockingIOError:
                raise OutputError(f"another run is writing {path}; wait for it or choose another {option}") from None
            if _is_at(marker, path / MARKER):  # otherwise another run has just removed the marker: try again
                _check_owner(path, option)
                known = _read_marker(marker, path, option)
                # From here on, the caller must close the marker, which also releases the lock.
                stack.pop_all()
                adopted = not created and not known
                return WorkFolder(
                    path=path, output=output, resumable=resumable, adopted=adopted, known=known, _marker=marker
                )


def _create(path: Path, option: str) -> bool:
    """Create the folder and return True; return False if it exists and is empty or has a marker.

    Raises:
        OutputError: the path is a link, a file, or a folder with other contents.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir()
        return True
    except FileExistsError:
        pass
    with contextlib.suppress(FileNotFoundError):  # another run may be removing it
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            raise _link(path, option)
        if not stat.S_ISDIR(mode):
            raise OutputError(
                f"{path} is a file, but quantkit needs a folder there; move the file away or choose another {option}"
            )
        names = [entry.name for entry in path.iterdir()]
        if names and (MARKER not in names or not stat.S_ISREG((path / MARKER).lstat().st_mode)):
            raise _foreign(path, option)
    return False


def _check_owner(path: Path, option: str) -> None:
    """Refuse another user's folder in a shared directory such as /tmp: a run would resume from that user's weights."""
    parent, owner = path.parent.stat(), path.lstat().st_uid
    # Folders of the directory's owner and of root are accepted, because both could replace anything in the directory.
    if parent.st_mode & stat.S_ISVTX and owner not in (user_id(), parent.st_uid, 0):
        raise OutputError(
            f"the work folder {path} belongs to another user (uid {owner}), whose files quantkit does not trust; "
            f"choose another {option}"
        )


def _read_marker(file: FileIO, path: Path, option: str) -> dict[str, Any]:
    """Return the contents of the marker; empty if it is new or its creator was killed before writing them."""
    file.seek(0)
    text = file.read(1 << 16)
    if not text and list(path.iterdir()) == [path / MARKER]:
        return {}
    try:
        marker: Any = json.loads(text)
    except (ValueError, RecursionError):
        marker = None
    if not isinstance(marker, dict) or not _OURS.items() <= marker.items():
        raise _foreign(path, option)
    return marker


def _foreign(path: Path, option: str) -> OutputError:
    return OutputError(
        f"quantkit needs {path} as a work folder, but this version of quantkit did not create that folder; move the "
        f"folder away (delete it only if an interrupted run of an earlier version left it) or choose another {option}"
    )


def _link(path: Path, option: str) -> OutputError:
    return OutputError(
        f"{path} is a symbolic link, and quantkit does not write through links; remove it or choose another {option}"
    )


def _check_links(path: Path, option: str) -> None:
    """Refuse a folder that contains links: quantkit could write or delete files through them."""
    for folder, folders, files in os.walk(path):
        for name in sorted(folders + files):
            link = Path(folder, name)
            if link.is_symlink():
                raise _link(link, option)


def _take_over(work: WorkFolder, kind: str) -> None:
    """Keep resumable work of the same command, refuse resumable work of another command, and delete other work."""
    left = work.known.get("kind")
    if left == kind and work.resumable:
        return
    if left is not None and work.known.get("resumable") is not False and work._entries():
        raise OutputError(
            f"{work.path} belongs to an interrupted `quantkit {left}`; run that command again to finish it, or delete "
            "the folder"
        )
    work.clear()
    marker = {**_OURS, "kind": kind, "resumable": work.resumable}
    work._marker.truncate(0)
    work._marker.seek(0)
    work._marker.write(json.dumps(marker).encode() + b"\n")
    work.known = {}


def _is_at(file: FileIO, path: Path) -> bool:
    """Whether a path still leads to the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except FileNotFoundError:
        return False
