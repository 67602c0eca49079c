"""Measure decision margins: how clearly a model prefers the original's token where an answer decides what comes next.

The original writes answers; then both models score the tokens of these answers (teacher forcing). At a token that
decides what happens next, such as the start of a tool call or the end of a turn, the margin is the logit of this token
minus the logit of the best alternative. arXiv 2608.06564 found that margins shrink before benchmark scores fall. KL on
these answers, by position, shows whether errors accumulate while decoding.
"""

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain

import torch
from torch import Tensor

from quantkit.distributed import share_out
from quantkit.evaluate.behaviour import RATES, BehaviourPlan, Trace, scores
from quantkit.evaluate.fidelity import check_vocabulary, distances, entropies, paired_batches, paired_logits
from quantkit.evaluate.work_sharing import Meter, Say, shared_length
from quantkit.results.behaviour import DECISIONS, MIN_PROMPTS, BehaviourResult, ExampleRecord, MarginRecord
from quantkit.results.statistics.paired import compare_pairs
from quantkit.results.statistics.summary import percentile
from quantkit.runtime.dialects.dialect import Dialect
from quantkit.runtime.llm import LLM

_QUARTERS = 4
_EXAMPLES, _CHARACTERS = 6, 600
_JSON_TOKEN = re.compile(r'[{}\[\]":,\s]*[{}\[\]"][{}\[\]":,\s]*')
_REFUSES = re.compile(
    r"\W*((I('| a)?m )?(really |very )?sorry|I('m| am) (not able|unable|not comfortable)"
    r"|I (can't|cannot|won't|will not|don't have)|Unfortunately|As an AI|It('s| is) (not|important))",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A token of an answer that decides what happens next.

    Args:
        at: position of the token in the answer.
        kind: a key of `DECISIONS`.
        same: tokens that express the same decision. The answer's token is one of them, unless `against` is set.
        against: whether the answer decided against all tokens in `same`, so that its own token is not among them.
    """

    at: int
    kind: str
    same: tuple[int, ...]
    against: bool = False

    def margin(self, logits: Tensor) -> float:
        """Return the largest logit of the tokens in `same` minus the largest logit of all other tokens.

        If `against` is set, return this difference with the opposite sign.

        Args:
            logits: logits from which the token was chosen, (V,); log-probabilities give the same margin.
        """
        index = torch.tensor(self.same)
        gap = logits[index].max() - logits.index_fill(0, index, -math.inf).max()
        return float(-gap if self.against else gap)


class DecisionFinder:
    """Finds the tokens in the original's answers that decide what happens next; see `Decision` and `DECISIONS`.

    Args:
        llm: the original, which provides the tokenizer and the end tokens.
        dialect: form in which the original writes tool calls and thinking.
    """

    def __init__(self, llm: LLM, dialect: Dialect) -> None:
        self._dialect = dialect
        self._ends = tuple(llm.model.eos_ids)
        self._token_text = cache(lambda token: llm.tokenizer.decode([token], skip_special_tokens=False))
        start = self._dialect.start
        self._start: tuple[int, ...] = ()  # the first token of a call
        if start:
            self._start = (llm.tokenizer(start, add_special_tokens=False)["input_ids"][0],)

    def find(self, trace: Trace) -> list[Decision]:
        """Return the decisions in one answer."""
        texts = [self._token_text(token) for token in trace.token_ids[: len(trace.token_ids) - trace.ended]]
        text, starts = "".join(texts), [0, *accumulate(map(len, texts))]
        thinking = self._dialect.thinking[1]
        kinds = [("thinking", text.index(thinking))] if thinking and thinking in text else []
        begin = self._answer(trace, text)
        tools = trace.question.prompt.tools
        spans = [(begin + at, begin + end) for at, end in self._dialect.call_spans(text[begin:])] if tools else []
        kinds += [("tool", at) for at, _ in spans]
        kinds += self._of_prompt(trace, text, texts, starts, spans)
        positions = [(kind, bisect_right(starts, at) - 1) for kind, at in kinds]
        decisions = [
            Decision(at=at, kind=kind, same=(trace.token_ids[at],)) for kind, at in positions if at < len(texts)
        ]
        if trace.ended:
            last = trace.token_ids[-1]
            decisions.append(Decision(at=len(texts), kind="end", same=tuple({last, *self._ends})))
        first = bisect_right(starts, begin) - 1
        declines = tools and self._start and not spans
        # An empty answer, whose first token is the end token, also decides against a call.
        if declines and first < len(trace.token_ids):
            decisions.append(Decision(at=first, kind="no_tool", same=self._start, against=True))
        return decisions

    def _answer(self, trace: Trace, text: str) -> int:
        """Return the index in `text` at which the answer begins, after the thinking."""
        return len(text) - len(self._dialect.answer(text, is_thinking=trace.question.is_thinking))

    def _of_prompt(
        self, trace: Trace, text: str, texts: Sequence[str], starts: Sequence[int], spans: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[str, int]]:
        """Yield (kind, index in `text`) of each decision that depends on the prompt: JSON syntax, options, refusals."""
        expect, begin = trace.question.prompt.expect, self._answer(trace, text)
        if expect.json_ is not None:
            spans = [*spans, (begin, len(text))]
        for at, token_text in zip(starts, texts, strict=False):
            if any(low <= at < high for low, high in spans) and _JSON_TOKEN.fullmatch(token_text):
                yield "json", at
        after = [(at, token_text.strip()) for at, token_text in zip(starts, texts, strict=False) if at >= begin]
        picked = next((at for at, token_text in after if token_text in (expect.options or ())), None)
        if picked is not None:
            yield "option", picked
        if expect.refusal and _REFUSES.match(text[begin:].replace("\u2019", "'")):
            yield "refusal", begin


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredTrace:
    """One answer, scored by both models.

    Args:
        number: position of the prompt in its file, see `Question`.
        kl: KL(original || model) at each token, nats.
        entropy: entropy of the original's distribution at each token, nats.
        margins: (kind, original's margin, model's margin) of each decision for which the original's margin is positive.
    """

    number: int
    kl: tuple[float, ...]
    entropy: tuple[float, ...]
    margins: tuple[tuple[str, float, float], ...]


def score_traces(
    llm: LLM, original: LLM, plan: BehaviourPlan, traces: Sequence[Trace], say: Say | None = None
) -> list[ScoredTrace]:
    """Let both models score the original's answers; each model reads the prompts in its own chat template.

    Args:
        llm, original: the model and its original, with the same vocabulary.
        plan: the model's behaviour test, with prompts in the model's chat template.
        traces: the original's answers, see `sample_answers`. Answers to prompts that are not in `plan` are skipped.
        say: callback for progress.
    Raises:
        ModelError: the vocabularies differ.
    """
    check_vocabulary(llm, original)
    finder = DecisionFinder(original, plan.dialect)
    prompts = {question.number: question.ids for question in plan.questions}
    traces = [trace for trace in traces if trace.question.number in prompts]
    # The last token is scored, but no model reads it.
    theirs = tuple((*trace.question.ids, *trace.token_ids)[:-1] for trace in traces)
    ours = tuple((*prompts[trace.question.number], *trace.token_ids)[:-1] for trace in traces)
    groups = list(paired_batches(original, llm, theirs, ours))
    ends = list(accumulate(map(len, groups)))
    meter = Meter(say, "groups of answers", list(map(len, groups)))

    def score(number: int) -> list[ScoredTrace]:
        end = ends[number]
        own = slice(end - len(groups[number]), end)
        scorers = [_TraceScorer(finder, trace) for trace in traces[own]]
        counts = [len(trace.token_ids) for trace in traces[own]]
        for index, reference, value in paired_logits(original, llm, groups[number], ours[own], counts):
            scorers[index].add(reference, value)
            del reference, value  # otherwise their memory would be kept while the next rows are computed
        meter.reach(number + 1)
        return [scorer.result() for scorer in scorers]

    return list(chain.from_iterable(share_out(range(len(groups)), score)))


class _TraceScorer:
    """Compares both models' logits for one answer; the logits arrive in parts."""

    def __init__(self, finder: DecisionFinder, trace: Trace) -> None:
        self._number, self._decisions = trace.question.number, finder.find(trace)
        self._kl: list[float] = []
        self._entropy: list[float] = []
        self._margins: list[tuple[str, float, float]] = []

    @torch.inference_mode()
    def add(self, reference: Tensor, value: Tensor) -> None:
        """Compare the models at the next t tokens of the answer.

        Args:
            reference, value: logits of the original and of the model, (t, V).
        """
        start = len(self._kl)
        for each in self._decisions:
            if start <= each.at < start + len(reference):
                before, after = (each.margin(logits[each.at - start]) for logits in (reference, value))
                if before > 0:  # leave out tokens that sampling drew although the original preferred another
                    self._margins.append((each.kind, before, after))
        self._kl += distances(reference, value).kl.tolist()
        self._entropy += entropies(reference)

    def result(self) -> ScoredTrace:
        return ScoredTrace(
            number=self._number, kl=tuple(self._kl), entropy=tuple(self._entropy), margins=tuple(self._margins)
        )


def compare_behaviour(
    llm: LLM,
    original: LLM,
    plan: BehaviourPlan,
    traces: tuple[Sequence[Trace], Sequence[Trace]],
    say: Say | None = None,
) -> BehaviourResult:
    """Compare a model with its original on the original's answers.

    Args:
        llm, original: the model and its original.
        plan: the model's behaviour test; see `score_traces`.
        traces: the original's answers, and the model's answers to the same prompts with the same seeds.
        say: callback for progress.
    """
    scored = score_traces(llm, original, plan, traces[0], say)
    kl = [(value, _QUARTERS * at // plan.max_tokens) for each in scored for at, value in enumerate(each.kl)]
    entropies = [value for each in scored for value in each.entropy]
    limits = tuple(percentile(entropies, 100 * quarter / _QUARTERS) for quarter in range(1, _QUARTERS))
    by_entropy = [(value, bisect_right(limits, entropy)) for (value, _), entropy in zip(kl, entropies, strict=True)]
    return BehaviourResult(
        prompts=plan.name,
        num_prompts=len(plan.questions),
        num_seeds=plan.num_seeds,
        num_left_out=plan.num_left_out,
        max_tokens=plan.max_tokens,
        dialect=plan.dialect.name,
        num_tokens=len(kl),
        mean_kl=math.fsum(value for value, _ in kl) / len(kl),
        quarter_kl=_quarters(kl),
        entropy_kl=_quarters(by_entropy),
        entropy_limits=limits,
        margins=margin_records(scored),
        examples=_examples(plan, traces),
    )


def _quarters(values: Sequence[tuple[float, int]]) -> tuple[float | None, ...]:
    """Return the mean value of each quarter, from (value, quarter) pairs; None for a quarter without values."""
    members = [[value for value, quarter in values if quarter == number] for number in range(_QUARTERS)]
    return tuple(math.fsum(each) / len(each) if each else None for each in members)


def margin_records(scored: Sequence[ScoredTrace]) -> tuple[MarginRecord, ...]:
    """Summarize the margins of each kind of decision.

    The statistics treat prompts as samples, because decisions of one prompt are not independent.
    """
    members: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for trace in scored:
        for kind, before, after in trace.margins:
            members[kind][trace.number].append((before, after))
    return tuple(_margin_record(kind, list(members[kind].values())) for kind in DECISIONS if kind in members)


def _margin_record(kind: str, prompts: Sequence[Sequence[tuple[float, float]]]) -> MarginRecord:
    columns = tuple([math.fsum(pair[side] for pair in pairs) / len(pairs) for pairs in prompts] for side in (0, 1))
    result = compare_pairs([(columns[0], columns[1])])
    enough = len(prompts) >= MIN_PROMPTS
    decided = [after for pairs in prompts for _, after in pairs]
    return MarginRecord(
        kind=kind,
        num_decisions=len(decided),
        num_prompts=len(prompts),
        baseline=result.baseline,
        value=result.value,
        flips=sum(after <= 0 for after in decided) / len(decided),
        ratio=result.ratio if enough else None,
        low=result.ratio_low if enough else None,
        high=result.ratio_high if enough else None,
    )


def _examples(plan: BehaviourPlan, traces: tuple[Sequence[Trace], Sequence[Trace]]) -> tuple[ExampleRecord, ...]:
    """Return examples of prompts that the two models answer differently.

    Prompts with a worse answer of the model come first; among them, the kinds of loss take turns. The other prompts
    follow, those with the earliest difference first.
    """
    examples: list[tuple[int, int, ExampleRecord]] = []
    seen: dict[str, int] = defaultdict(int)
    answers = {trace.index: trace for trace in traces[1]}
    for before in traces[0]:
        after = answers.get(before.index, before)
        if before.token_ids == after.token_ids:
            continue
        good, now = scores(plan, before), scores(plan, after)
        # Worse: a good property was lost, or a bad one is new.
        worse = (name for name, was in reversed(good.items()) if was != now.get(name) and was == RATES[name][0])
        lost = next(worse, "")
        parted = shared_length(before.text, after.text)
        seen[lost] += 1
        record = ExampleRecord(
            prompt=_shortened(before.question.prompt.question),
            original=_shortened(before.text),
            model=_shortened(after.text),
            parted=parted,
            lost=lost,
        )
        examples.append((seen[lost] if lost else len(traces[0]), parted, record))
    return tuple(record for *_, record in sorted(examples, key=lambda each: each[:2])[:_EXAMPLES])


def _shortened(text: str) -> str:
    return text if len(text) <= _CHARACTERS else f"{text[: _CHARACTERS - 3]}..."
