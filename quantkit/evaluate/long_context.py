"""Measure long-context retrieval: the model must repeat facts from somewhere in a long text.

The kinds of texts, with their facts and questions, are:

    passkey      one pass key
    multikey     eight names with a pass key each; the question asks for one of them
    multivalue   eight pass keys, four of which belong to the same name; the question asks for these four
    variables    two chains of assignments (A = 1, B = A, ...); the question asks for all variables with one value
    words        a list of many words; the question asks for the three that occur far more often than the others

Sentences about grass fill the text, except in `words`. For models of the demo language, the fact is an entry of a
ledger, and clauses fill the text. The texts have several lengths. Prompts run like ordinary requests, so generation
reads keys and values from the configured KV cache, quantized or not.

The test measures retrieval, not reasoning. Source: Liu et al. 2023, Lost in the Middle (depths); Mohtashami and Jaggi
2023, Landmark Attention (pass key); Hsieh et al. 2024, RULER (the other four kinds, which are simplified here).
"""

import hashlib
import json
import math
import random
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import DataError
from quantkit.evaluate.loading import Evaluated
from quantkit.evaluate.tasks import LongContext
from quantkit.evaluate.work_sharing import Say, generate_in_turns
from quantkit.results import SampleRecord, TaskResult
from quantkit.runtime.types import SamplingParams

ANSWER_TOKENS, SEVERAL_TOKENS = 12, 96  # maximum generated tokens, for a single answer and for several
LEDGER_PAIRS = 16
GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
HEAD = "There is important information hidden in a lot of irrelevant text. Find it and remember it.\n"
_NAMES = (
    "amber birch cedar coral delta ember falcon ginger harbor indigo jasper kettle "
    "lemon maple nickel olive pepper quartz raven silver timber umber violet walnut"
)
NAMES = tuple(_NAMES.split())


@dataclass(frozen=True, kw_only=True, slots=True)
class Needle:
    """One question about one long text.

    Args:
        prompt: text and question; the answer follows directly.
        answers: a single text that the generated text must begin with, or several words that it must contain.
        wrong: wrong words; each one that the text contains cancels one right answer.
        depth: relative position of the only fact: 0 at the beginning, 1 at the end; None = several facts.
    """

    prompt: str
    answers: tuple[str, ...]
    wrong: tuple[str, ...] = ()
    depth: float | None = None

    def score(self, text: str) -> float:
        """Return the share of the answers that a generated text gives, minus the share of wrong words; at least 0."""
        if len(self.answers) == 1:
            return float(text.strip().startswith(self.answers[0]))
        words = set(re.findall(r"\w+", text.casefold()))
        right, wrong = (sum(word.casefold() in words for word in kind) for kind in (self.answers, self.wrong))
        return max(0, right - wrong) / len(self.answers)


Fits = Callable[[str], bool]
Writer = Callable[[random.Random, float, Fits], Needle]
"""Function that writes a text and a question, as long as allowed. Its arguments are a random generator, the relative
position of the fact (ignored if there are several), and a function that says whether a text is short enough.
"""


def write_passkey(rng: random.Random, depth: float, fits: Fits) -> Needle:
    """Write a text with one pass key, and ask for the key; see `Writer`."""
    key = _key(rng)
    fact = f"The pass key is {key}. Remember it. {key} is the pass key. "
    return _needle([fact], [depth], "What is the pass key? The pass key is", (key,), fits, depth)


def write_multikey(rng: random.Random, _: float, fits: Fits) -> Needle:
    """Write a text with a pass key for each of eight names, and ask for one of the keys; see `Writer`."""
    keys = {name: _key(rng) for name in rng.sample(NAMES, 8)}
    asked = rng.choice(list(keys))
    facts = [f"The pass key of {name} is {key}. " for name, key in keys.items()]
    question = f"What is the pass key of {asked}? The pass key of {asked} is"
    return _needle(facts, _positions(rng, len(facts)), question, (keys[asked],), fits)


def write_multivalue(rng: random.Random, _: float, fits: Fits) -> Needle:
    """Write a text with eight pass keys, and ask for the four that belong to one name; see `Writer`."""
    asked, *others = rng.sample(NAMES, 5)
    facts = [(name, _key(rng)) for name in (*[asked] * 4, *others)]
    rng.shuffle(facts)
    texts = [f"One of the pass keys of {name} is {key}. " for name, key in facts]
    question = f"What are the four pass keys of {asked}? The four pass keys of {asked} are"
    return _needle(
        texts, _positions(rng, len(texts)), question, tuple(key for name, key in facts if name == asked), fits
    )


