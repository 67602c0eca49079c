"""Whether two models can be asked the same and compared, before either is loaded."""

from pathlib import Path
from typing import Any

from quantkit.checkpoints.source import resolve
from quantkit.errors import DataError
from quantkit.safety.untrusted import read_object


def check_same_language(model: str | None, baseline: str | None) -> None:
    """Refuse a pair whose tokens mean different things: perplexities and answer lengths would not compare.

    Args:
        model, baseline: directories or hub ids; None = the demo model.
    Raises:
        DataError: the vocabularies differ.
        ModelError: one of them is no directory and no hub id.
    """
    ours, theirs = map(resolve, (model, baseline))
    one, other = _vocabulary(ours), _vocabulary(theirs)
    # A tokenizer that cannot be read says nothing against the pair, so only known vocabularies are compared.
    if one is None or other is None or one == other:
        return
    raise DataError(
        f"the baseline {theirs} has another vocabulary ({len(other)} tokens) than {ours} ({len(one)}); compare a model "
        "with the one it was made from"
    )


def other_arithmetic(name: str) -> str:
    """The arithmetic that shows how much of a difference is noise: bfloat16, or float32 for a bfloat16 original."""
    return "float32" if name == "bfloat16" else "bfloat16"


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Token ids by text; None where tokenizer.json is missing or keeps them in a way not known here."""
    try:
        vocabulary: Any = read_object(folder / "tokenizer.json", DataError)["model"]["vocab"]
        if isinstance(vocabulary, list):  # unigram models: tokens with their scores, in order
            return {token: index for index, (token, *_) in enumerate(vocabulary)}
        return dict(vocabulary)
    except (DataError, ValueError, LookupError, TypeError):
        return None
