"""Stage the output of a command: make it in a work folder beside its final path, then rename it to that path.

If an old output is replaced, it is moved into the work folder first and deleted last. If the process is killed in
between, the next run moves the old output back. quantkit replaces only outputs that it wrote and to which nobody has
added files.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoints.folder import CONFIG_NAME, INDEX_NAME, is_metadata, matches_any
from quantkit.errors import CheckpointError, OutputError
from quantkit.machine.system import sync_folder
from quantkit.output.work_folder import WorkFolder, work_folder
from quantkit.output.writer import writing
from quantkit.safety.untrusted import check_path, read_object

MANIFEST = "quantkit.json"
MERGED = "merged_adapters"
"""Name of the entry of quantkit.json that lists the digests of all merged adapters; absent if there are none."""

_SIGNED_BYTES = 1 << 16
# Files that quantize, convert, verify and the hub write into a checkpoint, in addition to tokenizer and licence files.
_DIGITS = "[0-9]" * 5
_WRITTEN = (
    *(CONFIG_NAME, INDEX_NAME, f"model-{_DIGITS}-of-{_DIGITS}.safetensors", "quantkit*.json"),
    *("README.md", "report.json", "report.html", "junit.xml"),
)


def check_apart(output: Path, source: Path) -> None:
    """Refuse an output that is the source model, lies in it or contains it: writing there would destroy the model.

    Raises:
        OutputError: the two paths overlap; the message names both.
    """
    target, model = output.resolve(), source.resolve()
    if target == model or target in model.parents or model in target.parents:
        raise OutputError(
            f"output {output} and the model in {source} overlap, so writing could destroy the model; choose another "
            "--output"
        )


def check_checkpoint(output: Path) -> None:
    """Refuse to replace anything but an empty directory or a checkpoint that contains only files by quantkit.

    Args:
        output: existing path.
    Raises:
        OutputError: the path is something else; the message gives the reason, e.g. a file that quantkit did not write.
    """
    if output.is_symlink() or not output.is_dir():
        raise _kept(output, "is not a directory, or is a link to one")
    entries = sorted(output.iterdir())
    if entries and not _is_ours(output / MANIFEST):
        raise _kept(output, f"has no {MANIFEST} that quantkit wrote")
    for entry in entries:
        ours = is_metadata(entry.name) or matches_any(entry.name, _WRITTEN)
        # A file that somebody put beside the weights may be the only copy there is.
        if entry.is_symlink() or not entry.is_file() or not ours:
            raise _kept(output, f"holds {entry.name}, which quantkit did not write")


def check_gguf(output: Path) -> None:
    """Refuse to replace anything but a GGUF file.

    Raises:
        OutputError: the path is not a GGUF file.
    """
    check_regular(output)
    with output.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise _kept(output, "is not a GGUF file")


def check_text(output: Path, sign: str) -> None:
    """Refuse to replace anything but a text file that quantkit wrote.

    Args:
        output: existing path.
        sign: text near the beginning of every file of this kind that quantkit writes.
    Raises:
        OutputError: the path is not such a file.
    """
    check_regular(output)
    with output.open("rb") as file:
        if sign.encode() not in file.read(_SIGNED_BYTES):
            raise _kept(output, "was not written by quantkit")


def check_regular(output: Path) -> None:
    """Refuse to replace anything but a regular file.

    Raises:
        OutputError: the path is a link, a directory or a device.
    """
    if output.is_symlink() or not output.is_file():
        raise _kept(output, "is not a regular file")


def _kept(output: Path, reason: str) -> OutputError:
    return OutputError(f"output {output} {reason}, so it is not replaced; move it away or choose another --output")


def _is_ours(path: Path) -> bool:
    """Whether a file is a manifest that `quantize`, `convert` or `distill` wrote."""
    try:
        # A link may lead to the manifest of a different folder.
        manifest = {} if path.is_symlink() else read_object(path, CheckpointError)
    except CheckpointError:
        return False
    signs = {"identity": dict, "converted_from": str, "distilled": dict}
    is_made = any(isinstance(manifest.get(name), kind) for name, kind in signs.items())
    return is_made and type(manifest.get("schema_version")) is int


@dataclass(kw_only=True, slots=True)
class Stage:
    """An output that is not finished yet.

    Args:
        output: final path.
        work: work folder in which the output is made.
        overwrite: whether `output` may exist already.
        check: function that raises OutputError if the existing output must not be replaced.
    """

    output: Path
    work: WorkFolder
    overwrite: bool
    check: Callable[[Path], None]

    @property
    def is_finished(self) -> bool:
        """Whether an earlier run was probably killed after renaming the output and before deleting the work folder."""
        return bool(self.work.known) and os.path.lexists(self.output) and not os.path.lexists(self.work.checkpoint)

    def check_output(self) -> None:
        """Refuse an existing output that must not be replaced.

        Raises:
            OutputError: the output must not be replaced; the message says why.
        """
        _check_output(self.output, self.overwrite, self.check)

    def promote(self, made: Path) -> None:
        """Rename a finished file or folder to the final path, and empty the work folder.

        The final path never holds an incomplete output.

        Args:
            made: finished file or folder, on the file system of `output`.
        Raises:
            OutputError: `output` must not be replaced or cannot be renamed; it is then unchanged.
        """
        # Checked again: during a long run, somebody may have removed the folder or created the output.
        self.work.check_held()
        self.check_output()
        with writing(self.output):
            if self.output.is_dir():
                try:
                    # A directory cannot be renamed over one that is not empty, so the old one is moved away first.
                    self.output.rename(self.work.replaced)
                    made.rename(self.output)
                except BaseException:
                    self.work.put_back()
                    raise
            else:
                made.replace(self.output)
            # The new name must be on the disk before the old output is deleted.
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
    """Check an output path, and open its work folder `<output>.partial`.

    Args:
        output: file or directory to make.
        kind: name of the command, for messages.
        overwrite: whether an existing output may be replaced if `check` allows that.
        check: function that raises OutputError if the existing output must not be replaced.
        resumable: keep unfinished work if the block fails.
        allow_finished: accept an existing output if an earlier run seems to have finished it; see `Stage.is_finished`.
    Raises:
        OutputError: the output exists and must not be replaced, or the work folder was not created by quantkit, is a
            link, or is used by another process.
    """
    check_path(output, OutputError)
    if output.name in ("", ".."):
        raise OutputError(f"output {output} has no file name; add one, e.g. {output / 'out'}")
    folder = output.with_name(f"{output.name}.partial")
    # Checked before a new folder is made; an existing folder may first have to move back an old output.
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