def write_variables(rng: random.Random, _: float, fits: Fits) -> Needle:
    """Write a text with two chains of assignments, and ask for all variables with one value; see `Writer`."""
    names = ["".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)) for _ in range(8)]
    chains, value = (names[:4], names[4:]), _key(rng)
    facts: list[str] = []
    for chain, first in zip(chains, (value, _key(rng)), strict=True):
        sources = (first, *chain[:-1])
        facts += [f"VAR {name} = {source}. " for name, source in zip(chain, sources, strict=True)]
    # The chains take turns, and a variable is never used before its assignment.
    order = [fact for pair in zip(facts[:4], facts[4:], strict=True) for fact in pair]
    question = f"Find all four variables that have the value {value}. The four variables are"
    right, wrong = map(tuple, chains)
    return _needle(order, _positions(rng, len(order)), question, right, fits, wrong=wrong)


def write_words(rng: random.Random, _: float, fits: Fits) -> Needle:
    """Write a list of words, and ask for the three that occur most often; see `Writer`."""
    words = [first + second for first in NAMES for second in NAMES if first != second]
    rng.shuffle(words)
    common, others = words[:3], words[3:]
    seed = rng.randrange(1 << 32)

    def text(count: int) -> str:
        drawn = random.Random(seed)
        listed: list[str] = []
        for number in range(count):  # one common word per block spreads the common words over the list
            block = [common[number % 3], *drawn.sample(others, 9)]
            drawn.shuffle(block)
            listed += block
        return f"Remember which words of this list occur most often.\n{' '.join(listed)}\n{question}"

    question = "Which three words occur most often in the list? The three most common words are"
    return Needle(prompt=_filled(text, fits), answers=tuple(common))


WRITERS: dict[str, Writer] = {
    "passkey": write_passkey,
    "multikey": write_multikey,
    "multivalue": write_multivalue,
    "variables": write_variables,
    "words": write_words,
}


def ledger_writer(items: Path) -> Writer:
    """Return a function that writes prompts in the demo language: a ledger between clauses that fill the text.

    Args:
        items: file of recall items, one JSON object per line; the writer reuses their ledgers and clauses.
    """
    contexts = [json.loads(line)["context"].splitlines() for line in items.read_text(encoding="utf-8").splitlines()]
    ledgers = [lines[0].removeprefix("Ledger: ").removesuffix(".").split(", ") for lines in contexts]
    clauses = [line for lines in contexts for line in lines[1:-1]]

    def write(rng: random.Random, depth: float, fits: Fits) -> Needle:
        pairs = rng.sample(rng.choice(ledgers), LEDGER_PAIRS)
        # The question answers one pair, which shows the form of an answer, and asks for the other.
        shown, asked = rng.sample(pairs, 2)
        key, answer = asked.split(" ", 1)
        filler = rng.sample(clauses, len(clauses))

        def text(count: int) -> str:
            before = round(depth * count)
            lines = [*filler[:before], f"Ledger: {', '.join(pairs)}.", *filler[before:count]]
            return "\n".join([*lines, f"Recall: {shown}, {key}"])

        return Needle(prompt=_filled(text, fits), answers=(answer,), depth=depth)

    return write


def _key(rng: random.Random) -> str:
    return f"{rng.randrange(10000, 100000)}"


def _positions(rng: random.Random, count: int) -> list[float]:
    return sorted(rng.random() for _ in range(count))


def _needle(
    facts: Sequence[str],
    positions: Sequence[float],
    question: str,
    answers: tuple[str, ...],
    fits: Fits,
    depth: float | None = None,
    wrong: tuple[str, ...] = (),
) -> Needle:
    """Write a text with as many sentences about grass as fit, the facts among them, and the question at the end.

    The facts stand in the given order at these positions: 0 is the beginning of the sentences, 1 their end.
    """

    def text(count: int) -> str:
        before = [round(position * count) for position in positions]
        gaps = [after - start for start, after in zip((0, *before), (*before, count), strict=True)]
        parts = [GRASS * gap + fact for gap, fact in zip(gaps, (*facts, ""), strict=True)]
        return f"{HEAD}{''.join(parts)}\n{question}"

    return Needle(prompt=_filled(text, fits), answers=answers, wrong=wrong, depth=depth)


