"""docs/accuracy.md, and what other pages say of it, from the results on disk; `evals/pages.py` writes them."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from provenance import MARK, table_line
from rows import METHODS, MODELS, NUMBERS, REASONS, Model, Wanted, peer_rows, recipe, wanted
from score import Interval, difference, interval
from store import RESULTS, Answers, Row, Rows, load_rows

from quantkit.results.statistics.paired import compare_pairs

ORIGINAL = "original"
PEERS = "peers"
BELOW = "the peer's is below the original's, which is no merit there, see above"
BUSY = 0.05  # of the machine that others may take before seconds are marked

HEAD = """\
# Accuracy

Every method x number type x model of the test bed, other tools beside us. This page is generated from
`evals/results/accuracy/*.json`; each figure comes from a run.

    python evals/pages.py --write                                            # this page again, from the kept results
    python evals/accuracy/run.py --list                                      # which rows are missing, and which are old
    python evals/accuracy/run.py --work DIR                                  # measure: the demo model, then this page
    python evals/accuracy/run.py --work DIR --models DIR --data DIR          # the other models too
    python evals/accuracy/peers.py --work DIR --llm-compressor PYTHON ...    # the same with other tools
    python evals/accuracy/score.py CHECKPOINT [OTHER] --baseline MODEL --text FILE   # any two of your own

**How it was measured.** Every checkpoint is read from disk and decoded in float32 by quantkit's runtime, whoever wrote
it. Text in windows of 256 positions, BOS and 255 tokens, all after BOS scored. *KL* is the mean of KL(original ||
quantized) over the whole vocabulary at the same positions, in nats x 1000; *same top token* the share of positions
where both prefer the same. All tools were calibrated with the same token ids: 128 windows of 256, or as a model's
heading says. The windows of the demo model are of its own text, those of babyllama-361 and stories260k of TinyStories,
and those of the real models of the bundled general text; the real models are scored on WikiText-2.

**Real models.** The weights of SmolLM2-135M-Instruct and Gemma 3 270M were decoded from GGUF files, so they lie on a
grid already: SmolLM2's of 4 bits with zero points in groups of 32. No row here has that grid; noise was not added.

**What is real.** Two rows read the same text, so their difference is paired: Student's t over blocks of windows, 95 %.
`+` better than the best peer of that column, `-` worse, `=` within noise. ± is half of a 95 % interval; for
perplexity it is of the difference to the original. *Tasks*, in a table whose rows were asked any, is the mean accuracy
over them, with the paired difference to the original in points.

**What it cost.** CPU s and peak MB are those of the whole process that quantized, imports and reading included, with
one thread (`OMP_NUM_THREADS=1`), ours and others' alike. ~ marks seconds that were taken while other processes used
more than 5 % of the machine: a process that shares caches and memory takes more CPU seconds than alone, so they are an
upper bound. What compression costs on a model of some size is said in [performance](performance.md) alone.

**What is left out.** Of our methods those with `asymmetric_calibration` but without `true_sequential` stand on the demo
model at 4 bits in groups of 32 alone. Of llm-compressor's and GPTQModel's methods those remain that search ranges, or
go on from AWQ with GPTQ, and GPTQModel's default; what is plainer (rounding or GPTQ with ranges from the largest
weights, AWQ alone) was ahead of the best of these in no row where both were measured, and is shown there.

**What is old.** A row of ours is kept with digests of its recipe and of the code that decides codes. † marks one whose
recipe or code is another today: nobody has shown that today's code does the same. Which, is said below its tables.

