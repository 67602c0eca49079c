"""Measure long-context retrieval: the model must repeat facts from somewhere in a long text.

The texts have several lengths. Prompts run like ordinary requests, so generation reads keys and values from the
configured KV cache, quantized or not. For models of the demo language, the fact is an entry of a ledger, and clauses
fill the text. `long_context_texts` writes all other texts.

The test measures retrieval, not reasoning. Source: Liu et al. 2023, Lost in the Middle (depths).
"""

import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from quantkit.errors import DataError
from quantkit.evaluate.loading import Evaluated
from quantkit.evaluate.long_context_texts import WRITERS, Needle, Writer, ledger_writer
from quantkit.evaluate.tasks import LongContext
from quantkit.evaluate.work_sharing import Say, generate_in_turns
from quantkit.results import SampleRecord, TaskResult
from quantkit.runtime.types import SamplingParams

ANSWER_TOKENS, SEVERAL_TOKENS = 12, 96  # of a single answer, and of several


def long_context(
    llm: Evaluated, part: LongContext, *, ledgers: Path | None = None, seed: int = 0, say: Say | None = None
) -> tuple[TaskResult, ...]:
    """Measure the share of facts that a model finds, one result per kind of text and length.

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
        raise DataError(f"{llm.path} has no usable tokenizer; a long-context test needs a tokenizer")
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
    """Generate all answers and score them."""
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
