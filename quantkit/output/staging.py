"""Where an output is made until it gets its name: a work folder beside it, the same for every command that writes one.

What an output replaces is moved into that folder and deleted last; a process that is killed in between leaves it there,
and the next one puts it back.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import OutputError
from quantkit.output.replaceable import check_checkpoint
from quantkit.output.work_folder import WorkFolder, work_folder
from quantkit.output.writer import sync_folder, writing
from quantkit.safety.untrusted import check_path


@dataclass(kw_only=True, slots=True)
class Stage:
    """One output in the making.

    Args:
        output: its final name.
        work: where it is made.
        overwrite: whether something may be there already.
        check: raises OutputError unless what is there may be replaced.
    """

    output: Path
    work: WorkFolder
    overwrite: bool
    check: Callable[[Path], None]

    @property
    def is_finished(self) -> bool:
        """Whether an earlier run seems to have been killed between naming the output and tidying up."""
        return bool(self.work.known) and os.path.lexists(self.output) and not os.path.lexists(self.work.checkpoint)

    def check_output(self) -> None:
        """Refuse what may not be replaced.

        Raises:
            OutputError: says why.
        """
        _check_output(self.output, self.overwrite, self.check)

    def promote(self, made: Path) -> None:
        """Give what is finished its name, and delete the rest; at no moment is half of it under that name.

        Args:
            made: on the file system of `output`.
        Raises:
            OutputError: `output` may not be replaced, or cannot be renamed; then it is as it was.
        """
        # Checked once more: a run may take hours, in which somebody may have removed the folder or made the output.
        self.work.check_held()
        self.check_output()
        with writing(self.output):
            if self.output.is_dir():
                try:
                    # A directory cannot be renamed over one that is not empty, so the old one steps aside first.
                    self.output.rename(self.work.replaced)
                    made.rename(self.output)
                except BaseException:
                    self.work.put_back()
                    raise
            else:
                made.replace(self.output)
            # The new name must be on the disk before what it replaces is deleted.
            sync_folder(self.output.parent)
            self.work.clear()


@contextmanager
def open_stage(
    output: Path,
    kind: str,
    *,
    overwrite: bool,
    check: Callable[[Path], None] = check_checkpoint,
    resumable: bool = False,
    allow_finished: bool = False,
) -> Iterator[Stage]:
    """The work folder of an output, `<output>.partial`, after everything has been checked that can be refused.

    Args:
        output: file or directory to make.
        kind: the command that makes it, for messages.
        overwrite: an existing output may be replaced if `check` allows it.
        check: raises OutputError unless what is there may be replaced.
        resumable: what is unfinished stays when the block fails.
        allow_finished: leave an output to the caller that an earlier run seems to have finished, see `is_finished`.
    Raises:
        OutputError: the output or the folder is somebody else's, a link, or being written by another process.
    """
    check_path(output, OutputError)
    if output.name in ("", ".."):
        raise OutputError(f"output {output} has no name of its own; give one, such as {output / 'out'}")
    folder = output.with_name(f"{output.name}.partial")
    # A refusal leaves no new folder behind; one that is there may first have to put back what it replaced.
    if not os.path.lexists(folder):
        _check_output(output, overwrite, check)
    with work_folder(folder, kind, output=output, resumable=resumable) as work:
        stage = Stage(output=output, work=work, overwrite=overwrite, check=check)
        if not (allow_finished and stage.is_finished):
            stage.check_output()
        yield stage


def _check_output(output: Path, overwrite: bool, check: Callable[[Path], None]) -> None:
    if not os.path.lexists(output):
        return
    if not overwrite:
        raise OutputError(f"output {output} exists already; choose another --output or pass --overwrite")
    with writing(output):
        check(output)
