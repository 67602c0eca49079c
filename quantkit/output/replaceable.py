"""What --overwrite may replace: only what quantkit wrote, with nothing in it that somebody else has added."""

from pathlib import Path

from quantkit.checkpoints.folder import CONFIG_NAME, INDEX_NAME, is_metadata, matches_any
from quantkit.errors import CheckpointError, OutputError
from quantkit.safety.untrusted import read_object

MANIFEST = "quantkit.json"

_SIGNED_BYTES = 1 << 16
# Beside tokenizer, licence and the like: what quantize, convert, verify and the hub write into a checkpoint.
_DIGITS = "[0-9]" * 5
_WRITTEN = (
    *(CONFIG_NAME, INDEX_NAME, f"model-{_DIGITS}-of-{_DIGITS}.safetensors", "quantkit*.json"),
    *("README.md", "report.json", "report.html", "junit.xml"),
)


def check_apart(output: Path, source: Path) -> None:
    """Refuse an output that is the source, in it or around it: replacing it would destroy the model.

    Raises:
        OutputError: names both.
    """
    target, model = output.resolve(), source.resolve()
    if target == model or target in model.parents or model in target.parents:
        raise OutputError(f"output {output} and the model in {source} overlap; choose another --output")


def check_checkpoint(output: Path) -> None:
    """Refuse to replace anything but an empty directory or a checkpoint that quantkit wrote, with nothing else in it.

    Args:
        output: what is there.
    Raises:
        OutputError: says what in it is not quantkit's.
    """
    if output.is_symlink() or not output.is_dir():
        raise _kept(output, "is no directory of its own")
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
        OutputError: it is something else.
    """
    check_regular(output)
    with output.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise _kept(output, "is not a GGUF file")


def check_text(output: Path, sign: str) -> None:
    """Refuse to replace anything but a text that quantkit wrote.

    Args:
        output: what is there.
        sign: words near the beginning of every such text.
    Raises:
        OutputError: it is something else.
    """
    check_regular(output)
    with output.open("rb") as file:
        if sign.encode() not in file.read(_SIGNED_BYTES):
            raise _kept(output, "was not written by quantkit")


def check_regular(output: Path) -> None:
    """Refuse to replace anything but a file.

    Raises:
        OutputError: it is a link, a directory or a device.
    """
    if output.is_symlink() or not output.is_file():
        raise _kept(output, "is no file of its own")


def _kept(output: Path, reason: str) -> OutputError:
    return OutputError(f"output {output} {reason}, so it is not replaced; move it away or choose another --output")


def _is_ours(path: Path) -> bool:
    """Whether a file is a manifest of `quantize` or `convert`."""
    try:
        # A link would let the manifest of another folder vouch for this one.
        manifest = {} if path.is_symlink() else read_object(path, CheckpointError)
    except CheckpointError:
        return False
    is_made = isinstance(manifest.get("identity"), dict) or isinstance(manifest.get("converted_from"), str)
    return is_made and type(manifest.get("schema_version")) is int
