"""Make docs/accuracy.md, and the sentences about accuracy on other pages, from saved results; for evals/pages.py."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from provenance import MARK, table
from rows import METHODS, MODELS, NUMBERS, REASONS, Model, Wanted, peer_rows, wanted, whole
from score import Interval, difference, interval
from store import RESULTS, Answers, Row, Rows, load_rows

from quantkit.results.statistics.paired import compare_pairs

ORIGINAL = "original"
PEERS = "peers"
BELOW = "the peer's perplexity is below the original's, which is not an advantage on this model (see above)"
BUSY = 0.05  # share of the machine that other processes may use before seconds are marked

HEAD = """\
# Accuracy

This page compares quantkit's methods with other tools, for each number type and model of the test bed. It is generated
from `evals/results/accuracy/*.json`, and each figure comes from a run.

    python evals/pages.py --write                                            # generate this page from the saved results
    python evals/accuracy/run.py --list                                      # list the missing and the stale rows
    python evals/accuracy/run.py --work DIR                                  # measure the demo model
    python evals/accuracy/run.py --work DIR --models DIR --data DIR          # measure the other models too
    python evals/accuracy/peers.py --work DIR --llm-compressor PYTHON ...    # measure other tools
    quantkit verify CHECKPOINT --baseline MODEL --text FILE --suite none --dtype fp32 --no-bench   # your own

**How we measure.** quantkit's runtime reads every checkpoint from disk and computes in float32, whichever tool wrote
it. The text is cut into windows of 256 positions: BOS and 255 tokens. All tokens after BOS are scored. *KL* is
KL(original || quantized) over the whole vocabulary, averaged over these positions, in nats x 1000. *Same top token* is
the share of positions where the two models prefer the same token. All tools calibrate with the same token ids: 128
windows of 256 tokens, unless the heading of a model gives other numbers, such as `16x256`. The demo model is
calibrated on the text of the demo language, babyllama-361 and stories260k on TinyStories, and the real models on
quantkit's general text. The real models are scored on WikiText-2.

**Real models.** The weights of SmolLM2-135M-Instruct, Gemma 3 270M and Qwen2.5-Coder-0.5B-Instruct were decoded from
GGUF files of the types Q4_1, Q4_K_M and Q4_K_M. Most of the weights are therefore already rounded to 4 bits with zero
points in groups of 32. No row of these models uses such groups. We added no noise to the weights.

**What the signs mean.** All rows of a model read the same text, so we test paired differences: Student's t over blocks
of windows, with 95 % intervals. `+`: better than the best other tool (*peer*) in this column. `-`: worse. `=`: no
significant difference. ± is half the width of a 95 % interval; for perplexity, the interval is that of the difference
from the original. *Tasks* is the mean accuracy over the tasks, followed by the paired difference from the original in
points. Tables without task results do not have this column.

**Cost.** *CPU s* and *peak MB* cover the whole process that quantizes, including imports and reading. Every tool used
one thread (`OMP_NUM_THREADS=1`). ~ marks seconds that were measured while other processes used more than 5 % of the
machine. A process that shares caches and memory bandwidth with others needs more CPU seconds than when it runs alone,
so these seconds are an upper bound. The page on [performance](performance.md) shows the costs for layers of a larger
model.

**Rows that are left out.** quantkit's methods with `asymmetric_calibration` but without `true_sequential` appear only
at 4 bits in groups, for the demo model, SmolLM2 and Gemma. For llm-compressor and GPTQModel, this page shows the
methods that search for the best ranges, those that apply GPTQ after AWQ, and GPTQModel's default. Simpler methods
(rounding or GPTQ with ranges from the largest weights, AWQ alone) are not measured everywhere. Where they were
measured, the tables show them, and none is ahead of the best of the other methods.

**Stale rows.** Each row of quantkit is saved with digests of its recipe and of the code that determines the quantized
values. † marks a row whose recipe or code has changed since. It is not known whether today's code gives the same
result. For each model, a line that begins with † says what has changed. A change of the code does not count if every
shipped recipe still writes the same bytes for five small models (`evals/carry.py`).

