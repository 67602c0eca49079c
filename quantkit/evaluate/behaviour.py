"""Measure how chat models behave when they sample answers, as rates such as the share of answers that loop.

To compare two models, both answer the same prompts with the same seeds, each in its own chat template. Rules, not a
judge model, check whether answers loop, end, call tools validly and have the requested form. Module `decision_margins`
compares a compressed model with its original on answers that the original wrote.
"""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.errors import DataError, RequestError
from quantkit.evaluate.loading import Evaluated
from quantkit.evaluate.prompt_sets import Prompt, digest_text
from quantkit.evaluate.work_sharing import Say, generate_in_turns
from quantkit.results import SampleRecord, TaskResult
from quantkit.runtime.dialects.dialect import Dialect, find_dialect
from quantkit.runtime.types import SamplingParams

TEMPERATURE, TOP_P = 0.7, 0.95
_LOOP_TOKENS, _LOOP_TIMES = 24, 3
_OTHER_SCRIPT = 0.1
# Indices of answers differ by this much from round to round, and seeds of answers by this much from plan to plan.
_MOST_PROMPTS, _MOST_ANSWERS = 100_000, 10_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A prompt, formatted with a model's chat template.

    Args:
        number: position of the prompt in its file. Two models' answers to prompts with the same number are compared.
        prompt: the prompt.
        ids: token ids of the prompt, formatted with the template.
        is_thinking: whether the template has opened a thinking section, so that the answer begins with thinking.
    """

    number: int
    prompt: Prompt
    ids: tuple[int, ...]
    is_thinking: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class BehaviourPlan:
    """Prompts and settings of a model's behaviour test.

    Args:
        name: name of the set of prompts.
        questions: prompts that can be used with the model.
        num_left_out: number of prompts left out, because the template refuses them or they exceed the context.
        num_seeds: number of answers to each prompt.
        max_tokens: maximum number of tokens of an answer.
        seed: seed from which the seeds of all answers are computed.
        dialect: form in which the model writes tool calls and thinking.
    """

    name: str
    questions: tuple[Question, ...]
    num_left_out: int
    num_seeds: int
    max_tokens: int
    seed: int
    dialect: Dialect


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One answer of a model to a prompt.

    Args:
        index: number of the answer; two models' answers to the same prompt with the same seed have the same number.
        question: the prompt that was answered.
        token_ids: tokens of the answer, including the end token, if there is one.
        text: text of the answer, with special tokens but without the end token.
        ended: whether the model ended the answer; False = the answer was cut off at the maximum length.
    """

    index: int
    question: Question
    token_ids: tuple[int, ...]
    text: str
    ended: bool


def has_chat_template(llm: Evaluated) -> bool:
    """Whether a model has a tokenizer with a chat template."""
    return bool(getattr(llm.tokenizer, "chat_template", None))


def make_plan(
    llm: Evaluated, prompts: Sequence[Prompt], *, name: str, count: int | None, seeds: int, max_tokens: int, seed: int
) -> BehaviourPlan:
    """Plan a behaviour test with all prompts that a model's chat template accepts and that fit the model's context.

    Args:
        llm: the model.
        prompts: prompts to format, in order.
        name: name of the set of prompts.
        count: maximum number of prompts, taken from the first usable prompts; None = all.
        seeds: number of answers to each prompt.
        max_tokens, seed: see `BehaviourPlan`.
    Raises:
        RequestError: the model has no chat template.
        DataError: no prompt can be used; the message gives the reason for the last prompt.
    """
    if not has_chat_template(llm):
        raise RequestError(
            f"{llm.path} has no chat template, which a behaviour test needs; leave the test out with --no-behaviour"
        )
    dialect = find_dialect(str(llm.tokenizer.chat_template))
    questions: list[Question] = []
    reasons: list[str] = []
    for number, prompt in enumerate(prompts):
        if len(questions) == count:
            break
        try:
            text = llm.chat_text(prompt.chat, tools=prompt.functions or None)
            if prompt.tools and text == llm.chat_text(prompt.chat):
                raise RequestError("the chat template does not tell the model about the tools")
        except RequestError as error:
            reasons.append(str(error))
            continue
        ids = llm.encode_filled(text)
        if len(ids) + max_tokens > llm.capacity:
            reasons.append(
                f"a prompt of {len(ids)} tokens and an answer of {max_tokens} tokens exceed the model's limit of "
                f"{llm.capacity} tokens"
            )
            continue
        began = dialect.begins_thinking(text)
        questions.append(Question(number=number, prompt=prompt, ids=tuple(ids), is_thinking=began))
    if not questions:
        raise DataError(
            f"none of the prompts of {name} can be used with {llm.path} (the last one: {reasons[-1]}); give other "
            "--prompts, or leave the test out with --no-behaviour"
        )
    return BehaviourPlan(
        name=name,
        questions=tuple(questions),
        num_left_out=len(reasons),
        num_seeds=seeds,
        max_tokens=max_tokens,
        seed=seed,
        dialect=dialect,
    )


