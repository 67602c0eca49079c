"""How many tokens a sequence may have, and what is said when it asks for more."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.errors import RequestError
from quantkit.runtime.config import EngineConfig


def context_length(config: EngineConfig, model_length: int) -> int:
    """Tokens of a sequence, whatever the memory: as asked, else what the model can.

    Raises:
        RequestError: more than the model can.
    """
    if config.max_length is not None and config.max_length > model_length:
        raise RequestError(f"max_length is {config.max_length}, but the model's context is {model_length} tokens")
    return config.max_length or model_length


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """Tokens that fit.

    Args:
        num_tokens: of one sequence in the KV pool and in the context.
        max_length: the context alone.
    """

    num_tokens: int
    max_length: int

    @classmethod
    def of(cls, config: EngineConfig, model_length: int, num_pages: int) -> Capacity:
        """What a model of this context length and a pool of so many pages hold."""
        length = context_length(config, model_length)
        return cls(num_tokens=min(length, num_pages * config.page_size), max_length=length)

    def check(self, num_prompt: int, max_tokens: int | None) -> None:
        """Refuse a request that can never fit.

        Args:
            num_prompt: its tokens.
            max_tokens: new tokens asked for; None = as many as fit, one at least.
        Raises:
            RequestError: the message has the number that would fit.
        """
        if not num_prompt:
            raise RequestError("the prompt is empty; give at least one token")
        pooled = self.num_tokens < self.max_length
        where = f"the KV pool holds {self.num_tokens} tokens" if pooled else f"the context is {self.num_tokens} tokens"
        left, least = self.num_tokens - num_prompt, 0 if max_tokens == 0 else 1
        if left < least:
            beside = " beside a new token" if least else ""
            raise RequestError(
                f"the prompt has {num_prompt} tokens and {where}; at most {self.num_tokens - least} fit{beside}"
            )
        if max_tokens is not None and max_tokens > left:
            raise RequestError(
                f"a prompt of {num_prompt} tokens and max_tokens {max_tokens} need {num_prompt + max_tokens},"
                f" but {where}; max_tokens can be {left} at most"
            )
