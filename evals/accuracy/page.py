"""docs/accuracy.md from the results on disk: nothing in it is written by hand but the words around the figures.

python evals/accuracy/page.py
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import yaml
from rows import METHODS, MODELS, NUMBERS, Model
from score import Interval, difference, interval
from store import RESULTS, Answers, Row, Rows, load_rows

from quantkit.results.statistics.paired import compare_pairs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "accuracy.md"
ORIGINAL = "original"
PEERS = "peers"

HEAD = """\
# Accuracy

Every method x number type x model of the test bed, other tools beside us. This page is generated from
`evals/results/accuracy/*.json`; each figure comes from a run.

    python evals/accuracy/page.py                                            # this page again, from the kept results
    python evals/accuracy/run.py --work DIR                                  # measure: the demo model, then this page
    python evals/accuracy/run.py --work DIR --models DIR --data DIR          # the other models too
    python evals/accuracy/peers.py MANIFEST.jsonl --models DIR --data DIR    # checkpoints that other tools made
    python evals/accuracy/score.py CHECKPOINT [OTHER] --baseline MODEL --text FILE   # any two of your own

**How it was measured.** Every checkpoint is read from disk and decoded in float32 by quantkit's runtime, whoever wrote
it. Text in windows of 256 positions, BOS and 255 tokens, all after BOS scored. *KL* is the mean of KL(original ||
quantized) over the whole vocabulary at the same positions, in nats x 1000; *same top token* the share of positions
where both prefer the same. All tools were calibrated with the same 128 x 256 token ids.

**What is real.** Two rows read the same text, so their difference is paired: Student's t over blocks of windows, 95 %.
`+` better than the best peer of that column, `-` worse, `=` within noise. ± is half of a 95 % interval; for
perplexity it is of the difference to the original. Task accuracy is the mean over tasks, with the paired difference to
the original in points. CPU s and peak MB are of the quantizing process on one shared core, imports and loading
included for quantkit, not included in the seconds of the peers: good for orders of magnitude only.