def sample_answers(llm: Evaluated, plan: BehaviourPlan, say: Say | None = None) -> list[Trace]:
    """Let a model answer every prompt once per seed.

    An answer's seed depends only on the plan's seed and the answer's index, so it is the same for two models.
    """
    asked = [(turn * _MOST_PROMPTS + each.number, each) for turn in range(plan.num_seeds) for each in plan.questions]
    params = [
        SamplingParams(
            max_tokens=plan.max_tokens, temperature=TEMPERATURE, top_p=TOP_P, seed=plan.seed * _MOST_ANSWERS + index
        )
        for index, _ in asked
    ]
    completions = generate_in_turns(llm, [question.ids for _, question in asked], params, say=say)
    traces = []
    for (index, question), completion in zip(asked, completions, strict=True):
        ids, ended = completion.token_ids, completion.finish_reason == "stop"
        text = llm.tokenizer.decode(ids[: len(ids) - ended], skip_special_tokens=False)
        traces.append(Trace(index=index, question=question, token_ids=ids, text=text, ended=ended))
    return traces


def is_loop(trace: Trace) -> bool:
    """Whether an answer was cut off, and ends in one sequence repeated at least 3 times, over at least 24 tokens."""
    ids, size = trace.token_ids, len(trace.token_ids)
    if trace.ended:
        return False
    for period in range(1, size // _LOOP_TIMES + 1):
        same = next((at for at in range(size - period) if ids[-1 - at] != ids[-1 - at - period]), size - period)
        if same + period >= max(_LOOP_TIMES * period, _LOOP_TOKENS):
            return True
    return False


def has_other_script(answer: str, prompt: Prompt) -> bool:
    """Whether more than a tenth of an answer's letters belong to scripts that the prompt does not use."""
    own = set(_scripts("".join(message.content or "" for message in prompt.messages)))
    scripts = _scripts(answer)
    foreign = sum(count for script, count in scripts.items() if script not in own)
    return foreign > _OTHER_SCRIPT * scripts.total() > 0


def _scripts(text: str) -> Counter[str]:
    """Return the number of letters of each script, keyed by the script's Unicode name: LATIN, CYRILLIC, CJK, ..."""
    return Counter(unicodedata.name(each, "?").split()[0] for each in text if each.isalpha())


# Rates, keyed by name: whether higher is better, and a function that scores an answer. The function returns None if the
# rate does not apply to the prompt.
Count = Callable[[Dialect, Trace, str], bool | None]
RATES: dict[str, tuple[bool, Count]] = {
    "unended": (False, lambda dialect, trace, answer: not trace.ended),
    "loop_rate": (False, lambda dialect, trace, answer: is_loop(trace)),
    "empty": (False, lambda dialect, trace, answer: not answer.strip()),
    "other_script": (False, lambda dialect, trace, answer: has_other_script(answer, trace.question.prompt)),
    "right_format": (True, lambda dialect, trace, answer: trace.question.prompt.expect.is_met(answer)),
    "valid_calls": (
        True,
        lambda dialect, trace, answer: (
            trace.question.prompt.is_valid(dialect.calls(answer)) if trace.question.prompt.tools else None
        ),
    ),
}


def measure_rates(plan: BehaviourPlan, traces: Sequence[Trace]) -> tuple[TaskResult, ...]:
    """Compute the rates in `RATES`; return one result for each rate that applies to at least one answer."""
    counted: dict[str, list[SampleRecord]] = {name: [] for name in RATES}
    for trace in traces:
        for name, score in scores(plan, trace).items():
            # Store each answer and its length once, in the records of one rate, not in those of every rate.
            kept: dict[str, Any] = {}
            if name == "unended":
                kept = {"answer_tokens": len(trace.token_ids), "answer": trace.text}
            digest = hashlib.sha256(digest_text(trace.question.prompt).encode()).hexdigest()[:16]
            record = SampleRecord(task=name, index=trace.index, scores={"rate": float(score)}, item_hash=digest, **kept)
            counted[name].append(record)
    return tuple(_rate(name, records) for name, records in counted.items() if records)


def scores(plan: BehaviourPlan, trace: Trace) -> dict[str, bool]:
    """Return the scores of one answer, keyed by the name of the rate; only rates that apply are included."""
    answer = plan.dialect.answer(trace.text, is_thinking=trace.question.is_thinking)
    counts = {name: count(plan.dialect, trace, answer) for name, (_, count) in RATES.items()}
    return {name: score for name, score in counts.items() if score is not None}


def _rate(name: str, records: Sequence[SampleRecord]) -> TaskResult:
    value = sum(record.scores["rate"] for record in records) / len(records)
    return TaskResult(
        task=name,
        metric="rate",
        value=value,
        stderr=(value * (1 - value) / max(1, len(records) - 1)) ** 0.5,
        num_samples=len(records),
        higher_is_better=RATES[name][0],
        samples=tuple(records),
    )
