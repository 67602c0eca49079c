"""Records of a behaviour test: how clearly a model prefers the original's decisions, and answers of both models."""

from dataclasses import dataclass

from quantkit.results._record import Record

MIN_PROMPTS = 8
"""A kind of decision gets gates and an interval if the original makes such decisions in at least this many prompts."""

DECISIONS = {
    "tool": "starts a tool call",
    "no_tool": "calls no tool",
    "thinking": "ends its thinking",
    "end": "ends its turn",
    "json": "writes JSON syntax",
    "option": "picks an option",
    "refusal": "begins a refusal",
}
"""What the original does in each kind of decision, keyed by the name of the kind. `no_tool` counts only if the prompt
offers tools. JSON syntax means brackets, braces and quotes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MarginRecord(Record):
    """Margins of one kind of decision: the logit of the original's token minus the logit of the best alternative.

    Args:
        kind: a key of `DECISIONS`.
        num_decisions: number of decisions in which the original chose its likeliest token; other decisions are ignored.
        num_prompts: number of prompts with such decisions; the statistics treat prompts as independent items.
        baseline, value: mean margin of the original and of the model, nats; all prompts have the same weight.
        ratio, low, high: value / baseline and its 95 % interval; None with fewer than `MIN_PROMPTS` prompts.
        flips: share of the decisions in which the model's likeliest token differs from the original's.
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
        parted: number of characters before the first difference between the two answers.
        lost: name of the rate by which the model's answer is worse than the original's: "valid_calls" if the model no
            longer calls tools validly, "loop_rate" if only its answer loops, ...; empty if the answer is not worse.
    """

    prompt: str
    original: str
    model: str
    parted: int
    lost: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class BehaviourResult(Record):
    """Result of a behaviour test: how a model and its original differ when they answer the same chat prompts.

    KL and margins are measured on the answers that the original wrote.

    Args:
        prompts: name of the set of prompts.
        num_prompts: number of prompts.
        num_seeds: number of answers to each prompt; each answer has its own seed.
        num_left_out: number of prompts left out because the chat template refuses them or they exceed the context.
        max_tokens: maximum number of tokens of an answer.
        dialect: dialect in which the model writes tool calls: the name of a file in `quantkit.runtime.dialects`.
        num_tokens: number of tokens in the original's answers.
        mean_kl: mean KL(original || model) over these tokens, nats.
        quarter_kl: mean KL of the tokens in each quarter of `max_tokens`; None for a quarter that no answer reaches.
        entropy_kl: mean KL in each quarter of the tokens, with the tokens sorted by the entropy of the original's
            distribution.
        entropy_limits: entropies that separate the quarters of `entropy_kl`, nats.
        margins: one record for each kind of decision that the original makes.
        examples: pairs of answers that differ; pairs in which the model's answer is worse come first.
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
        """Number of the original's decisions, of all kinds."""
        return sum(record.num_decisions for record in self.margins)

    @property
    def flips(self) -> float | None:
        """Share of all decisions in which the model's likeliest token differs from the original's; None if there are
        none.
        """
        count = self.num_decisions
        return sum(record.flips * record.num_decisions for record in self.margins) / count if count else None
