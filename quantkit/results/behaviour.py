"""Records of a behaviour test: how firmly a model takes the original's decisions, and texts of both side by side."""

from dataclasses import dataclass

from quantkit.results._record import Record

MIN_PROMPTS = 8
"""Prompts in which the original must take a kind of decision before a gate or an interval can be about it."""

DECISIONS = {
    "tool": "starts a tool call",
    "no_tool": "calls no tool",
    "thinking": "ends its thinking",
    "end": "ends its turn",
    "json": "writes JSON syntax",
    "option": "picks an option",
    "refusal": "begins a refusal",
}
"""Kinds of decisions and what the original does in them; `no_tool` counts where tools are offered, and JSON syntax is
brackets, braces and quotes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MarginRecord(Record):
    """Margins of one kind of decision: logit of the original's token less that of the best alternative.

    Args:
        kind: a key of `DECISIONS`.
        num_decisions: decisions where the original's token was its likeliest; the others count nowhere.
        num_prompts: prompts that these decisions are in, which are the independent items.
        baseline, value: mean margin of the original and of the model, nats; each prompt counts once.
        ratio, low, high: value / baseline and its 95 % interval; None with fewer than `MIN_PROMPTS` prompts.
        flips: share of the decisions where the model's likeliest token is another one.
    """

    kind: str
    num_decisions: int
    num_prompts: int
    baseline: float
    value: float
    flips: float
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleRecord(Record):
    """Answers of both models to one prompt with the same seed.

    Args:
        prompt: last message of the conversation.
        original, model: the answers.
        parted: number of characters that both begin with.
        lost: what the original's answer had and the model's has not, e.g. "valid_calls"; empty if nothing.
    """

    prompt: str
    original: str
    model: str
    parted: int
    lost: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class BehaviourResult(Record):
    """Comparison of a model with its original on the original's own answers.

    Args:
        prompts: name of the set of prompts.
        num_prompts, num_seeds: each prompt is answered once per seed.
        num_left_out: prompts that the chat template or the context cannot take.
        max_tokens: most tokens of an answer.
        dialect: how the model writes tool calls, a file of `quantkit.runtime.dialects`.
        num_tokens: tokens of the original's answers.
        mean_kl: mean KL(original || model) of these tokens, nats.
        quarter_kl: mean KL by quarter of `max_tokens`; None where no answer is that long.
        entropy_kl: mean KL by quarter of the tokens, ordered by the entropy of the original's distribution.
        entropy_limits: entropy that separates these quarters, nats.
        margins: one record per kind of decision that occurs.
        examples: answers side by side, those that lost something first.
    """

    prompts: str
    num_prompts: int
    num_seeds: int
    max_tokens: int
    dialect: str
    num_tokens: int
    mean_kl: float
    num_left_out: int = 0
    quarter_kl: tuple[float | None, ...] = ()
    entropy_kl: tuple[float | None, ...] = ()
    entropy_limits: tuple[float, ...] = ()
    margins: tuple[MarginRecord, ...] = ()
    examples: tuple[ExampleRecord, ...] = ()

    @property
    def num_decisions(self) -> int:
        """Number of decisions of all kinds."""
        return sum(record.num_decisions for record in self.margins)

    @property
    def flips(self) -> float | None:
        """Share of all decisions that the model takes otherwise; None without decisions."""
        count = self.num_decisions
        return sum(record.flips * record.num_decisions for record in self.margins) / count if count else None