On the demo model perplexity can fall below the original's: its training counted answers eight times as much as the rest
of a text, most of which cannot be predicted, and rounding takes some of that emphasis back. KL does not have this flaw.
"""


def render(results: Path = RESULTS) -> str:
    """The page as text; a function of the files in `results` alone."""
    parts = [HEAD]
    for model in sorted(MODELS, key=lambda model: not model.folder):  # real models first
        own = load_rows(results / f"{model.name}.json")
        if ORIGINAL in own:
            parts.append(_model(model, own, load_rows(results / f"{PEERS}-{model.name}.json")))
    return "\n".join([*parts, *_methods(), *_where(results)])


def _methods() -> list[str]:
    """Steps of our methods, as a recipe has them."""
    lines = ["## quantkit's methods", "", "| method | steps of the recipe |", "|---|---|"]
    for name, steps in METHODS.items():
        text = yaml.safe_dump(steps, default_flow_style=True, width=1000).strip() if steps else "none"
        lines.append(table_line([name, f"`{text}`"]))
    return [*lines, ""]


def _model(model: Model, own: Rows, peers: Rows) -> str:
    original = own[ORIGINAL]
    about = f"{original.windows} windows, {original.tokens} predicted tokens. Original: perplexity"
    groups = _groups(model, own, peers)
    tasks = _original_tasks(original) if any(_asked((*mine, *theirs)) for *_, mine, theirs in groups) else ""
    lines = [f"## {model.name}", "", f"{about} {_perplexity(original):.4f}{tasks}.", ""]
    ours = [row for _, _, mine, _ in groups for row in mine]
    lines += ["### The best of each", "", *_summary(groups), "", _standing([groups])]
    lines += [*_behind(model, original, groups), "", _coverage(model, own, peers), "", *_stale_lines(ours)]
    for name, form, mine, theirs in groups:
        if mine or theirs:
            lines += [f"### {model.name}, {_title(name, form)}", "", *_table(original, mine, theirs), ""]
    return "\n".join(lines)


def standing(results: Path = RESULTS) -> str:
    """What docs/promises.md says of all models together."""
    groups = [group for _, group in _all_groups(results)]
    tools = "llm-compressor, GPTQModel and auto-round"
    text = (
        f"**Measured accuracy.** The peers are {tools}. All tools use the same\n"
        f"calibration data, on small models.\n{_standing(groups)}\n"
    )
    if any(map(changed, _bests(groups))):
        text += f"Some of these figures are older than the code that they measure; the page marks them with {MARK}.\n"
    return f"{text}[Accuracy](accuracy.md) lists every row and what was not run."


def readme_sentence(results: Path = RESULTS) -> str:
    """The same in a sentence; none while one of its figures is stale, or without figures."""
    groups = [group for _, group in _all_groups(results)]
    if not _bests(groups) or any(map(changed, _bests(groups))):
        return ""
    return f"{_standing(groups)} These are small models ([accuracy](docs/accuracy.md))."


Group = tuple[str, bool, list[Row], list[Row]]


def _all_groups(results: Path) -> list[tuple[Model, list[Group]]]:
    """Of each model that was measured, its rows of each number type and form: ours, and the peers'."""
    return [
        (model, _groups(model, own, load_rows(results / f"{PEERS}-{model.name}.json")))
        for model in MODELS
        if ORIGINAL in (own := load_rows(results / f"{model.name}.json"))
    ]


def _groups(model: Model, own: Rows, peers: Rows) -> list[Group]:
    ours = [row for key, row in own.items() if key != ORIGINAL]
    classes = [(name, form) for name in model.numbers for form in (True, False)]
    return [(name, form, _of(ours, name, form), _of(peers.values(), name, form)) for name, form in classes]


def _bests(models: list[list[Group]]) -> list[Row]:
    """Our rows that are compared with peers."""
    return [mine[0] for groups in models for _, _, mine, theirs in groups if mine and theirs]


def changed(row: Row) -> list[str]:
    """What a row of ours rests on that is another today; nothing for a row that is as today's code makes it."""
    wanted = Wanted(
        numbers=row.numbers, method=row.method, symmetric=row.symmetric, samples=row.samples, length=row.length
    )
    if row.taken is None or row.method not in METHODS:
        return ["the recipe"]
    return row.taken.changed(recipe(wanted, "calibration.jsonl"))


def _stale_lines(ours: list[Row]) -> list[str]:
    """Which rows are stale, in one sentence."""
    reasons: dict[str, Counter[str]] = {}
    for row in ours:
        if change := changed(row):
            reasons.setdefault(change[0], Counter())[row.taken.commit if row.taken else "unknown"] += 1
    if not reasons:
        return []
    said = [
        f"{reason} ({', '.join(f'{count} at commit {commit}' for commit, count in sorted(commits.items()))})"
        for reason, commits in sorted(reasons.items())
    ]
    return [f"{MARK} Taken before the last change of {'; of '.join(said)}.", ""]


def _method(row: Row) -> str:
    """Name, marked where it is stale."""
    return f"{row.method} {MARK}" if row.tool == "quantkit" and changed(row) else row.method


