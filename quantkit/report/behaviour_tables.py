"""Tables of a behaviour test: decision margins, rates of sampled behaviour, KL on the original's answers, and example
answers.
"""

from collections.abc import Sequence

from quantkit.quantities import MISSING, counted, interval, number, percent, signed
from quantkit.report.table import Column, Table
from quantkit.results import BehaviourResult, Comparison, MarginRecord, Report
from quantkit.results.behaviour import DECISIONS, MIN_PROMPTS
from quantkit.results.statistics.comparison import BEHAVIOUR

RATES = {
    "unended": "do not end",
    "loop_rate": "loop until they are cut off",
    "empty": "are empty",
    "other_script": "are in another script",
    "right_format": "have the requested format",
    "valid_calls": "call tools validly",
}

_BRIEF = (30, 90, 3)  # characters before and after the first difference; number of examples


def behaviour_tables(report: Report, *, brief: bool = True) -> list[Table]:
    """Return the tables of a report's behaviour test: decision margins, rates, KL and example answers.

    Tables without data are left out. With `brief`, the table of answers shows at most 3 prompts, and each answer is cut
    around the first difference between the two models' answers.
    """
    behaviour = report.behaviour
    made = (
        *(margin_table(behaviour), rate_table(report.comparisons)),
        *(trace_table(behaviour), example_table(behaviour, brief=brief)),
    )
    return [table for table in made if table is not None]


def margin_table(behaviour: BehaviourResult | None) -> Table | None:
    """Create the table of both models' margins for the original's decisions; None without decisions."""
    if behaviour is None or not behaviour.margins:
        return None
    left_out = f"; {counted(behaviour.num_left_out, 'prompt')} left out" if behaviour.num_left_out else ""
    asked = f"{counted(behaviour.num_prompts, 'prompt')} of {behaviour.prompts}"
    few = any(each.ratio is None for each in behaviour.margins)
    return Table(
        title=f"Decisions of the original and their margins in nats, {asked}{left_out}",
        columns=(
            *(Column("the original"), Column("n", "{:,}".format), Column("prompts", "{:,}".format, detail=True)),
            *(Column("original", number), Column("model", number), Column("ratio (95 %)", _ratio)),
            Column("flipped", lambda share: percent(100 * share)),
        ),
        rows=tuple(
            (DECISIONS.get(m.kind, m.kind), m.num_decisions, m.num_prompts, m.baseline, m.value, m, m.flips)
            for m in behaviour.margins
        ),
        note=f"A decision that occurs in fewer than {MIN_PROMPTS} prompts has no ratio." if few else "",
    )


def _ratio(margin: MarginRecord) -> str:
    if margin.ratio is None:
        return MISSING
    return f"{number(margin.ratio)} ({interval(margin.low, margin.high, 2)})"


def rate_table(comparisons: Sequence[Comparison]) -> Table | None:
    """Create the table of how often each model's sampled answers loop, are empty, ...; None without such rates."""
    rates = [(c.subject.removeprefix(f"{BEHAVIOUR}: "), c) for c in comparisons if c.subject.startswith(BEHAVIOUR)]
    if not rates:
        return None

    def share(value: float) -> str:
        return percent(100 * value)

    return Table(
        title="Answers with the same seeds",
        columns=(
            *(Column("answers that"), Column("original", share), Column("model", share)),
            *(Column("difference, points (95 %)", _points, detail=True), Column("n", "{:,}".format, detail=True)),
            Column("verdict"),
        ),
        rows=tuple((RATES.get(name, name), c.baseline, c.value, c, c.num_samples, c.verdict) for name, c in rates),
    )


def _points(c: Comparison) -> str:
    if c.low is None or c.high is None:
        return signed(100 * c.difference, 1)
    return f"{signed(100 * c.difference, 1)} ({signed(100 * c.low, 1)} to {signed(100 * c.high, 1)})"


def trace_table(behaviour: BehaviourResult | None) -> Table | None:
    """Create the table of KL on the original's answers, by position and by entropy; None without data."""
    if behaviour is None or not behaviour.quarter_kl:
        return None
    quarters = ("first", "second", "third", "last")
    entropy = " · ".join(map(number, behaviour.entropy_limits))
    return Table(
        title=f"KL on the original's answers, {behaviour.num_tokens:,} tokens, {number(behaviour.mean_kl)} on average",
        columns=(Column("quarter"), Column("by position", number), Column("by entropy, lowest first", number)),
        rows=tuple(zip(quarters, behaviour.quarter_kl, behaviour.entropy_kl, strict=False)),
        note=(
            f"By position, each row is a quarter of {behaviour.max_tokens} tokens; by entropy, the limits are "
            f"{entropy} nats."
        ),
    )


def example_table(behaviour: BehaviourResult | None, *, brief: bool) -> Table | None:
    """Create the table of both models' answers side by side, with a mark where they begin to differ; None without
    examples.
    """
    if behaviour is None or not behaviour.examples:
        return None
    before, after, count = _BRIEF if brief else (None, None, None)
    rows = []
    for each in behaviour.examples[:count]:
        at = min(each.parted, len(each.original), len(each.model))  # the number comes from a file and may be wrong
        shared = each.original[:at] if before is None else each.original[:at][-before:]
        texts = (f"{shared}¦{text[at:][:after]}" for text in (each.original, each.model))
        rows.append((each.prompt[:after], *texts, RATES.get(each.lost, "")))
    return Table(
        title="Answers side by side; ¦ marks where they begin to differ",
        columns=(Column("prompt"), Column("original"), Column("model"), Column("worse")),
        rows=tuple(rows),
    )
