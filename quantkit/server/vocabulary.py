"""Tokens as the texts that answers with log-probabilities show."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from quantkit.runtime.detokenizer import Detokenizer, decoder


class Vocabulary:
    """A tokenizer's tokens, one by one.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._text_of = decoder(tokenizer)
        # Alone a token may lose its leading space; behind another it keeps it.
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._shown_before = len(self._whole(self._before))
        self.piece = lru_cache(1 << 16)(self._piece)

    def text(self, ids: Sequence[int]) -> str:
        """Text of tokens; special ones are skipped."""
        return self._text_of(list(ids))

    def stream(self, context: Sequence[int]) -> Detokenizer:
        """Text of further tokens after these."""
        return Detokenizer(self._text_of, list(context))

    def _whole(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _piece(self, token: int) -> str:
        """A token's own text; of a part of a character, the vocabulary's name for it."""
        text = self._whole([*self._before, token])[self._shown_before :]
        if "\ufffd" in text or not text:
            return str(self._tokenizer.convert_ids_to_tokens(token))
        return text
