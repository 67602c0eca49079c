"""The demo language: deterministic, split cleanly into training and test, and true to its own text."""

from __future__ import annotations

import json
import random
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "evals" / "demo"))

import language  # noqa: E402
import make_tasks  # noqa: E402
import words  # noqa: E402

TASKS_DIR = REPOSITORY / "evals" / "tasks" / "demo"


def documents(kind: str, count: int, seed: str = "tests") -> list[str]:
    rng = random.Random(seed)
    return [language.document_of_kind(kind, rng, long=i % 2 == 1) for i in range(count)]


def plain(kind: str, count: int) -> list[str]:
    return [language.split_marks(raw)[0] for raw in documents(kind, count)]


def jsonl(task: str) -> list[dict]:
    return [json.loads(line) for line in (TASKS_DIR / f"demo_{task}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", language.TASKS)
def test_documents_are_a_function_of_the_seed(kind: str) -> None:
    assert documents(kind, 20, "a") == documents(kind, 20, "a")
    assert documents(kind, 20, "a") != documents(kind, 20, "b")


@pytest.mark.parametrize("kind", language.TASKS)
def test_documents_have_answers_and_no_blank_line(kind: str) -> None:
    for raw in documents(kind, 50):
        text, spans = language.split_marks(raw)
        assert spans
        assert "[" not in text
        assert "\n\n" not in text
        assert all(re.fullmatch(r"\w+", text[start:end]) for start, end in spans)


def test_split_marks_gives_the_spans_of_the_answers() -> None:
    text, spans = language.split_marks("a [bc] d [e].")
    assert text == "a bc d e."
    assert [text[start:end] for start, end in spans] == ["bc", "e"]
    assert language.split_marks("no marks") == ("no marks", [])


@pytest.mark.parametrize("task", language.TASKS)
def test_committed_items_are_the_generated_ones(task: str) -> None:
    rows = jsonl(task)
    assert len(rows) >= 500
    generated = language.held_out_items(task, len(rows))
    expected = [{"context": i.context, "choices": list(i.choices), "answer": i.answer} for i in generated]
    assert rows == expected


@pytest.mark.parametrize("task", language.TASKS)
def test_items_are_well_formed(task: str) -> None:
    rows = jsonl(task)
    assert len({row["context"] for row in rows}) == len(rows)
    for row in rows:
        assert len(set(row["choices"])) == len(row["choices"]) == (2 if task == "agreement" else 4)
        assert 0 <= row["answer"] < len(row["choices"])
        truth = row["choices"][row["answer"]]
        # With summed log-likelihoods a wrong choice that begins the right one would always win.
        assert not any(truth.startswith(c) for c in row["choices"] if c != truth)


def test_arithmetic_is_right_and_held_out() -> None:
    def value(sum_text: str) -> int:
        a, sign, b = re.fullmatch(r"(\d\d)([+-])(\d\d)", sum_text).groups()
        return int(a) + int(b) if sign == "+" else int(a) - int(b)

    trained = set()
    for text in plain("arithmetic", 2000):
        for equation in text.removeprefix("Sums:").removesuffix(".").split(";"):
            left, _, right = equation.partition("=")
            assert value(left) == int(right)
            trained.add(left)
    for row in jsonl("arithmetic"):
        left = row["context"].removeprefix("Sums:").removesuffix("=")
        assert value(left) == int(row["choices"][row["answer"]])
        assert left not in trained
        assert re.sub(r"(\d\d)\+(\d\d)", r"\2+\1", left) not in trained


def test_facts_never_appear_in_their_held_out_form() -> None:
    text = " ".join(plain("facts", 3000))
    assert not any(row["context"] + " " in text for row in jsonl("facts"))


def test_facts_are_told_consistently() -> None:
    for town in words.TOWNS[::7]:
        for attribute, values in words.TOWN_VALUES.items():
            assert words.town_fact(town, attribute) in values
    form = words.TOWN_FORMS["flag"][0].format(town="Belford")
    told = {m for text in plain("facts", 3000) for m in re.findall(rf"{form} (\w+)", text)}
    assert told <= {words.town_fact("Belford", "flag")}


def test_recall_answers_are_in_the_ledger() -> None:
    for row in jsonl("recall"):
        ledger = dict(pair.split() for pair in re.search(r"Ledger: (.*?)\.", row["context"]).group(1).split(", "))
        key = row["context"].split()[-1]
        assert row["choices"][row["answer"]].strip() == ledger[key]
        assert set(map(str.strip, row["choices"])) <= set(ledger.values())
        assert row["context"].count(f" {key} ") == 1


def families(story: str) -> dict[str, str]:
    """First name to family name, as the opening sentence of a story tells it."""
    opening = story.split(" met.")[0]
    people = [person.split()[-2:] for person in opening.split(" and ")]
    return dict(people)


def test_story_answers_are_told_by_the_opening_only() -> None:
    for row in jsonl("stories"):
        cast, first = families(row["context"]), row["context"].split()[-1]
        assert row["choices"][row["answer"]] == f" {cast[first]}"
        assert set(map(str.strip, row["choices"])) <= set(cast.values())
        assert row["context"].count(f" {first} ") == 1


def test_stories_keep_their_characters_consistent() -> None:
    for text in plain("stories", 200):
        cast = families(text)
        tokens = text.split()
        assert len(set(cast.values())) == len(cast)
        assert all(cast[first] == then for first, then in pairwise(tokens) if first in cast)


def test_test_stories_and_clauses_are_not_in_training() -> None:
    trained = {frozenset(families(text).items()) for text in plain("stories", 2000)}
    assert not any(frozenset(families(row["context"]).items()) in trained for row in jsonl("stories"))
    clauses = " ".join(plain("agreement", 1000) + plain("recall", 200))
    for row in jsonl("agreement"):
        assert row["context"] + row["choices"][row["answer"]] not in clauses


def test_agreement_follows_the_subject() -> None:
    for row in jsonl("agreement"):
        plural = row["context"].split()[1].endswith("s")
        verb = row["choices"][row["answer"]].split()[0]
        assert verb in ({"are", "were", "have"} | set(words.VERBS)) if plural else verb.endswith("s")


def test_calibration_text_is_committed_as_generated() -> None:
    text = make_tasks.CALIBRATION.read_text()
    assert text == make_tasks.calibration_text()
    assert 200_000 < len(text) < 500_000
    assert all(document.strip() for document in text.rstrip("\n").split("\n\n"))