def _of(rows: Iterable[Row], numbers: str, symmetric: bool) -> list[Row]:
    found = [row for row in rows if (row.numbers, row.symmetric) == (numbers, symmetric)]
    return sorted(found, key=_kl)


def _title(name: str, symmetric: bool) -> str:
    numbers = NUMBERS[name]
    place = f"in groups of {numbers.group}" if numbers.group else "per channel"
    if not numbers.is_integer:
        return f"{name} {place}{', activations likewise' if numbers.activations else ''}"
    inputs = ", inputs in 8 bits per token" if numbers.activations else ""
    return f"{numbers.bits} bits {place}{inputs}, {'symmetric' if symmetric else 'with zero points'}"


def _summary(groups: list[Group]) -> list[str]:
    """Our best row by KL against the best peer in either column."""
    lines = [
        "| | quantkit's best by KL | perplexity | best peer | | KL | best peer | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, form, mine, theirs in groups:
        if not mine:
            continue
        best = mine[0]
        cells = [_title(name, form), _method(best), f"{_perplexity(best):.4f}"]
        if theirs:
            by_ppl, by_kl = min(theirs, key=_perplexity), theirs[0]
            cells += [f"{_perplexity(by_ppl):.4f} {_label(by_ppl, theirs)}", _mark(difference(best.nll, by_ppl.nll))]
            cells += [_thousandths(_kl(best)), f"{_thousandths(_kl(by_kl))} {_label(by_kl, theirs)}"]
            cells += [_mark(difference(best.kl, by_kl.kl))]
        else:
            cells += ["not measured", "", _thousandths(_kl(best)), "not measured", ""]
        lines.append(table_line(cells))
    return lines


def _standing(models: list[list[Group]]) -> str:
    """How many rows are ahead of, level with and behind the best peer."""
    both = [_signs(mine, theirs) for groups in models for _, _, mine, theirs in groups if mine and theirs]
    by_ppl, by_kl = ([signs[at] for signs in both] for at in (0, 1))

    def words(signs: list[int]) -> str:
        return f"ahead in {signs.count(-1)}, level in {signs.count(0)} and behind in {signs.count(1)}"

    only = sum(bool(mine) and len(theirs) == 1 for groups in models for _, _, mine, theirs in groups)
    text = (
        f"We compared quantkit's best method with the best peer in {len(both)} settings.\n"
        f"By KL, quantkit is {words(by_kl)}.\n"
        f"By perplexity, it is {words(by_ppl)}."
    )
    return text + (f" In {only} of them, only one row of a peer was measured." if only else "")


def _signs(mine: list[Row], theirs: list[Row]) -> tuple[int, int]:
    """Of our best row against the best peer's, in perplexity and KL: -1 ahead, 0 level, 1 behind."""
    best = mine[0]
    by_ppl = difference(best.nll, min(theirs, key=_perplexity).nll).sign
    return by_ppl, difference(best.kl, theirs[0].kl).sign


def _behind(model: Model, original: Row, groups: list[Group]) -> list[str]:
    """Rows that are behind, and why."""
    lines = []
    for name, form, mine, theirs in groups:
        if mine and theirs and 1 in (signs := _signs(mine, theirs)):
            what = " and ".join(word for word, sign in zip(("perplexity", "KL"), signs, strict=True) if sign == 1)
            is_below = model.text is None and signs[1] < 1 and min(map(_perplexity, theirs)) < _perplexity(original)
            reason = BELOW if is_below else REASONS.get((model.name, name, form), "no reason is known")
            lines.append(f"- Behind in {what}: {_title(name, form)}; {reason}.")
    return ["", *lines] if lines else []


def _coverage(model: Model, own: Rows, peers: Rows) -> str:
    """How much of what is declared was measured."""
    declared = [row.key for row in wanted(model)]
    theirs = {(peer.tool, peer.method, numbers, form) for peer, numbers, form in peer_rows(model)}
    known = {(row.tool.split()[0], row.method, row.numbers, row.symmetric) for row in peers.values()}
    ours = f"Of {len(declared)} declared rows of ours {sum(key in own for key in declared)} are measured"
    counts = f"{ours}, of {len(theirs)} of other tools {len(theirs & known)}."
    return " ".join([counts, *(f"No rows of {tool}: {why}." for tool, why in model.without.items())])


def _table(original: Row, mine: list[Row], theirs: list[Row]) -> list[str]:
    by_ppl = min(theirs, key=_perplexity) if theirs else None
    by_kl = theirs[0] if theirs else None
    asked = _asked((*mine, *theirs))
    tasks = ["tasks"] if asked else []
    head = ["tool", "method", "perplexity", "", "KL x 1000", "", "same top token", *tasks, "CPU s", "peak MB"]
    lines = [table_line(head), table_line(["---"] * len(head))]
    for row in sorted([*mine, *theirs], key=_kl):
        loss, kl = difference(row.nll, original.nll), interval(row.kl)
        reach = _perplexity(row) * (loss.high - loss.mean)
        own = row in mine
        ppl_mark = _mark(difference(row.nll, by_ppl.nll)) if own and by_ppl else ""
        kl_mark = _mark(difference(row.kl, by_kl.kl)) if own and by_kl else ""
        lines.append(
            table_line(
                [
                    f"**{row.tool}**" if own else row.tool,
                    _method(row),
                    f"{_perplexity(row):.4f} ± {reach:.4f}",
                    ppl_mark,
                    f"{_thousandths(kl.mean)} ± {_thousandths(kl.high - kl.mean)}",
                    kl_mark,
                    f"{100 * row.top1:.2f} %",
                    *([_tasks(row, original)] if asked else []),
                    *_cost(row),
                ]
            )
        )
    return lines


def _cost(row: Row) -> list[str]:
    """CPU seconds and peak; none of rows from before these were those of whole processes."""
    known = row.taken is not None and row.taken.machine
    mark = "" if row.others is not None and row.others <= BUSY else "~"
    seconds = f"{mark}{row.cpu_s:.0f}" if known and row.cpu_s else ""
    return [seconds, str(row.peak_mb) if known and row.peak_mb else ""]


def _where(results: Path) -> list[str]:
    """Where and when the rows were taken, by commit and machine."""
    runs: dict[tuple[str, str, str], Counter[str]] = {}
    for model in MODELS:
        for file in (f"{model.name}.json", f"{PEERS}-{model.name}.json"):
            for row in load_rows(results / file).values():
                if row.taken is not None:
                    versions = ", ".join(f"{name} {value}" for name, value in row.taken.versions.items())
                    key = (row.taken.date, row.taken.machine or "not kept", versions or "not kept")
                    runs.setdefault(key, Counter())[row.taken.commit] += 1
    lines = ["## Where and when", "", "| date | machine | versions | rows by commit |", "|---|---|---|---|"]
    for key, commits in sorted(runs.items()):
        lines.append(table_line([*key, ", ".join(f"{commit}: {count}" for commit, count in sorted(commits.items()))]))
    return [*lines, ""]


def _perplexity(row: Row) -> float:
    return math.exp(math.fsum(row.nll) / len(row.nll))


def _kl(row: Row) -> float:
    return math.fsum(row.kl) / len(row.kl)


def _label(row: Row, measured: list[Row]) -> str:
    """Of the best of those that were measured."""
    rank = "the only one" if len(measured) == 1 else f"best of {len(measured)}"
    return f"({row.tool.split()[0]}, {row.method}; {rank})"


def _mark(found: Interval) -> str:
    """Differences are ours minus theirs, and less is better."""
    return {-1: "+", 0: "=", 1: "-"}[found.sign]


def _thousandths(value: float) -> str:
    """Nats x 1000 to three figures at least."""
    value *= 1000
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _asked(rows: Iterable[Row]) -> bool:
    return any(row.tasks for row in rows)


def _tasks(row: Row, original: Row) -> str:
    """Mean accuracy, and the paired difference to the original in points."""
    names = [name for name in row.tasks if name in original.tasks]
    if not names:
        return ""
    found = compare_pairs([(original.tasks[name].scores, row.tasks[name].scores) for name in names])
    low, high = 100 * found.low, 100 * found.high
    return f"{100 * found.value:.2f} % ({100 * found.difference:+.2f} [{low:+.2f}, {high:+.2f}])"


def _original_tasks(original: Row) -> str:
    if not original.tasks:
        return ""
    mean = sum(map(_accuracy, original.tasks.values())) / len(original.tasks)
    return f", {len(original.tasks)} tasks {100 * mean:.2f} %"


def _accuracy(answers: Answers) -> float:
    return int(answers.right, 16).bit_count() / answers.count
