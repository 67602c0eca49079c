"""Number of pages in the KV pool, chosen before allocation, and the longest sequence that it allows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantkit.errors import RequestError
from quantkit.kernels.layouts import Layout, page_bytes, pages_for_budget, residual_bytes
from quantkit.machine.devices import free_bytes
from quantkit.models.kv_budget import KVBudget
from quantkit.quantities import byte_size, parse_bytes
from quantkit.runtime.config import EngineConfig

_SHARE = {
    "cpu": 0.5,
    "cuda": 0.8,
}  # share of free memory for the pool by default; activations need the remaining memory
_STATELESS_TOKENS = 2**31  # size of a pool that only counts tokens: the model keeps keys and values itself


def size_pool(layouts: Sequence[Layout], config: EngineConfig, model_length: int, device: torch.device) -> int:
    """Return the number of pages in the pool: `config.num_pages`, or else as many as the sequences can fill and the
    memory holds.

    Args:
        layouts: layouts of all layers, including a draft model's; empty if the model keeps its own keys and values.
        config: settings; `num_pages` overrides `memory`, which covers the pool and the residual windows.
        model_length: the maximum number of tokens per sequence that the model supports.
        device: device of the pool.
    Raises:
        RequestError: the memory is too small for one page, or for one sequence of the requested length; the message has
            the numbers.
    """
    length = config.context_length(model_length)
    budget = config.budget_tokens(length)
    # Sequences exceed their budget only by the prompt chunks of one step, which share its token budget.
    kept, beside = (length, 0) if budget is None else (budget, config.pages_for(min(config.token_budget, length)))
    num_pages = config.max_sequences * config.pages_for(kept) + beside
    if config.num_pages is not None or not layouts:
        return config.num_pages or min(num_pages, _STATELESS_TOKENS // config.page_size)
    if config.memory is None:
        memory = int(free_bytes(device) * _SHARE.get(device.type, 0.5))
    else:
        memory = parse_bytes(config.memory)
    num_pages = min(num_pages, pages_for_budget(layouts, config.max_sequences, memory))
    # A length that the user names must fit; the model's own limit may be more than any memory holds.
    least, what = 1, "one page"
    if budget is not None:
        least, what = config.pages_for(budget) + 1, f"one sequence of {budget} tokens plus one page for prompts"
    elif config.max_length is not None:
        least, what = config.pages_for(config.max_length), f"one sequence of {config.max_length} tokens"
    if num_pages < least:
        needed = least * page_bytes(layouts) + residual_bytes(layouts, config.max_sequences)
        raise RequestError(
            f"a KV pool of {byte_size(memory)} is too small for {what}, which needs {byte_size(needed)} "
            f"(pages of {config.page_size} tokens, {byte_size(page_bytes(layouts))} each); "
            "give more memory, a smaller max_length or max_sequences, or a smaller KV type"
        )
    return num_pages


def kv_budget(config: EngineConfig, model_length: int, num_pages: int, window: int) -> KVBudget | None:
    """Return the KV budget per sequence; None if no sequence can exceed it.

    Args:
        config: settings.
        model_length: the maximum number of tokens per sequence that the model supports.
        num_pages: pages in the pool.
        window: size of the widest sliding window; 0 = no layer has one.
    Raises:
        RequestError: the budget is smaller than the tokens that are never evicted, or too large for the pool.
    """
    length = config.context_length(model_length)
    tokens = config.budget_tokens(length)
    if tokens is None:
        return None
    pooled = num_pages * config.page_size
    if pooled - tokens < config.page_size:
        raise RequestError(
            f"kv_budget is {tokens} tokens, but the KV pool holds {pooled} tokens, and one page must stay free for "
            f"prompts; give a budget of {max(0, pooled - config.page_size)} or less, or a larger pool"
        )
    # While a chunk is computed, all its tokens exceed the budget, so they must fit into the rest of the pool.
    chunk = min(config.token_budget if config.chunked else length, pooled - tokens)
    return KVBudget(tokens=tokens, page_size=config.page_size, chunk=chunk, window=window)


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """Token limits of a sequence.

    Args:
        num_tokens: maximum number of tokens of one sequence that fit in both the KV pool and the context.
        max_length: context length in tokens.
    """

    num_tokens: int
    max_length: int

    @classmethod
    def of(cls, config: EngineConfig, model_length: int, num_pages: int, budget: KVBudget | None = None) -> "Capacity":
        """Return the token limits that follow from the settings, the model and the number of pages."""
        length = config.context_length(model_length)
        pooled = length if budget is not None else num_pages * config.page_size  # tokens over the budget are evicted
        return cls(num_tokens=min(length, pooled), max_length=length)

    def check(self, num_prompt: int, max_tokens: int | None) -> None:
        """Refuse a request that can never fit in the context and the KV pool.

        Args:
            num_prompt: prompt tokens.
            max_tokens: maximum number of new tokens; None = as many as fit, at least one.
        Raises:
            RequestError: the request is too long; the message says how many tokens fit.
        """
        if not num_prompt:
            raise RequestError("the prompt is empty; give at least one token")
        pooled = self.num_tokens < self.max_length
        where = f"the KV pool holds {self.num_tokens} tokens" if pooled else f"the context is {self.num_tokens} tokens"
        # A request that only scores its prompt draws nothing and needs no slot for a new token.
        left, least = self.num_tokens - num_prompt, 0 if max_tokens == 0 else 1
        if left < least:
            beside = ", to leave one for the output" if least else ""
            raise RequestError(
                f"the prompt has {num_prompt} tokens, but {where}; shorten the prompt to {self.num_tokens - least} "
                f"tokens or less{beside}"
            )
        if max_tokens is not None and max_tokens > left:
            raise RequestError(
                f"a prompt of {num_prompt} tokens and max_tokens {max_tokens} need {num_prompt + max_tokens} tokens, "
                f"but {where}; set max_tokens to {left} or less, or shorten the prompt"
            )
