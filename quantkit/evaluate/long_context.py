"""Measure long-context retrieval: the model must repeat one fact that stands somewhere in a long text.

The texts have several lengths, and the fact stands at several depths. Prompts run like ordinary requests, so generation
reads keys and values from the configured KV cache, quantized or not. For models of the demo language, the fact is an
entry of a ledger, and clauses fill the text. For all other models, it is a pass key, and sentences about grass fill the
text.

The test measures retrieval, not reasoning. Source: Mohtashami and Jaggi 2023, Landmark Attention (pass key); Liu et al.
2023, Lost in the Middle (depths).
"""

import hashlib
import json
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import DataError
from quantkit.evaluate.loading import Evaluated
from quantkit.evaluate.work_sharing import Say, generate_in_turns
from quantkit.results import SampleRecord, TaskResult
from quantkit.runtime.types import SamplingParams

ANSWER_TOKENS = 12
LEDGER_PAIRS = 16
GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


@dataclass(frozen=True, kw_only=True, slots=True)
class Needle:
    """One question about one long text.

    Args:
        prompt: text and question; the answer follows directly.
        answer: text that the generated text must begin with.
        depth: relative position of the fact: 0 at the beginning, 1 at the end.
    """

    prompt: str
    answer: str
    depth: float


Writer = Callable[[random.Random, float, Callable[[str], bool]], Needle]


def long_context(
    llm: Evaluated,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    samples: int = 10,
    ledgers: Path | None = None,
    seed: int = 0,
    say: Say | None = None,
) -> tuple[TaskResult, ...]:
    """Measure the share of facts that a model finds, one result per length.

    Args:
        llm: model without running requests.
        lengths: lengths of prompts in tokens; filler text is added up to each length. Lengths that do not fit the
            model's context are skipped.
        depths: relative positions of the fact in the text, 0 to 1.
        samples: number of texts per length and depth.
        ledgers: file of recall items, for a model of the demo language; None = use pass keys.
        seed: seed of the texts.
        say: callback for progress.
    Raises:
        DataError: no length fits the context, a depth is outside 0 to 1, or there is no tokenizer.
    """
    if not depths:
        raise DataError("a long-context test needs at least one depth between 0 and 1, but depths is empty")
    wrong = [depth for depth in depths if not 0 <= depth <= 1]
    if wrong:
        raise DataError(f"depth {wrong[0]!r} of a long-context test is not between 0 and 1")
    if llm.tokenizer is None:
        raise DataError(f"{llm.path} has no usable tokenizer, and a long-context test needs one")
    longest = llm.capacity - ANSWER_TOKENS
    fitting = sorted({length for length in lengths if length <= longest})
    if not fitting:
        raise DataError(
            f"none of the lengths {', '.join(map(str, lengths))} fits: a prompt for {llm.path} may have at most "
            f"{longest} tokens, because the context must hold the answer too"
        )
    name, write = ("passkey", write_passkey) if ledgers is None else ("ledger", ledger_writer(ledgers))
    return tuple(
        _ask(llm, f"{name}_{length}", list(_needles(llm, write, length, depths, samples, seed)), say)
        for length in fitting
    )


def _needles(
    llm: Evaluated, write: Writer, length: int, depths: Sequence[float], samples: int, seed: int
) -> Iterator[Needle]:
    tokenizer = llm.tokenizer
    for depth in depths:
        for sample in range(samples):
            # One generator per text: another length, depth or sample leaves all other texts as they are.
            rng = random.Random(f"{seed} {length} {depth} {sample}")
            # verbose=False: the tokenizer warns about every text that is longer than its nominal limit.
            yield write(rng, depth, lambda text: len(tokenizer(text, verbose=False)["input_ids"]) <= length)