On the demo model, the perplexity of a quantized model can be lower than that of the original. Training gave answers
eight times the weight of the rest of a text, most of which cannot be predicted, and rounding removes some of this
emphasis. The KL does not have this flaw.
"""


def render(results: Path = RESULTS) -> str:
    """Return the page as text; it depends only on the files in `results`."""
    parts = [HEAD]
    for model in sorted(MODELS, key=lambda model: not model.folder):  # real models first
        own = load_rows(results / f"{model.name}.json")
        if ORIGINAL in own:
            parts.append(_model(model, own, load_rows(results / f"{PEERS}-{model.name}.json")))
    return "\n".join([*parts, *_methods(), *_where(results)])


def _methods() -> list[str]:
    """Return the section that lists our methods with the steps of their recipes."""
    lines = []
    for name, steps in METHODS.items():
        text = yaml.safe_dump(steps, default_flow_style=True, width=1000).strip() if steps else "none"
        lines.append([name, f"`{text}`"])
    return ["## quantkit's methods", "", table(("method", "steps of the recipe"), lines), ""]


def _model(model: Model, own: Rows, peers: Rows) -> str:
    original = own[ORIGINAL]
    about = f"{original.windows} windows, {original.tokens} predicted tokens. The original has perplexity"
    groups = _groups(model, own, peers)
    tasks = _original_tasks(original) if any(_asked((*mine, *theirs)) for *_, mine, theirs in groups) else ""
    lines = [f"## {model.name}", "", f"{about} {_perplexity(original):.4f}{tasks}.", ""]
    ours = [row for _, _, mine, _ in groups for row in mine]
    lines += ["### quantkit's best method and the best peer", "", _summary(groups), "", _standing([groups])]
    lines += [*_behind(model, original, groups), "", _coverage(model, own, peers), "", *_stale_lines(ours)]
    for name, form, mine, theirs in groups:
        if mine or theirs:
            lines += [f"### {model.name}, {_title(name, form)}", "", _table(original, mine, theirs), ""]
    return "\n".join(lines)


def standing(results: Path = RESULTS) -> str:
    """Return the paragraph of docs/promises.md about all models together."""
    groups = [group for _, group in _all_groups(results)]
    tools = "llm-compressor, GPTQModel and auto-round"
    text = (
        f"**Measured accuracy.** The peers are {tools}. All tools use the same\n"
        f"calibration data, on small models.\n{_standing(groups)}\n"
    )
    if any(map(changed, _bests(groups))):
        text += "Some of these figures are older than the code that they measure. "
        text += f"The page on accuracy marks them with {MARK}.\n"
    return f"{text}[Accuracy](accuracy.md) lists every row and what was not run."


def readme_sentence(results: Path = RESULTS) -> str:
    """Return the sentences for README; "" if there are no figures or one of them is stale."""
    groups = [group for _, group in _all_groups(results)]
    if not _bests(groups) or any(map(changed, _bests(groups))):
        return ""
    return f"{_standing(groups)} These are small models ([accuracy](docs/accuracy.md))."


Group = tuple[str, bool, list[Row], list[Row]]


def _all_groups(results: Path) -> list[tuple[Model, list[Group]]]:
    """Return the measured models, each with our rows and the peers' rows of each number type and form."""
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
    """Return our best row of every group that has rows of peers."""
    return [mine[0] for groups in models for _, _, mine, theirs in groups if mine and theirs]


def changed(row: Row) -> list[str]:
    """Return what has changed since a row of ours was measured: `the recipe`, or names of modules."""
    wanted = Wanted(
        numbers=row.numbers, method=row.method, symmetric=row.symmetric, samples=row.samples, length=row.length
    )
    if row.taken is None or row.method not in METHODS:
        return ["the recipe"]
    return row.taken.changed(whole(wanted, "calibration.jsonl"))


def _stale_lines(ours: list[Row]) -> list[str]:
    """Return a line that says which rows are stale and why; nothing if no row is stale."""
    reasons: dict[str, Counter[str]] = {}
    for row in ours:
        if change := changed(row):
            reasons.setdefault(change[0], Counter())[row.taken.commit if row.taken else "unknown"] += 1
    if not reasons:
        return []
    said = [
        f"{reason} ({', '.join(_count_rows(count, commit) for commit, count in sorted(commits.items()))})"
        for reason, commits in sorted(reasons.items())
    ]
    return [f"{MARK} Measured before the last change of {'; of '.join(said)}.", ""]


