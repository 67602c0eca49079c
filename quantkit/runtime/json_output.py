"""Output that must be JSON of a schema: which tokens may come next, by llguidance.

Source: https://github.com/guidance-ai/llguidance
"""

from typing import Any

import numpy as np

from quantkit.errors import RequestError, first_line

# Between JSON's parts: room for indentation, and no more, since models that are forced may write blanks without end.
_WHITESPACE = {"whitespace_pattern": r"[ \n\t]{0,20}"}

Array = np.ndarray[Any, Any]


class JsonConstraint:
    """One request's place in its schema. *Mutable*.

    Args:
        matcher: llguidance's, at the beginning.
        vocab_size: of the logits.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def add(self, token: int) -> None:
        """The next token was chosen."""
        self._matcher.try_consume_tokens([token])

    def allowed(self, drafts: list[int]) -> Array:
        """Tokens that may follow the text so far and these drafts, (V,) bool."""
        count = self._matcher.try_consume_tokens(drafts) if drafts else 0
        if count < len(drafts):
            # Before this place another token is chosen than the draft that cannot be: what comes here is not used.
            self._matcher.rollback(count)
            return np.ones(self._vocab_size, dtype=bool)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.zeros(self._vocab_size, dtype=bool)  # a model may have more logits than its tokenizer has tokens
        known = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        mask[: len(known)] = known
        if count:
            self._matcher.rollback(count)
        return mask


class JsonSchemas:
    """Schemas to constraints, for one tokenizer.

    Args:
        tokenizer: a fast one of transformers.
        vocab_size: of the logits.
        eos_ids: tokens that end a text, of which one comes when the JSON is complete.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, eos_ids
        self._vocabulary: Any = None

    def start(self, schema: str) -> JsonConstraint:
        """A request's constraint.

        Args:
            schema: JSON text.
        Raises:
            RequestError: it is no schema that can be followed, or llguidance is missing.
        """
        try:
            import llguidance
            import llguidance.hf
        except ModuleNotFoundError:
            raise RequestError("json_schema needs llguidance; pip install 'quantkit[serve]'") from None
        try:
            if self._vocabulary is None:
                # Looks at every token: a second for the largest vocabularies, once.
                eos = list(self._eos_ids) or None
                self._vocabulary = llguidance.hf.from_tokenizer(self._tokenizer, eos_token=eos)
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_WHITESPACE)
            matcher = llguidance.LLMatcher(self._vocabulary, grammar)
            if problem := matcher.get_error():
                raise ValueError(problem)
        except Exception as error:  # whatever it raises on a schema or a tokenizer that it does not understand
            raise RequestError(f"json_schema cannot be followed: {first_line(error)}") from None
        return JsonConstraint(matcher, self._vocab_size)
