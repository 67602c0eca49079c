"""A request on its way through the engine, and its token counts.

The state of a request, drawn below its token ids (pages of 4, `num_computed` = 6, one token to feed):

    ids            [p0 p1 p2 p3 | p4 p5 g0]      p prompt, g generated
    in the cache    ------------------           positions 0 .. num_computed - 1
    to feed                         --           ids[num_computed:], one token when decoding
    drafts                              d0 d1    proposed, not part of ids until verified
"""

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quantkit.results import RequestTiming
from quantkit.runtime.detokenizer import TextStream
from quantkit.runtime.json_output import JsonConstraint
from quantkit.runtime.types import Completion, FinishReason, PromptScores, SamplingParams, TokenLogprob

Array = np.ndarray[Any, Any]


class TokenHistory:
    """Distinct tokens of a sequence, and how often each occurs in its output.

    Args:
        prompt: prompt token ids.
    """

    def __init__(self, prompt: list[int]) -> None:
        self._index: dict[int, int] = {}
        self._tokens, self._counts = array("q"), array("f")
        for token in prompt:
            self._index_of(token)

    def add(self, token: int) -> None:
        """Count one more output token."""
        self._counts[self._index_of(token)] += 1

    def seen(self, drafts: list[int]) -> tuple[Array, Array]:
        """Return the distinct tokens (H,) int64 and their output counts (H,) float32, counting the drafts as output."""
        size, tokens, counts = len(self._index), np.array(self._tokens), np.array(self._counts)
        if not drafts:
            return tokens, counts
        new = [token for token in dict.fromkeys(drafts) if token not in self._index]
        tokens = np.concatenate([tokens, np.array(new, dtype=np.int64)])
        counts = np.concatenate([counts, np.zeros(len(new), dtype=np.float32)])
        added = {token: size + index for index, token in enumerate(new)}
        for token in drafts:
            counts[self._index.get(token, added.get(token))] += 1
        return tokens, counts

    def _index_of(self, token: int) -> int:
        index = self._index.setdefault(token, len(self._index))
        if index == len(self._tokens):
            self._tokens.append(token)
            self._counts.append(0)
        return index


@dataclass(kw_only=True, slots=True, eq=False)
class PageHolder:
    """Owner of pages: a sequence, or its shadow in a draft model. *Mutable*.

    Args:
        id: number that never changes; sequences with smaller numbers arrived earlier.
        row: row in the page table and residual windows; -1 while waiting.
        pages: numbers of its pages, in the order of the tokens.
        num_table_entries: number of pages already written to the sequence's row of the page table.
        num_evicted: number of tokens that each head has evicted.
        num_computed: number of tokens that the model has computed.
        adapter: name of the adapter that its tokens are computed with; None = the base model.
    """

    id: int
    row: int = -1
    pages: list[int] = field(default_factory=list)
    num_table_entries: int = 0
    num_evicted: int = 0
    num_computed: int = 0
    adapter: str | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class Sequence(PageHolder):
    """A request on its way through the engine. *Mutable*; only the engine and its parts may change it.

    Args:
        ids: prompt and generated tokens.
        num_prompt: number of prompt tokens.
        params: sampling parameters.
        limit: number of tokens, prompt included, at which the request ends.
        seed: seed of the request's random draws.
        stop_ids: tokens that end the request.
        arrived: arrival time, on the clock `time.perf_counter`.
    """

    ids: list[int]
    num_prompt: int
    params: SamplingParams
    limit: int
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    arrived: float = 0.0
    text: TextStream | None = None
    history: TokenHistory | None = None
    constraint: JsonConstraint | None = None
    scores: PromptScores | None = None
    # Kept through preemptions: the tokens of a full page are final, and so is its key.
    page_keys: list[bytes] = field(default_factory=list)
    num_published: int = 0
    # Slots of the tokens that each head evicted, keyed by the number of tokens computed until then, and by layer. Kept
    # as long as the sequence may be preempted: when it is computed again, it evicts the same tokens.
    evictions: dict[int, dict[int, Array]] = field(default_factory=dict)
    num_cached: int = 0
    num_preemptions: int = 0
    drafts: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    deltas: list[str] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        """Number of known tokens that are still to be computed."""
        return len(self.ids) - self.num_computed

    @property
    def num_kept(self) -> int:
        """Number of computed tokens that are in the cache."""
        return self.num_computed - self.num_evicted

    @property
    def draws(self) -> bool:
        """Whether the request will generate more tokens than the prompt and the output so far."""
        return self.limit > len(self.ids)

    @property
    def is_decoding(self) -> bool:
        """Whether the next step computes one known token and chooses the token after it."""
        return self.limit > len(self.ids) == self.num_computed + 1

    @property
    def num_needed(self) -> int:
        """Number of tokens that the pages must hold: all known tokens, plus one new token if the limit allows it."""
        return min(len(self.ids) + 1, self.limit)

    @property
    def first_row(self) -> int:
        """Position of the first token whose logits are needed.

        Pages from this position on cannot come from the prefix cache, which holds no logits.
        """
        scoring = self.params.scoring
        if scoring is None or len(self.ids) > self.num_prompt:
            return len(self.ids) - 1
        return 0 if scoring.read_logits else self.num_prompt - 1 - scoring.num_tokens

    def forget_evictions(self) -> None:
        """Forget all evictions except the last."""
        self.evictions = {n: slots for n, slots in self.evictions.items() if n >= self.num_computed}

    def complete(self, reason: FinishReason, now: float) -> Completion:
        """Return the completion of the request, ended at time `now`."""
        return Completion(
            prompt_token_ids=tuple(self.ids[: self.num_prompt]),
            token_ids=tuple(self.ids[self.num_prompt :]),
            text="".join(self.deltas),
            finish_reason=reason,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            scores=self.scores if reason in ("stop", "length") else None,  # otherwise some are missing
            timing=RequestTiming(
                request_id=self.id,
                prompt_tokens=self.num_prompt,
                arrived_s=self.arrived,
                token_s=tuple(self.token_times),
                finished_s=now,
                cached_tokens=self.num_cached,
            ),
            num_preemptions=self.num_preemptions,
        )