def _count_rows(count: int, commit: str) -> str:
    return f"{count} {'row' if count == 1 else 'rows'} at commit {commit}"


def _method(row: Row) -> str:
    """Return the name of a row's method, marked if the row is stale."""
    return f"{row.method} {MARK}" if row.tool == "quantkit" and changed(row) else row.method


def _of(rows: Iterable[Row], numbers: str, symmetric: bool) -> list[Row]:
    found = [row for row in rows if (row.numbers, row.symmetric) == (numbers, symmetric)]
    return sorted(found, key=_kl)


def _title(name: str, symmetric: bool) -> str:
    numbers = NUMBERS[name]
    place = f"in groups of {numbers.group}" if numbers.group else "per channel"
    if not numbers.is_integer:
        return f"{name} {place}{', activations too' if numbers.activations else ''}"
    inputs = ", activations in 8 bits per token" if numbers.activations else ""
    return f"{numbers.bits} bits {place}{inputs}, {'symmetric' if symmetric else 'with zero points'}"


def _summary(groups: list[Group]) -> str:
    """Return the table that compares our best row by KL with the best peer by perplexity and with the best by KL."""
    head = ("numbers", "quantkit's best by KL", "perplexity", "best peer by perplexity", "sign")
    lines = []
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
        lines.append(cells)
    return table((*head, "KL x 1000", "best peer by KL", "sign"), lines)


def _standing(models: list[list[Group]]) -> str:
    """Say in how many settings our best row is ahead of, level with or behind the best peer."""
    both = [_signs(mine, theirs) for groups in models for _, _, mine, theirs in groups if mine and theirs]
    by_ppl, by_kl = ([signs[at] for signs in both] for at in (0, 1))

    def words(signs: list[int]) -> str:
        return f"ahead in {signs.count(-1)}, level in {signs.count(0)} and behind in {signs.count(1)}"

    if not both:
        return "No setting has rows of both quantkit and a peer, so nothing is compared."
    only = sum(bool(mine) and len(theirs) == 1 for groups in models for _, _, mine, theirs in groups)
    settings = "1 setting" if len(both) == 1 else f"{len(both)} settings"
    text = (
        f"We compared quantkit's best method with the best peer in {settings}.\n"
        f"By KL, quantkit is {words(by_kl)}.\n"
        f"By perplexity, it is {words(by_ppl)}."
    )
    return text + (f" In {only} of the settings, only one row of a peer was measured." if only else "")


def _signs(mine: list[Row], theirs: list[Row]) -> tuple[int, int]:
    """Compare our best row with the best peer in perplexity and in KL: -1 = ahead, 0 = level, 1 = behind."""
    best = mine[0]
    by_ppl = difference(best.nll, min(theirs, key=_perplexity).nll).sign
    return by_ppl, difference(best.kl, theirs[0].kl).sign


def _behind(model: Model, original: Row, groups: list[Group]) -> list[str]:
    """Return a line with the reason for every group in which our best row is behind."""
    lines = []
    for name, form, mine, theirs in groups:
        if mine and theirs and 1 in (signs := _signs(mine, theirs)):
            what = " and ".join(word for word, sign in zip(("perplexity", "KL"), signs, strict=True) if sign == 1)
            is_below = model.text is None and signs[1] < 1 and min(map(_perplexity, theirs)) < _perplexity(original)
            reason = BELOW if is_below else REASONS.get((model.name, name, form), "the reason is not known")
            lines.append(f"- Behind in {what}: {_title(name, form)}; {reason}.")
    return ["", *lines] if lines else []


def _coverage(model: Model, own: Rows, peers: Rows) -> str:
    """Say how many of the planned rows are measured."""
    declared = [row.key for row in wanted(model)]
    theirs = {(peer.tool, peer.method, numbers, form) for peer, numbers, form in peer_rows(model)}
    known = {(row.tool.split()[0], row.method, row.numbers, row.symmetric) for row in peers.values()}
    ours = f"{sum(key in own for key in declared)} of {len(declared)} planned rows of quantkit are measured"
    counts = f"{ours}, and {len(theirs & known)} of {len(theirs)} planned rows of other tools."
    return " ".join([counts, *(f"There are no rows of {tool}: {why}." for tool, why in model.without.items())])


