"""The little language of the demo model: documents to train on and held-out items to test with.

Everything is a pure function of a `random.Random`, so a document is reproducible from its seed. Test items are
kept out of the training stream by construction: each document or item has a key (the operand pair, the cast of
the story, the pairs of the ledger, ...), and a hash of the key decides on which side it may appear.

Answers, the words that follow from what came before, are marked as [word] in the raw text; `split_marks` removes
the marks and returns their spans, which training weights and tests rely on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from words import (
    ADVERBS,
    ANIMALS,
    ATTRACTORS,
    AUXILIARIES,
    COLOURS,
    FOODS,
    KEYS,
    PLACES,
    PREPOSITIONS,
    SUBJECTS,
    THINGS,
    TOWN_FORMS,
    TOWN_VALUES,
    TOWNS,
    VALUES,
    VERBS,
    held_out_form,
    stable_hash,
    town_fact,
)

TASKS = ("stories", "facts", "arithmetic", "agreement", "recall")
HELD_OUT_ONE_IN = 10

# Documents per kind, in the order of TASKS.
MIXTURE = (0.15, 0.17, 0.18, 0.05, 0.45)


@dataclass(frozen=True, kw_only=True)
class Item:
    """One multiple-choice question: the choice with index `answer` continues `context`."""

    task: str
    context: str
    choices: tuple[str, ...]
    answer: int


def is_held_out(key: str) -> bool:
    """Whether whatever has this key belongs to the tests and must not be trained on."""
    return stable_hash(f"held out {key}") % HELD_OUT_ONE_IN == 0


def split_marks(raw: str) -> tuple[str, list[tuple[int, int]]]:
    """Remove the [ ] marks; return the plain text and the character spans of the answers in it."""
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    length = 0
    for part in raw.split("["):
        answer, bracket, rest = part.partition("]")
        if bracket:
            spans.append((length, length + len(answer)))
        pieces.append(answer + rest)
        length += len(pieces[-1])
    return "".join(pieces), spans


def draw_kind(rng: random.Random) -> str:
    """The kind of the next training document."""
    return rng.choices(TASKS, weights=MIXTURE)[0]


def document_of_kind(kind: str, rng: random.Random, *, long: bool = False) -> str:
    """One training document with marks, no blank lines inside; `long` spreads recall over a few hundred tokens."""
    if kind == "recall":
        return _recall_document(rng, long)
    makers: dict[str, Callable[[random.Random], str]] = {
        "stories": _story_document,
        "facts": _facts_document,
        "arithmetic": _arithmetic_document,
        "agreement": _agreement_document,
    }
    return makers[kind](rng)


def held_out_items(task: str, count: int, seed: int = 0) -> list[Item]:
    """`count` distinct held-out items of one task."""
    makers: dict[str, Callable[[random.Random], Item]] = {
        "stories": _story_item,
        "facts": _facts_item,
        "arithmetic": _arithmetic_item,
        "agreement": _agreement_item,
        "recall": _recall_item,
    }
    rng = random.Random(f"test {task} {seed}")
    items: dict[str, Item] = {}
    while len(items) < count:
        item = makers[task](rng)
        items.setdefault(item.context, item)
    return list(items.values())


def _until(draw: Callable[[], tuple[str, ...]], *, held_out: bool) -> tuple[str, ...]:
    """Redraw until the key lies on the wanted side of the split."""
    while True:
        drawn = draw()
        if is_held_out(" ".join(drawn)) == held_out:
            return drawn


def _item(rng: random.Random, task: str, context: str, truth: str, others: list[str]) -> Item:
    """Shuffle the truth among the wrong answers."""
    choices = [truth, *others]
    rng.shuffle(choices)
    return Item(task=task, context=context, choices=tuple(choices), answer=choices.index(truth))


# --- stories -----------------------------------------------------------------------------------------------------

# Everybody in the stories has a short first name and a family name, which never changes within a story.
_OPENINGS = ("One day", "Long ago", "In spring", "In winter")
_TIMES = ("At noon", "Late at night", "In the evening", "One day")
_FAMILIES = ANIMALS + THINGS
_DEEDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("asked for some {v}.", FOODS),
    ("ate some {v}.", FOODS),
    ("went back to the {v}.", PLACES),
    ("slept at the {v}.", PLACES),
    ("stood there in {v}.", COLOURS),
)


def _draw_cast(rng: random.Random, people: int, *, held_out: bool) -> dict[str, str]:
    """Family names by first name."""

    def draw() -> tuple[str, ...]:
        firsts, families = rng.sample(KEYS, people), rng.sample(_FAMILIES, people)
        return tuple(f"{first} {family}" for first, family in zip(firsts, families, strict=True))

    return dict(person.split() for person in _until(draw, held_out=held_out))


def _event(rng: random.Random, cast: dict[str, str]) -> str:
    """What one of the cast did, alone or with a second one."""
    who = rng.sample(list(cast), rng.choice((1, 1, 2)))
    people = " and ".join(f"{first} [{cast[first]}]" for first in who)
    deed, objects = rng.choice(_DEEDS)
    return f"{rng.choice(_TIMES)} {people} {deed.format(v=rng.choice(objects))}"


def _opening(rng: random.Random, cast: dict[str, str]) -> str:
    people = " and ".join(f"{first} {family}" for first, family in cast.items())
    return f"{rng.choice(_OPENINGS)} {people} met."


def _story_document(rng: random.Random) -> str:
    cast = _draw_cast(rng, rng.randint(2, 6), held_out=False)
    return " ".join([_opening(rng, cast), *(_event(rng, cast) for _ in range(rng.randint(5, 12)))])


def _story_item(rng: random.Random) -> Item:
    """Four to six people; the wrong answers are the families of the others."""
    cast = _draw_cast(rng, rng.randint(4, 6), held_out=True)
    asked = rng.choice(list(cast))
    events = [split_marks(_event(rng, cast))[0] for _ in range(rng.randint(3, 8))]
    # Only the opening may tell the answer: it has to be remembered over the whole story.
    events = [event for event in events if f" {asked} " not in event]
    context = " ".join([_opening(rng, cast), *events, rng.choice(_TIMES), asked])
    others = rng.sample([family for first, family in cast.items() if first != asked], 3)
    return _item(rng, "stories", context, f" {cast[asked]}", [f" {family}" for family in others])


# --- facts -------------------------------------------------------------------------------------------------------


def _facts_document(rng: random.Random) -> str:
    """What is true of a few towns, each fact in any form but the held-out one."""
    sentences = []
    for _ in range(rng.randint(4, 12)):
        town, attribute = rng.choice(TOWNS), rng.choice(tuple(TOWN_FORMS))
        forms = [f for i, f in enumerate(TOWN_FORMS[attribute]) if i != held_out_form(town, attribute)]
        sentences.append(f"{rng.choice(forms).format(town=town)} [{town_fact(town, attribute)}].")
    return " ".join(sentences)


def _facts_item(rng: random.Random) -> Item:
    town, attribute = rng.choice(TOWNS), rng.choice(tuple(TOWN_FORMS))
    form = TOWN_FORMS[attribute][held_out_form(town, attribute)]
    truth = town_fact(town, attribute)
    others = rng.sample([v for v in TOWN_VALUES[attribute] if v != truth], 3)
    return _item(rng, "facts", form.format(town=town), f" {truth}", [f" {v}" for v in others])


# --- arithmetic --------------------------------------------------------------------------------------------------


def _draw_sum(rng: random.Random, *, held_out: bool) -> tuple[str, int]:
    """A two-digit sum or difference, as text up to the equals sign, and its value (always 10 or more)."""
    while True:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        plus = rng.random() < 0.5
        # Addition is held out as an unordered pair: 12+34 must not give away 34+12.
        key = f"sum {min(a, b)} {max(a, b)}" if plus else f"difference {a} {b}"
        if (plus or a - b >= 10) and is_held_out(key) == held_out:
            return (f"{a}+{b}=", a + b) if plus else (f"{a}-{b}=", a - b)


def _arithmetic_document(rng: random.Random) -> str:
    sums = (_draw_sum(rng, held_out=False) for _ in range(rng.randint(6, 20)))
    return "Sums:" + ";".join(f"{text}[{value}]" for text, value in sums) + "."


def _arithmetic_item(rng: random.Random) -> Item:
    text, value = _draw_sum(rng, held_out=True)
    near = [value + d for d in (-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20) if value + d >= 10]
    return _item(rng, "arithmetic", f"Sums:{text}", str(value), [str(v) for v in rng.sample(near, 3)])


# --- agreement ---------------------------------------------------------------------------------------------------


def _draw_clause(rng: random.Random, *, held_out: bool) -> tuple[str, str, str]:
    """A subject phrase with one or two distracting nouns, the right verb phrase and the wrong one."""
    plural = rng.random() < 0.5
    subject = rng.choice(SUBJECTS) + ("s" if plural else "")
    verb = rng.randrange(len(VERBS) + len(AUXILIARIES))
    nouns: list[str] = []

    def draw() -> tuple[str, ...]:
        nouns[:] = [rng.choice(ATTRACTORS) + rng.choice(("", "s")) for _ in range(rng.randint(1, 2))]
        return ("clause", subject, *nouns, str(verb))

    _until(draw, held_out=held_out)
    phrase = " ".join(["The", subject, *(f"{rng.choice(PREPOSITIONS)} the {noun}" for noun in nouns)])
    if verb < len(VERBS):
        forms = (VERBS[verb] + "s", VERBS[verb])
        tail = rng.choice(ADVERBS)
    else:
        forms = AUXILIARIES[verb - len(VERBS)]
        tail = rng.choice(THINGS if forms[0] == "has" else COLOURS)
        tail = f"a {tail}" if forms[0] == "has" else tail
    return phrase, f"[{forms[plural]}] {tail}", f"[{forms[not plural]}] {tail}"


def _agreement_document(rng: random.Random) -> str:
    clauses = (_draw_clause(rng, held_out=False) for _ in range(rng.randint(4, 10)))
    return " ".join(f"{phrase} {right}." for phrase, right, _ in clauses)


def _agreement_item(rng: random.Random) -> Item:
    phrase, right, wrong = _draw_clause(rng, held_out=True)
    return _item(rng, "agreement", phrase, " " + split_marks(right)[0], [" " + split_marks(wrong)[0]])


# --- recall ------------------------------------------------------------------------------------------------------


def _draw_ledger(rng: random.Random, pairs: int, *, held_out: bool) -> dict[str, str]:
    """Distinct keys with distinct values."""

    def draw() -> tuple[str, ...]:
        return tuple(f"{k} {v}" for k, v in zip(rng.sample(KEYS, pairs), rng.sample(VALUES, pairs), strict=True))

    return dict(pair.split() for pair in _until(draw, held_out=held_out))


def _filler(rng: random.Random, sentences: int) -> str:
    """Clauses between the ledger and the questions, so that the answers are far away."""
    clauses = (_draw_clause(rng, held_out=False) for _ in range(sentences))
    return "".join(f"\n{phrase} {right}." for phrase, right, _ in clauses)


def _ledger_text(ledger: dict[str, str]) -> str:
    return "Ledger: " + ", ".join(f"{key} {value}" for key, value in ledger.items()) + "."


def _recall_document(rng: random.Random, long: bool) -> str:
    """A ledger and questions about it; small ledgers, asked again and again, are where the skill begins."""
    low, high = (24, 56) if long else rng.choice(((2, 5), (2, 5), (5, 14), (14, 40)))
    ledger = _draw_ledger(rng, rng.randint(low, high), held_out=False)
    filler = _filler(rng, rng.randint(0, 16) if long else rng.choice((0, 0, 0, 1, 2)))
    asked = rng.choices(list(ledger), k=rng.randint(8, 20))
    return f"{_ledger_text(ledger)}{filler}\nRecall: " + ", ".join(f"{key} [{ledger[key]}]" for key in asked) + "."


def _recall_item(rng: random.Random) -> Item:
    ledger = _draw_ledger(rng, rng.randint(36, 52), held_out=True)
    filler = split_marks(_filler(rng, rng.randint(8, 16)))[0]
    *warm, key = rng.sample(list(ledger), rng.randint(1, 4))
    recalled = "".join(f" {k} {ledger[k]}," for k in warm)
    truth = ledger[key]
    others = rng.sample([v for v in ledger.values() if v != truth], 3)
    context = f"{_ledger_text(ledger)}{filler}\nRecall:{recalled} {key}"
    return _item(rng, "recall", context, f" {truth}", [f" {v}" for v in others])
