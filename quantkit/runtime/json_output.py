"""Output constrained to a JSON schema or a grammar: llguidance decides which tokens may come next.

Source: https://github.com/guidance-ai/llguidance
"""

import json
import subprocess
import threading
from functools import lru_cache
from typing import Any

import numpy as np

from quantkit.distribution import install_command
from quantkit.errors import RequestError, first_line
from quantkit.machine.system import python

# Whitespace between the parts of JSON: enough for indentation, but limited, because models may write it without end.
WHITESPACE = {"whitespace_pattern": r"[ \n\t]{0,20}"}

_MOST_CHARACTERS = 1 << 18
_MOST_KEPT = 64
_TRIAL_SECONDS, _TRIAL_BYTES = 1, 1 << 30
# Program of the child process: it compiles the schema or grammar on its stdin for a vocabulary of bytes. The slow part
# of compiling does not depend on the vocabulary.
_TRIAL = """
import json, sys
from quantkit.machine.system import limit_process
limit_process(cpu_seconds=SECONDS, address_bytes=BYTES)
import llguidance
kind, text, overrides = json.load(sys.stdin)
matchers = llguidance.LLMatcher
try:
    if kind == "grammar":
        grammar = matchers.grammar_from_lark(text)
    else:
        grammar = matchers.grammar_from_json_schema(text, overrides=overrides)
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    matcher.compute_bitmask()
except ValueError:
    pass  # `_compile` raises this error again and reports it
"""

Array = np.ndarray[Any, Any]


class JsonConstraint:
    """Progress of one request through its schema or grammar. *Mutable*.

    Args:
        matcher: llguidance's matcher at the start of the schema or grammar.
        vocab_size: number of logits per row.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def add(self, token: int) -> None:
        """Record that this token was chosen, so that `allowed` refers to the text with this token."""
        self._matcher.try_consume_tokens([token])

    def allowed(self, drafts: list[int]) -> Array:
        """Return a mask (V,) bool of the tokens that may follow the text so far and these drafts."""
        count = self._matcher.try_consume_tokens(drafts) if drafts else 0
        if count < len(drafts):
            # One of the drafts is not allowed, so another token is chosen in its place, and this mask is not used.
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
    """Compiles schemas and grammars for one tokenizer. Thread-safe. *Mutable*: it caches recently compiled ones.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: number of logits per row.
        eos_ids: end tokens; after a complete text, one of these tokens must follow.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, eos_ids
        self._lock = threading.Lock()  # for the vocabulary; never held while a schema is compiled
        self._vocabulary: Any = None
        self._compiled, self._tried = lru_cache(_MOST_KEPT)(self._compile), lru_cache(_MOST_KEPT)(self._try)

    def start(self, kind: str, text: str) -> JsonConstraint:
        """Return the constraint of a new request.

        Args:
            kind: what `text` is, `json_schema` or `grammar`.
            text: a JSON schema as JSON, or a grammar in llguidance's dialect of Lark.
        Raises:
            RequestError: the schema or grammar is invalid or unsupported, or llguidance is missing.
        """
        return JsonConstraint(self._compiled(kind, text).deep_copy(), self._vocab_size)

    def try_out(self, kind: str, text: str, of_bytes: str | None = None) -> None:
        """Compile a client's schema or grammar, first in a child process because llguidance has no time or memory
        limit.

        Args:
            kind, text: see `start`.
            of_bytes: the same grammar without token ids, which the child does not know; None = `text` has no token ids.
        Raises:
            RequestError: compiling takes too long or too much memory, or `start` refuses the text.
        """
        if len(text) > _MOST_CHARACTERS:
            raise RequestError(
                f"{kind} has {len(text)} characters, more than the limit of {_MOST_CHARACTERS}; shorten it"
            )
        self._tried(kind, text if of_bytes is None else of_bytes)
        self.start(kind, text)

    def _try(self, kind: str, schema: str) -> None:
        code = _TRIAL.replace("SECONDS", str(_TRIAL_SECONDS)).replace("BYTES", str(_TRIAL_BYTES))
        text = json.dumps([kind, schema, WHITESPACE])
        try:
            # More seconds than the limit of CPU time: the child waits for its turn while all cores are busy.
            child = subprocess.run(
                python(f"exec({code!r})"), input=text.encode(), capture_output=True, timeout=5 * _TRIAL_SECONDS
            )
            is_quick = child.returncode == 0 or b"ModuleNotFoundError" in child.stderr
        except subprocess.TimeoutExpired:
            is_quick = False
        if not is_quick:
            raise RequestError(
                f"{kind} is too complex: compiling it takes more than {_TRIAL_SECONDS} s or {_TRIAL_BYTES >> 30} "
                "GiB; remove costly parts, such as a large multipleOf"
            )

    def _compile(self, kind: str, text: str) -> Any:
        """Return llguidance's matcher at the start of a schema or grammar."""
        try:
            import llguidance
            import llguidance.hf
        except ModuleNotFoundError:
            raise RequestError(f"{kind} needs llguidance; run {install_command('serve')}") from None
        try:
            with self._lock:
                if self._vocabulary is None:
                    # Reads every token, but only once: this takes a second for the largest vocabularies.
                    eos = list(self._eos_ids) or None
                    self._vocabulary = llguidance.hf.from_tokenizer(self._tokenizer, eos_token=eos)
            if kind == "grammar":
                grammar = llguidance.LLMatcher.grammar_from_lark(text)
            else:
                grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=WHITESPACE)
            matcher = llguidance.LLMatcher(self._vocabulary, grammar)
            if problem := matcher.get_error():
                raise ValueError(problem)
        except Exception as error:  # whatever llguidance raises on a schema or tokenizer that it does not support
            raise RequestError(f"{kind} is not supported: {first_line(error)}") from None
        return matcher
