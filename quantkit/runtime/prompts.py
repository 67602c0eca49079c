"""Conversion of prompts to token ids with a checkpoint's tokenizer and chat template, for every engine."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit.checkpoints.tokenizer import load_tokenizer, render_chat
from quantkit.errors import ModelError, RequestError, first_line, is_panic

Messages = Sequence[dict[str, Any]]

# Number of characters to tokenize at a time when only the number of tokens matters.
_BLOCK, _SMALLEST_BLOCK = 1 << 16, 1 << 12
# Number of extra tokens that each piece of a text may have, because cutting the text splits words.
_CUT_TOKENS = 8


class Prompts:
    """Converts texts and conversations to token ids with a checkpoint's tokenizer, which may be missing.

    Args:
        path: directory of the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokenizer: Any = None
        self._no_tokenizer = ""
        # Reentrant: a thread that holds it may call methods that take it again.
        self._lock = threading.RLock()  # for the tokenizer, and for the engine of a subclass
        try:
            self.tokenizer = load_tokenizer(path)
        except ModelError as error:
            self._no_tokenizer = str(error)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt, including the tokenizer's prefix tokens; an empty text becomes BOS.

        Raises:
            RequestError: the directory has no usable tokenizer, the text is not Unicode, or it is empty and there is no
                BOS.
        """
        if ids := self._tokenized(text):
            return ids
        if self.tokenizer.bos_token_id is None:
            raise RequestError("the prompt is empty, and the tokenizer has no BOS token to use instead; give some text")
        return [self.tokenizer.bos_token_id]

    def encode_if_free(self, texts: Sequence[str]) -> list[list[int]] | None:
        """Return the token ids of prompts, see `encode`; None if another thread is using the tokenizer."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return [self.encode(text) for text in texts]
        finally:
            self._lock.release()

    def check_length(self, text: str, most: int) -> None:
        """Refuse a text with more tokens than allowed; encode no more of the text than this needs.

        Args:
            text: text of any length.
            most: maximum number of tokens allowed.
        Raises:
            RequestError: the text has more tokens.
        """
        if len(text) <= 4 * most:
            return
        size, count = min(_BLOCK, max(_SMALLEST_BLOCK, 4 * most)), 0
        for number, start in enumerate(range(0, len(text), size), 1):
            count += len(self._tokenized(text[start : start + size], add_special_tokens=False))
            if count > most + number * _CUT_TOKENS:
                raise RequestError(
                    f"the prompt has {len(text)} characters and more tokens than the limit of {most}; shorten it"
                )

    def encode_chat(self, messages: Messages, **variables: Any) -> list[int]:
        """Return the token ids of a conversation in the chat template, ready for the answer; see `chat_text`."""
        return self.encode_filled(self.chat_text(messages, **variables))

    def encode_filled(self, text: str) -> list[int]:
        """Return the token ids of a filled chat template, which already contains BOS."""
        return self._tokenized(text, add_special_tokens=False)

    def chat_text(self, messages: Messages, **variables: Any) -> str:
        """Return a conversation in the model's chat template, ready for the answer.

        Args:
            messages: [{"role": "user", "content": "..."}, ...].
            variables: further variables of the template, such as `tools`.
        Raises:
            RequestError: there is no chat template, or it refuses the messages.
        """
        tokenizer = self.need_tokenizer()
        if not getattr(tokenizer, "chat_template", None):
            raise RequestError(f"{self.path} has no chat template, so it is not a chat model; give a plain prompt")
        try:
            return render_chat(tokenizer, messages, **{"add_generation_prompt": True, **variables})
        except Exception as error:  # templates are programs and may raise anything
            raise RequestError(f"the chat template refuses these messages: {first_line(error)}") from error

    def _tokenized(self, text: str, **options: bool) -> list[int]:
        tokenizer = self.need_tokenizer()
        try:
            text.encode()
        except UnicodeEncodeError:  # bytes from a terminal or pipe that are not UTF-8 become lone surrogates
            raise RequestError("the prompt is not UTF-8; convert it, for instance with iconv -t utf-8") from None
        with self._lock:  # not verbose: the engine reports prompts that are too long
            try:
                return list(tokenizer(text, verbose=False, **options)["input_ids"])
            except BaseException as error:  # a pattern may give up, and Rust's panics are not of class Exception
                if not is_panic(error):
                    raise
                raise RequestError(f"the tokenizer fails on this text: {first_line(error)}") from error

    def need_tokenizer(self) -> Any:
        """Return the tokenizer.

        Raises:
            RequestError: the directory has no usable tokenizer.
        """
        if self.tokenizer is None:
            raise RequestError(f"{self.path} has no usable tokenizer ({self._no_tokenizer}); give token ids")
        return self.tokenizer
