"""Arithmetic of a KV-cache budget: how many tokens of a sequence are kept, and when pages are evicted. Torch-free.

After n tokens, whole pages of S tokens are evicted until the next token fits into the budget of B tokens:

    evicted(n) = S * ceil(max(0, n + 1 - B) / S)        kept(n) = n - evicted(n) <= B - 1

Pages are evicted only at the end of a prompt chunk (multiples of `chunk`, and the prompt's end) and after every
generated token. These points depend only on positions, so a sequence loses the same number of tokens whether it is
computed alone, in a batch or a second time. A chunk attends to itself and to all tokens kept before it.
"""

from dataclasses import dataclass
from itertools import count

from quantkit.errors import RequestError

SINK_TOKENS = 4
"""Number of first tokens that are never evicted, because attention needs them (Xiao et al. 2023, StreamingLLM)."""

SMALLEST_PAGE = 16
"""Minimum tokens per page that GPU kernels support."""

RECENT_TOKENS = 32
"""Number of newest tokens that no policy may evict; a twelfth of the budget if that is less."""


def kept_tokens(budget: int | float | None, length: int) -> int:
    """Return how many tokens a sequence of `length` tokens keeps in the cache.

    Args:
        budget: number of tokens (int), share of the length (float), or None = all tokens.
        length: tokens of the sequence.
    """
    if budget is None:
        return length
    return min(length, budget if isinstance(budget, int) else round(budget * length))


def fitting_page_size(tokens: int, page_size: int, window: int = 0) -> int:
    """Halve the page size until the budget is valid for it, but not below 16 tokens per page; return the result.

    Args:
        tokens: the budget.
        page_size: preferred tokens per page; a size below 16 is not changed.
        window: largest sliding window of any layer; 0 = no layer has a window.
    """
    while tokens < _least_tokens(page_size, window) and page_size // 2 >= SMALLEST_PAGE:
        page_size //= 2
    return page_size


def _least_tokens(page_size: int, window: int) -> int:
    """Return the smallest valid budget: it fits the sinks, the newest tokens, an open page, and rounding to pages."""
    beside = (_first_candidate(page_size) + 2) * page_size
    return next(tokens for tokens in count(beside) if tokens >= _recent_tokens(tokens, window) + beside)


def _recent_tokens(budget: int, window: int) -> int:
    return max(window, min(RECENT_TOKENS, budget // 12))


def _first_candidate(page_size: int) -> int:
    return -(-SINK_TOKENS // page_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVBudget:
    """Limit on the tokens of each sequence in the cache.

    Args:
        tokens: tokens of the budget, B.
        page_size: tokens per page, S.
        chunk: tokens of a prompt chunk; pages are evicted at multiples of this number.
        window: largest sliding window of any layer, whose tokens are never evicted; 0 = no layer has a window.
    Raises:
        RequestError: the budget is too small for the tokens that are never evicted.
    """

    tokens: int
    page_size: int
    chunk: int
    window: int = 0

    def __post_init__(self) -> None:
        least = _least_tokens(self.page_size, self.window)
        if self.tokens >= least:
            return
        window = f" and a sliding window of {self.window}" if self.window else ""
        raise RequestError(
            f"kv_budget {self.tokens} is too small for the tokens that are never evicted; with pages of "
            f"{self.page_size} tokens{window}, give at least {least}"
        )

    @property
    def recent(self) -> int:
        """Number of newest tokens that are never evicted, at least the sliding window."""
        return _recent_tokens(self.tokens, self.window)

    @property
    def first_candidate(self) -> int:
        """Index of the first page that may be evicted; earlier pages hold the sinks."""
        return _first_candidate(self.page_size)

    @property
    def peak(self) -> int:
        """Maximum number of a sequence's tokens in the cache, reached during a prompt chunk."""
        return self.tokens - 1 + self.chunk

    def surplus(self, kept: int) -> int:
        """Return the number of pages to evict from a sequence with `kept` cached tokens so that one more token fits."""
        return max(0, -(-(kept + 1 - self.tokens) // self.page_size))

    def until_due(self, computed: int, kept: int, prompt: int, chunk: int) -> int:
        """Return the number of tokens, at least one, to compute until the next eviction.

        Args:
            computed: number of tokens computed so far.
            kept: number of computed tokens that are in the cache.
            prompt: number of prompt tokens.
            chunk: tokens per prompt chunk of this sequence.
        """
        due = computed + max(1, self.tokens - kept)
        if due <= prompt:
            due = min(-(-due // chunk) * chunk, prompt)
        return due - computed

    def is_due(self, computed: int, kept: int, prompt: int, chunk: int) -> bool:
        """Whether to evict pages now; for the arguments, see `until_due`."""
        return kept >= self.tokens and (computed >= prompt or computed % chunk == 0)