def _table(original: Row, mine: list[Row], theirs: list[Row]) -> str:
    by_ppl = min(theirs, key=_perplexity) if theirs else None
    by_kl = theirs[0] if theirs else None
    asked = _asked((*mine, *theirs))
    tasks = ["tasks"] if asked else []
    head = ["tool", "method", "perplexity", "sign", "KL x 1000", "sign", "same top token", *tasks, "CPU s", "peak MB"]
    lines = []
    for row in sorted([*mine, *theirs], key=_kl):
        loss, kl = difference(row.nll, original.nll), interval(row.kl)
        reach = _perplexity(row) * (loss.high - loss.mean)
        own = row in mine
        ppl_mark = _mark(difference(row.nll, by_ppl.nll)) if own and by_ppl else ""
        kl_mark = _mark(difference(row.kl, by_kl.kl)) if own and by_kl else ""
        cells = [f"**{row.tool}**" if own else row.tool, _method(row)]
        cells += [f"{_perplexity(row):.4f} ± {reach:.4f}", ppl_mark]
        cells += [f"{_thousandths(kl.mean)} ± {_thousandths(kl.high - kl.mean)}", kl_mark, f"{100 * row.top1:.2f} %"]
        lines.append([*cells, *([_tasks(row, original)] if asked else []), *_cost(row)])
    return table(head, lines)


def _cost(row: Row) -> list[str]:
    """Return CPU seconds and peak memory; empty for old rows, whose figures do not cover whole processes."""
    known = row.taken is not None and row.taken.machine
    mark = "" if row.others is not None and row.others <= BUSY else "~"
    seconds = f"{mark}{row.cpu_s:.0f}" if known and row.cpu_s else ""
    return [seconds, str(row.peak_mb) if known and row.peak_mb else ""]


def _where(results: Path) -> list[str]:
    """Return the table of dates, machines, versions and commits of the rows."""
    runs: dict[tuple[str, str, str], Counter[str]] = {}
    for model in MODELS:
        for file in (f"{model.name}.json", f"{PEERS}-{model.name}.json"):
            for row in load_rows(results / file).values():
                if row.taken is not None:
                    versions = ", ".join(f"{name} {value}" for name, value in row.taken.versions.items())
                    key = (row.taken.date, row.taken.machine or "not recorded", versions or "not recorded")
                    runs.setdefault(key, Counter())[row.taken.commit] += 1
    lines = [
        [*key, ", ".join(f"{commit}: {count}" for commit, count in sorted(commits.items()))]
        for key, commits in sorted(runs.items())
    ]
    head = ("date", "machine", "versions", "rows by commit")
    return ["## Machines, dates and commits", "", table(head, lines), ""]


def _perplexity(row: Row) -> float:
    return math.exp(math.fsum(row.nll) / len(row.nll))


def _kl(row: Row) -> float:
    return math.fsum(row.kl) / len(row.kl)


def _label(row: Row, measured: list[Row]) -> str:
    """Return tool and method of the best row, and how many rows were measured."""
    rank = "the only row" if len(measured) == 1 else f"best of {len(measured)} rows"
    return f"({row.tool.split()[0]}, {row.method}; {rank})"


def _mark(found: Interval) -> str:
    """Return the sign for a difference, ours minus theirs, of a figure that is better if smaller."""
    return {-1: "+", 0: "=", 1: "-"}[found.sign]


def _thousandths(value: float) -> str:
    """Return nats x 1000, rounded for the tables."""
    value *= 1000
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _asked(rows: Iterable[Row]) -> bool:
    return any(row.tasks for row in rows)


def _tasks(row: Row, original: Row) -> str:
    """Return the mean accuracy, and its paired difference from the original in points."""
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
    return f" and a mean accuracy of {100 * mean:.2f} % over {len(original.tasks)} tasks"


def _accuracy(answers: Answers) -> float:
    return int(answers.right, 16).bit_count() / answers.count
