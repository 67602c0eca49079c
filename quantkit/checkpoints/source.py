"""From what the user calls a model to its files: a path, an id on the Hugging Face hub, or nothing: the demo model."""

import re
from pathlib import Path

from quantkit.checkpoints.folder import check_folder
from quantkit.demo import DEMO_MODEL
from quantkit.errors import ModelError, first_line

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DOWNLOADED = (
    *("*.safetensors", "*.json", "tokenizer*", "*.model", "*.txt", "*.tiktoken", "chat_template*"),
    *("LICENSE*", "NOTICE*", "README*"),
)
# Folders hold exports in other layouts, "consolidated" is the same weights once more.
_LEFT_THERE = ("*/*", "consolidated*", "*.bin", "*.pt", "*.pth", "*.py", "*.pkl", "*.gguf", "*.onnx")


def is_hub_id(model: str) -> bool:
    """Whether this may be an id on the hub, and no path that was mistyped."""
    return _HUB_ID.fullmatch(model) is not None


def resolve(model: str | Path | None) -> Path:
    """The directory of a model; downloads it when it is an id on the hub, never pickles and never code.

    Args:
        model: a directory, or an id such as `Qwen/Qwen3-0.6B`; None = the bundled demo model.
    Returns:
        The directory itself, or the snapshot in the hub's cache.
    Raises:
        ModelError: a path that does not exist or is a file, or an id that cannot be downloaded; says what to do.
    """
    if model is None:
        return DEMO_MODEL
    path = Path(model).expanduser()
    # What exists here is never asked of the hub, even if it looks like an id.
    return check_folder(path) if path.exists() or not is_hub_id(str(model)) else download(str(model))


def download(model: str, file: str | None = None) -> Path:
    """What the hub has of a model, in its cache.

    Args:
        model: an id on the hub.
        file: the only one that is wanted; None = all that a model needs.
    Raises:
        ModelError: it cannot be downloaded; says what to do.
    """
    try:
        # Imported late: a local directory must not depend on the hub's library.
        from huggingface_hub import hf_hub_download, snapshot_download

        if file is not None:
            return Path(hf_hub_download(model, file))
        return Path(snapshot_download(model, allow_patterns=list(_DOWNLOADED), ignore_patterns=list(_LEFT_THERE)))
    except Exception as error:
        # The hub fails in many ways that share no class: HTTP, connection, validation, cache, missing package.
        raise ModelError(
            f"{model!r} is no directory here and cannot be downloaded from the hub ({type(error).__name__}: "
            f"{first_line(error).rstrip('.')}); check the spelling and the network, log in with `hf auth login` if it "
            "is gated, or give a directory"
        ) from error
