"""From what the user calls a model to a directory: a path, or an id on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from quantkit.checkpoints.folder import check_folder
from quantkit.errors import ModelError, first_line

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DOWNLOADED = (
    *("*.safetensors", "*.json", "tokenizer*", "*.model", "*.txt", "*.tiktoken", "chat_template*"),
    *("LICENSE*", "NOTICE*", "README*"),
)
# Folders hold exports in other layouts, "consolidated" is the same weights once more.
_LEFT_THERE = ("*/*", "consolidated*", "*.bin", "*.pt", "*.pth", "*.py", "*.pkl", "*.gguf", "*.onnx")


def resolve(model: str) -> Path:
    """The directory of a model; downloads it when it is an id on the hub, never pickles and never code.

    Args:
        model: a directory, or an id such as `Qwen/Qwen3-0.6B`.
    Returns:
        The directory itself, or the snapshot in the hub's cache.
    Raises:
        ModelError: a path that does not exist or is a file, or an id that cannot be downloaded; says what to do.
    """
    path = Path(model).expanduser()
    if path.exists() or not _HUB_ID.fullmatch(model):
        return check_folder(path)
    try:
        # Imported late: a local directory must not depend on the hub's library.
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, allow_patterns=list(_DOWNLOADED), ignore_patterns=list(_LEFT_THERE)))
    except Exception as error:
        # The hub fails in many ways that share no class: HTTP, connection, validation, cache, missing package.
        reason = first_line(error)
        raise ModelError(
            f"{model!r} is no directory here and cannot be downloaded from the hub ({type(error).__name__}: "
            f"{reason.rstrip('.')}); check the spelling and the network, log in with `hf auth login` if it is gated, "
            "or give a directory"
        ) from error