On the demo model perplexity can fall below the original's: its training counted answers eight times as much as the rest
of a text, most of which cannot be predicted, and rounding takes some of that emphasis back. KL does not have this flaw.
"""


def write_page(results: Path = RESULTS, page: Path = PAGE) -> None:
    """Write the page from a folder of results."""
    page.write_text(render(results), encoding="utf-8")


def render(results: Path = RESULTS) -> str:
    """The page as text; a function of the files in `results` alone."""
    parts = [HEAD]
    for model in MODELS:
        own = load_rows(results / f"{model.name}.json")
        if ORIGINAL in own:
            parts.append(_model(model, own, load_rows(results / f"{PEERS}-{model.name}.json")))
    return "\n".join([*parts, *_methods()])


def _methods() -> list[str]:
    """Steps of our methods, as a recipe has them."""
    lines = ["## quantkit's methods", "", "| method | steps of the recipe |", "|---|---|"]
    for name, steps in METHODS.items():
        text = yaml.safe_dump(steps, default_flow_style=True, width=1000).strip() if steps else "none"
        lines.append(_line([name, f"`{text}`"]))
    return [*lines, ""]


def _model(model: Model, own: Rows, peers: Rows) -> str:
    original = own[ORIGINAL]
    about = f"{original.windows} windows, {original.tokens} predicted tokens. Original: perplexity"
    lines = [f"## {model.name}", "", f"{about} {_perplexity(original):.4f}{_original_tasks(original)}.", ""]
    ours = [row for key, row in own.items() if key != ORIGINAL]
    classes = [(name, form) for name in model.numbers for form in (True, False)]
    groups = [(name, form, _of(ours, name, form), _of(peers.values(), name, form)) for name, form in classes]
    lines += ["### The best of each", "", *_summary(groups), "", _standing(groups), ""]
    for name, form, mine, theirs in groups:
        if mine or theirs:
            lines += [f"### {model.name}, {_title(name, form)}", "", *_table(original, mine, theirs), ""]
    return "\n".join(lines)


def _of(rows: Iterable[Row], numbers: str, symmetric: bool) -> list[Row]:
    found = [row for row in rows if (row.numbers, row.symmetric) == (numbers, symmetric)]
    return sorted(found, key=_kl)


def _title(name: str, symmetric: bool) -> str:
    numbers = NUMBERS[name]
    place = f"in groups of {numbers.group}" if numbers.group else "per channel"
    inputs = ", inputs in 8 bits per token" if numbers.activations else ""
    return f"{numbers.bits} bits {place}{inputs}, {'symmetric' if symmetric else 'with zero points'}"


def _summary(groups: list[tuple[str, bool, list[Row], list[Row]]]) -> list[str]:
    """Our best row by KL against the best peer in either column."""
    lines = [
        "| | quantkit's best by KL | perplexity | best peer | | KL | best peer | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, form, mine, theirs in groups:
        if not mine:
            continue
        best = mine[0]
        cells = [_title(name, form), best.method, f"{_perplexity(best):.4f}"]
        if theirs:
            by_ppl, by_kl = min(theirs, key=_perplexity), theirs[0]
            cells += [f"{_perplexity(by_ppl):.4f} {_label(by_ppl)}", _mark(difference(best.nll, by_ppl.nll))]
            cells += [_thousandths(_kl(best)), f"{_thousandths(_kl(by_kl))} {_label(by_kl)}"]
            cells += [_mark(difference(best.kl, by_kl.kl))]
        else:
            cells += ["not measured", "", _thousandths(_kl(best)), "not measured", ""]
        lines.append(_line(cells))
    return lines


def _standing(groups: list[tuple[str, bool, list[Row], list[Row]]]) -> str:
    """How many rows are ahead of, level with and behind the best peer."""
    both = [(mine[0], theirs) for _, _, mine, theirs in groups if mine and theirs]
    by_ppl = [difference(best.nll, min(theirs, key=_perplexity).nll).sign for best, theirs in both]
    by_kl = [difference(best.kl, theirs[0].kl).sign for best, theirs in both]

    def words(signs: list[int]) -> str:
        return f"{signs.count(-1)} ahead, {signs.count(0)} level, {signs.count(1)} behind"

    return f"Against the best peer, of {len(both)} rows: perplexity {words(by_ppl)}; KL {words(by_kl)}."


def _table(original: Row, mine: list[Row], theirs: list[Row]) -> list[str]:
    by_ppl = min(theirs, key=_perplexity) if theirs else None
    by_kl = theirs[0] if theirs else None
    lines = [
        "| tool | method | perplexity | | KL x 1000 | | same top token | tasks | CPU s | peak MB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted([*mine, *theirs], key=_kl):
        loss, kl = difference(row.nll, original.nll), interval(row.kl)
        reach = _perplexity(row) * (loss.high - loss.mean)
        own = row in mine
        ppl_mark = _mark(difference(row.nll, by_ppl.nll)) if own and by_ppl else ""
        kl_mark = _mark(difference(row.kl, by_kl.kl)) if own and by_kl else ""
        lines.append(
            _line(
                [
                    f"**{row.tool}**" if own else row.tool,
                    row.method,
                    f"{_perplexity(row):.4f} ± {reach:.4f}",
                    ppl_mark,
                    f"{_thousandths(kl.mean)} ± {_thousandths(kl.high - kl.mean)}",
                    kl_mark,
                    f"{100 * row.top1:.2f} %",
                    _tasks(row, original),
                    "" if row.cpu_s is None else f"{row.cpu_s:.0f}",
                    "" if row.peak_mb is None else str(row.peak_mb),
                ]
            )
        )
    return lines


def _perplexity(row: Row) -> float:
    return math.exp(math.fsum(row.nll) / len(row.nll))


def _kl(row: Row) -> float:
    return math.fsum(row.kl) / len(row.kl)


def _label(row: Row) -> str:
    return f"({row.tool.split()[0]}, {row.method})"


def _mark(found: Interval) -> str:
    """Differences are ours minus theirs, and less is better."""
    return {-1: "+", 0: "=", 1: "-"}[found.sign]


def _thousandths(value: float) -> str:
    """Nats x 1000 to three figures at least."""
    value *= 1000
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


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


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    write_page()