def _ask(llm: Evaluated, task: str, needles: Sequence[Needle], say: Say | None) -> TaskResult:
    """Generate all answers and score them."""
    # The answer is complete at the first punctuation mark, so generating more would only take time.
    params = SamplingParams(max_tokens=ANSWER_TOKENS, stop=("\n", ".", ","))
    completions = generate_in_turns(llm, [needle.prompt for needle in needles], [params] * len(needles), say=say)
    records = tuple(
        SampleRecord(
            task=task,
            index=index,
            scores={"acc": float(completion.text.strip().startswith(needle.answer)), "depth": needle.depth},
            answer_tokens=None,  # the stop texts cut the answer off
            item_hash=hashlib.sha256(needle.prompt.encode()).hexdigest(),
            answer=completion.text,
        )
        for index, (needle, completion) in enumerate(zip(needles, completions, strict=True))
    )
    at_depth: dict[str, list[SampleRecord]] = {}
    for record in records:
        at_depth.setdefault(f"acc at depth {record.scores['depth']:g}", []).append(record)
    value = _accuracy(records)
    return TaskResult(
        task=task,
        metric="acc",
        value=value,
        # As lm-eval's standard error of a mean: the variance of 0/1 scores, with n - 1 in its denominator.
        stderr=(value * (1 - value) / max(1, len(records) - 1)) ** 0.5,
        num_samples=len(records),
        samples=records,
        others={name: _accuracy(members) for name, members in at_depth.items()},
    )


def _accuracy(records: Sequence[SampleRecord]) -> float:
    return sum(record.scores["acc"] for record in records) / len(records)


def write_passkey(rng: random.Random, depth: float, fits: Callable[[str], bool]) -> Needle:
    """Return a prompt with a pass key between as many sentences about grass as fit.

    Args:
        rng: random generator that draws the key.
        depth: relative position of the key.
        fits: function that says whether a text is short enough.
    """
    key = f"{rng.randrange(10000, 100000)}"
    head = "There is important information hidden in a lot of irrelevant text. Find it and remember it.\n"
    fact = f"The pass key is {key}. Remember it. {key} is the pass key. "

    def text(count: int) -> str:
        before = round(depth * count)
        return f"{head}{GRASS * before}{fact}{GRASS * (count - before)}\nWhat is the pass key? The pass key is"

    return Needle(prompt=text(_most(lambda count: fits(text(count)))), answer=key, depth=depth)


def ledger_writer(items: Path) -> Writer:
    """Return a function that writes prompts in the demo language: a ledger between clauses that fill the text.

    Args:
        items: file of recall items, one JSON object per line; the writer reuses their ledgers and clauses.
    """
    contexts = [json.loads(line)["context"].splitlines() for line in items.read_text(encoding="utf-8").splitlines()]
    ledgers = [lines[0].removeprefix("Ledger: ").removesuffix(".").split(", ") for lines in contexts]
    clauses = [line for lines in contexts for line in lines[1:-1]]

    def write(rng: random.Random, depth: float, fits: Callable[[str], bool]) -> Needle:
        pairs = rng.sample(rng.choice(ledgers), LEDGER_PAIRS)
        # The question answers one pair, which shows the form of an answer, and asks for the other.
        shown, asked = rng.sample(pairs, 2)
        key, answer = asked.split(" ", 1)
        filler = rng.sample(clauses, len(clauses))

        def text(count: int) -> str:
            before = round(depth * count)
            lines = [*filler[:before], f"Ledger: {', '.join(pairs)}.", *filler[before:count]]
            return "\n".join([*lines, f"Recall: {shown}, {key}"])

        return Needle(prompt=text(_most(lambda count: fits(text(count)))), answer=answer, depth=depth)

    return write


def _most(fits: Callable[[int], bool]) -> int:
    """Return the largest count for which `fits` is true, found by binary search; 0 if there is none."""
    high = 1
    while fits(high):
        high *= 2
    # Length grows with the count, so the outcomes are sorted and can be bisected.
    return bisect_left(range(1, high), True, key=lambda count: not fits(count))
