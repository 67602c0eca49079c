"""Prompts as token ids: what every engine asks of a checkpoint's tokenizer and chat template."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit.checkpoints.tokenizer import load_tokenizer
from quantkit.errors import ModelError, RequestError, first_line
from quantkit.untrusted import bounded

Messages = Sequence[dict[str, Any]]


class Prompts:
    """A checkpoint's tokenizer, where it has one that can be used.

    Args:
        path: directory of the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokenizer: Any = None
        self._no_tokenizer = ""
        # Reentrant, as an engine's holders ask for what takes it too.
        self._lock = threading.RLock()  # of the tokenizer, and of what an engine adds
        try:
            self.tokenizer = load_tokenizer(path)
        except ModelError as error:
            self._no_tokenizer = str(error)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with what the tokenizer puts in front; an empty text becomes BOS.

        Raises:
            RequestError: the directory has no usable tokenizer, the text is not Unicode, or it is empty and there is
                no BOS.
        """
        if ids := self._tokenized(text):
            return ids
        if self.tokenizer.bos_token_id is None:
            raise RequestError("the prompt is empty and the tokenizer has no BOS token to begin with; give some text")
        return [self.tokenizer.bos_token_id]

    def encode_chat(self, messages: Messages, **variables: Any) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for the answer.

        Args:
            messages: [{"role": "user", "content": "..."}, ...].
            variables: what else the template may use, such as `tools`.
        Raises:
            RequestError: there is no chat template, or it refuses the messages.
        """
        tokenizer = self.need_tokenizer()
        if not getattr(tokenizer, "chat_template", None):
            raise RequestError(f"{self.path} has no chat template; it is not a chat model: give a plain prompt")
        try:
            # A template comes with the checkpoint; the sandbox it runs in bounds neither its time nor its memory.
            with bounded():
                options = {"add_generation_prompt": True, **variables, "tokenize": False}
                text = tokenizer.apply_chat_template(list(messages), **options)
        except Exception as error:  # templates are programs and fail in ways of their own
            raise RequestError(f"the chat template refuses these messages: {first_line(error)}") from error
        # The template writes BOS itself; the tokenizer would add a second one.
        return self._tokenized(text, add_special_tokens=False)

    def _tokenized(self, text: str, **options: bool) -> list[int]:
        tokenizer = self.need_tokenizer()
        try:
            text.encode()
        except UnicodeEncodeError:  # from a terminal or a pipe may come bytes that are no text, kept as half characters
            raise RequestError("the prompt is not UTF-8; convert it, for instance with iconv -t utf-8") from None
        with self._lock:  # not verbose: that a prompt is too long is for the engine to say
            return list(tokenizer(text, verbose=False, **options)["input_ids"])

    def need_tokenizer(self) -> Any:
        """The tokenizer.

        Raises:
            RequestError: the directory has none that can be used.
        """
        if self.tokenizer is None:
            raise RequestError(f"{self.path} has no usable tokenizer ({self._no_tokenizer}); give token ids")
        return self.tokenizer
