"""Drafts from a second, cheaper model; see `speculation`."""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from quantkit.errors import RequestError
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.cache.pages import PagePool
from quantkit.runtime.config import EngineConfig
from quantkit.runtime.engine.batch_builder import ScheduledChunk
from quantkit.runtime.engine.runner import Runner
from quantkit.runtime.engine.speculation import Proposer, num_useful
from quantkit.runtime.model.model import Model
from quantkit.runtime.sampling import sample
from quantkit.runtime.sequence import PageHolder, Sequence


def check_draft(vocab_size: int, target: int) -> None:
    """Refuse a draft model with a different vocabulary size.

    Raises:
        RequestError: the sizes differ.
    """
    if vocab_size != target:
        raise RequestError(
            f"the draft model's vocabulary has {vocab_size} tokens, but the model's has {target}; use a draft model "
            "with the same vocabulary, such as a compressed copy of the model"
        )


@dataclass(kw_only=True, slots=True, eq=False)
class _Shadow(PageHolder):
    """The draft model's copy of a sequence, with its own pages.

    Args:
        base: number of tokens of the sequence before the drafts.
        fed: drafts that the draft model has computed after these tokens.
    """

    base: int = 0
    fed: list[int] = field(default_factory=list)

    def sync(self, ids: list[int]) -> None:
        """Keep only computed tokens that are part of the sequence: drop the first rejected draft and all after it."""
        right = self.base
        for token in self.fed:
            if right >= len(ids) or ids[right] != token:
                break
            right += 1
        # The last token never counts as computed: it is fed again, because its logits start the next drafts.
        self.num_computed = min(self.num_computed, right if self.fed else self.num_computed, len(ids) - 1)
        self.fed = []


class DraftModelProposer(Proposer):
    """Proposes tokens with a second, cheaper model of the same vocabulary, which has its own cache and pages.

    Args:
        model: the draft model.
        cache: KV cache of the draft model.
        config: engine settings; the token budget also limits how many prompt tokens the draft model computes per step,
            so long prompts take several steps.
        num_pages: pages in the draft model's cache.
        vocab_size: vocabulary size of the target model.
    Raises:
        RequestError: the vocabularies differ.
    """

    def __init__(
        self, model: Model, cache: KVCache | None, config: EngineConfig, *, num_pages: int, vocab_size: int
    ) -> None:
        check_draft(model.vocab_size, vocab_size)
        self.model = model
        self._config = config
        self._pool = PagePool(num_pages)
        self._rows = list(range(config.max_sequences))
        self._shadows: dict[int, _Shadow] = {}
        self._runner = Runner(model, cache, config, max_pages=num_pages)

    def propose(self, sequences: Many[Sequence], count: int) -> None:
        ready = self._caught_up(sequences, count)
        while ready:
            logits = self._runner.step([chunk for _, _, chunk in ready])
            # With the sequence's random keys: draft and target then draw with the same variates and agree more often.
            tokens = sample(logits, [(sequence, len(sequence.drafts)) for sequence, _, _ in ready])
            step, ready = ready, []
            for (sequence, shadow, chunk), token in zip(step, tokens, strict=True):
                shadow.num_computed = chunk.start + len(chunk.tokens)
                sequence.drafts.append(token)
                if len(sequence.drafts) < num_useful(sequence, count):
                    # The last draft is not fed, because no draft follows it.
                    shadow.fed.append(token)
                    ready.append((sequence, shadow, ScheduledChunk(shadow, [token], shadow.num_computed, 1)))

    def _caught_up(self, sequences: Many[Sequence], count: int) -> list[tuple[Sequence, _Shadow, ScheduledChunk]]:
        """Return the sequences that the draft model can now continue, each with the chunk of tokens it has not read.

        If a sequence has more unread tokens than the token budget allows, compute a part of them now and do not return
        the sequence.
        """
        ready, lagging, budget = [], [], self._config.token_budget
        for sequence in sequences:
            shadow = self._shadow(sequence, len(sequence.ids) + num_useful(sequence, count))
            if shadow is None or num_useful(sequence, count) < 1 or budget < 1:
                continue
            missing = len(sequence.ids) - shadow.num_computed
            fed = sequence.ids[shadow.num_computed : shadow.num_computed + min(missing, budget)]
            budget -= len(fed)
            if len(fed) == missing:
                shadow.base = len(sequence.ids)
                ready.append((sequence, shadow, ScheduledChunk(shadow, fed, shadow.num_computed, 1)))
            else:
                lagging.append(ScheduledChunk(shadow, fed, shadow.num_computed, 0))
                shadow.num_computed += len(fed)
        if lagging:
            self._runner.step(lagging)
        return ready

    def _shadow(self, sequence: Sequence, num_tokens: int) -> _Shadow | None:
        """Return the sequence's shadow with pages for this many tokens.

        Return None if the draft model's pool or context is too small for them.
        """
        shadow = self._shadows.get(sequence.id)
        if shadow is None:
            shadow = self._shadows[sequence.id] = _Shadow(id=sequence.id, row=self._rows.pop())
        shadow.sync(sequence.ids)
        missing = self._config.pages_for(num_tokens) - len(shadow.pages)
        if missing > self._pool.num_free or num_tokens > self.model.max_length:
            # No sequence is preempted for drafts. This one goes on without drafts, and may get drafts again later.
            self.forget(sequence.id)
            return None
        if missing > 0:
            shadow.pages.extend(self._pool.allocate(missing))
        return shadow

    def forget(self, sequence_id: int) -> None:
        shadow = self._shadows.pop(sequence_id, None)
        if shadow is not None:
            self.model.forget(sequence_id)
            self._pool.release(shadow.pages)
            self._rows.append(shadow.row)

    def check_integrity(self, alive: set[int]) -> None:
        self._pool.check_integrity(shadow.pages for shadow in self._shadows.values())
        assert self._shadows.keys() <= alive, f"draft pages of ended requests: {self._shadows.keys() - alive}"
