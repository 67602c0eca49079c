"""How many tokens a sequence may have, and what is said when it asks for more."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.errors import RequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Tokens that fit.

    Args:
        capacity: of one sequence in the KV pool and in the context.
        max_length: the context alone.
    """

    capacity: int
    max_length: int

    def check(self, num_prompt: int, max_tokens: int | None) -> None:
        """Refuse a request that can never fit.

        Args:
            num_prompt: its tokens.
            max_tokens: new tokens asked for; None = as many as fit.
        Raises:
            RequestError: the message has the number that would fit.
        """
        if not num_prompt:
            raise RequestError("the prompt is empty; give at least one token")
        pooled = self.capacity < self.max_length
        where = f"the KV pool holds {self.capacity} tokens" if pooled else f"the context is {self.capacity} tokens"
        left = self.capacity - num_prompt
        if left < 1:
            raise RequestError(
                f"the prompt has {num_prompt} tokens and {where}; at most {self.capacity - 1} fit beside a new token"
            )
        if max_tokens is not None and max_tokens > left:
            raise RequestError(
                f"a prompt of {num_prompt} tokens and max_tokens {max_tokens} need {num_prompt + max_tokens},"
                f" but {where}; max_tokens can be {left} at most"
            )