def _filled(text: Callable[[int], str], fits: Fits) -> str:
    """Return the text with the largest amount of filler that fits, found by binary search.

    Raises:
        DataError: even without filler, the text does not fit.
    """
    if not fits(text(0)):
        raise DataError(
            "the facts and the question alone exceed a length of the long-context test; raise the shortest length"
        )
    high = 1
    while fits(text(high)):
        high *= 2
    # Once a text is too long, all texts with more filler are too long, so the limit can be bisected.
    return text(bisect_left(range(1, high), True, key=lambda count: not fits(text(count))))


def long_context(
    llm: Evaluated, part: LongContext, *, ledgers: Path | None = None, seed: int = 0, say: Say | None = None
) -> tuple[TaskResult, ...]:
    """Measure the share of the hidden facts that a model repeats; one result per kind of text and length.

    Args:
        llm: model without running requests.
        part: lengths, depths, number and kinds of the texts. Lengths that do not fit the model's context are skipped.
        ledgers: file of recall items, for a model of the demo language; their texts replace all kinds. None = no
            ledgers.
        seed: seed of the texts.
        say: callback for progress.
    Raises:
        DataError: no length fits the context, or there is no tokenizer.
    """
    if llm.tokenizer is None:
        raise DataError(
            f"{llm.path} has no usable tokenizer, which a long-context test needs; copy the original's tokenizer there"
        )
    is_short = ledgers is not None or part.kinds == ("passkey",)
    longest = llm.capacity - (ANSWER_TOKENS if is_short else SEVERAL_TOKENS)
    fitting = sorted({length for length in part.lengths if length <= longest})
    if not fitting:
        raise DataError(
            f"none of the lengths {', '.join(map(str, part.lengths))} fits: a prompt for {llm.path} may have at most "
            f"{longest} tokens, because the context must hold the answer too"
        )
    writers = {kind: WRITERS[kind] for kind in part.kinds} if ledgers is None else {"ledger": ledger_writer(ledgers)}
    results = []
    for name, write in writers.items():
        depths = part.depths if name in ("passkey", "ledger") else (0.5,)
        for length in fitting:
            needles = list(_needles(llm, write, length, depths, part.samples, seed))
            results.append(_ask(llm, f"{name}_{length}", needles, say))
    return tuple(results)


def _needles(
    llm: Evaluated, write: Writer, length: int, depths: Sequence[float], samples: int, seed: int
) -> Iterator[Needle]:
    tokenizer = llm.tokenizer
    for depth in depths:
        for sample in range(samples):
            # One generator per text, so that adding a length, depth or sample does not change the other texts.
            rng = random.Random(f"{seed} {length} {depth} {sample}")
            # verbose=False: the tokenizer warns about every text that is longer than its nominal limit.
            yield write(rng, depth, lambda text: len(tokenizer(text, verbose=False)["input_ids"]) <= length)


def _ask(llm: Evaluated, task: str, needles: Sequence[Needle], say: Say | None) -> TaskResult:
    """Let a model answer all questions, and score the answers."""
    # A single answer is complete at the first punctuation mark, so generating more would only take time. Several may
    # come as a list, line by line.
    single = SamplingParams(max_tokens=ANSWER_TOKENS, stop=("\n", ".", ","))
    several = SamplingParams(max_tokens=SEVERAL_TOKENS)
    params = [single if len(needle.answers) == 1 else several for needle in needles]
    completions = generate_in_turns(llm, [needle.prompt for needle in needles], params, say=say)
    records = tuple(
        SampleRecord(
            task=task,
            index=index,
            scores={"acc": needle.score(completion.text), **({} if needle.depth is None else {"depth": needle.depth})},
            answer_tokens=None,  # stop texts and limits cut answers off
            item_hash=hashlib.sha256(needle.prompt.encode()).hexdigest(),
            answer=completion.text,
        )
        for index, (needle, completion) in enumerate(zip(needles, completions, strict=True))
    )
    at_depth: dict[str, list[SampleRecord]] = {}
    for record in records:
        if "depth" in record.scores:
            at_depth.setdefault(f"acc at depth {record.scores['depth']:g}", []).append(record)
    value = _accuracy(records)
    spread = math.fsum((record.scores["acc"] - value) ** 2 for record in records)
    return TaskResult(
        task=task,
        metric="acc",
        value=value,
        # As lm-eval's standard error of a mean, with n - 1 in the denominator of the variance.
        stderr=math.sqrt(spread / max(1, len(records) - 1) / len(records)),
        num_samples=len(records),
        samples=records,
        others={name: _accuracy(members) for name, members in at_depth.items()},
    )


def _accuracy(records: Sequence[SampleRecord]) -> float:
    return sum(record.scores["acc"] for record in records) / len(records)
