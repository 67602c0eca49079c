"""Upload a finished checkpoint to the Hugging Face Hub, with a model card: contents, origin, and how to load it.

Only the checkpoint's files and the card are uploaded. The licence comes from the source model's card and is never
guessed.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.checkpoints.folder import resolve
from quantkit.checkpoints.symlinks import check_links
from quantkit.errors import InputError, ModelError, OutputError, first_line
from quantkit.inspection import inspect
from quantkit.quantities import byte_size
from quantkit.report.files import front_matter, loading, markdown_table, plain
from quantkit.report.table import facts
from quantkit.report.tables import module_table
from quantkit.safety.untrusted import MAX_YAML_BYTES, parse_yaml

CARD = "README.md"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_CARRIED = ("license", "license_name", "license_link", "language", "base_model")


def find_origin(model: str | Path | None) -> dict[str, Any]:
    """Return the entries of the new card's front matter that come from the source model: licence, language, hub id.

    Args:
        model: argument of `quantize`: a directory, a hub id, or None or "demo" for the bundled model.
    Raises:
        ModelError: the card's front matter is not valid.
    """
    if model is None or str(model) == "demo":
        return {}
    if not Path(model).exists() and _HUB_ID.fullmatch(str(model)):
        return {**card_entries(resolve(str(model))), "base_model": str(model)}
    return card_entries(Path(model))


def card_entries(folder: Path) -> dict[str, Any]:
    """Return the entries of a model's card that are copied into the card of its compressed version; empty if there are
    none.

    Raises:
        ModelError: the front matter is not valid, or a link leads out of the folder.
    """
    path = folder / CARD
    if not path.is_file():
        return {}
    check_links(folder)
    with path.open("rb") as file:
        match = _FRONT.match(file.read(MAX_YAML_BYTES).decode("utf-8", errors="replace"))
    entries = parse_yaml(match.group(1), f"the front matter of {path}", ModelError) if match else None
    if not isinstance(entries, dict):
        return {}
    return {key: entries[key] for key in _CARRIED if entries.get(key) is not None}


def hub_card(checkpoint: Path, repo: str, origin: Mapping[str, Any]) -> str:
    """Return the text of a checkpoint's model card.

    Args:
        checkpoint: directory or GGUF file.
        repo: id of the repository on the hub, `user/name`.
        origin: entries inherited from the source model, see `find_origin`.
    """
    summary = inspect(checkpoint)
    made = f"Compressed from {origin.get('base_model', 'a local model')} with quantkit"
    recipe = f", recipe `{plain(summary.recipe)}`" if summary.recipe else ""
    bits = f"{summary.bits_per_weight:.3f} bits per quantized weight, " if summary.bits_per_weight else ""
    parts = [
        front_matter(origin, summary.format),
        f"# {repo.partition('/')[2]}",
        f"{made}{recipe}. Format: {summary.format}; {bits}{byte_size(summary.num_bytes)} in all.",
        markdown_table(module_table(summary)),
        *_repeating(summary.made_by),
        loading(summary.format, repo if checkpoint.is_dir() else checkpoint.name, summary.engines),
    ]
    return "\n\n".join(parts) + "\n"


def _repeating(made_by: Mapping[str, str]) -> list[str]:
    """Return the parts of a card that say how to make a GGUF file again; none if the file holds no recipe."""
    recipe = made_by.get("quantkit.recipe")
    if recipe is None:
        return []
    others = {key.removeprefix("quantkit."): value for key, value in made_by.items() if value is not recipe}
    rows = facts((plain(key), plain(value)) for key, value in others.items())
    how = "Save this recipe as `recipe.yaml`. `quantkit quantize MODEL --recipe recipe.yaml` makes the file again."
    # The fence is longer than any in the recipe, which comes from the file and may contain anything.
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", recipe)), default=0))
    return ["## How to make this file again", markdown_table(rows), how, f"{fence}yaml\n{recipe.strip()}\n{fence}"]


def push(
    checkpoint: str | Path,
    repo: str,
    *,
    source: str | Path | None,
    endpoint: str | None = None,
    token: str | None = None,
) -> str:
    """Upload a checkpoint; create the repository if it does not exist.

    Args:
        checkpoint: directory or GGUF file; a directory gets the card as README.md.
        repo: id of the repository, `user/name`.
        source: model that the checkpoint was made from, see `find_origin`.
        endpoint: address of the hub; None = the address in the environment variable HF_ENDPOINT, or the default.
        token: access token; None = the token of `hf auth login`.
    Returns:
        Address of the repository.
    Raises:
        InputError: `repo` is not a valid repository id.
        ModelError: the source's card is not valid; or a link in the directory points outside, so files from elsewhere
            would be uploaded.
        OutputError: the hub refuses the upload or cannot be reached.
    """
    path, origin = Path(checkpoint), find_origin(source)
    if not _HUB_ID.fullmatch(repo):
        raise InputError(f"{repo!r} is not the name of a repository; write it as user/name")
    if path.is_dir():
        check_links(path, deep=True)
    card = hub_card(path, repo, origin)
    try:
        from huggingface_hub import HfApi

        api = HfApi(endpoint=endpoint, token=token)
        address = str(api.create_repo(repo, exist_ok=True))
        if path.is_dir():
            (path / CARD).write_text(card, encoding="utf-8")
            api.upload_folder(repo_id=repo, folder_path=path, commit_message=f"Upload {path.name}")
        else:
            api.upload_file(repo_id=repo, path_or_fileobj=card.encode(), path_in_repo=CARD)
            api.upload_file(repo_id=repo, path_or_fileobj=path, path_in_repo=path.name)
        return address
    except Exception as error:
        # The hub fails in many ways that share no base class: HTTP, connection, validation, missing package.
        reason = first_line(error).rstrip(".")
        raise OutputError(
            f"cannot push {path} to {repo} ({type(error).__name__}: {reason}); the checkpoint itself is complete; log "
            "in with `hf auth login`, check the name and the network, and push again"
        ) from error
