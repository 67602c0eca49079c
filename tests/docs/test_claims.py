"""A measured figure needs the run that gave it: under evals/results, or it is no figure of these pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATED = ("accuracy.md", "models.md")  # by evals/pages.py, which tests/docs/test_pages.py repeats
PAGES = [path for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))) if path.name not in GENERATED]

# How measurements of speed, quality and memory read. What is printed as an example stands in code blocks.
MEASURED = (
    r"\d[\d.,]* (?:times|x) (?:transformers|llama|vLLM|the speed|as fast|faster|slower)",
    r"(?:half|twice|a third of|a quarter of) the time",
    r"\d[\d.,]* ?(?:tokens/s|ms per)",
    r"\d[\d.,]* % (?:off|less|fewer|faster|slower|at)",
    r"peak of \d",
    r"in \d[\d.,]* s\b",
    r"(?:takes?|costs?) (?:about |up to )?(?:an?|one|two|three|few) (?:(?:to|or) \w+ )?(?:second|minute|hour)s?",
)


def prose(text: str) -> str:
    # Sections that evals/pages.py makes.
    text = re.sub(r"<!-- (\w+): made by.*?<!-- \1: end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE).replace("\n", " ")


def claims(text: str) -> list[str]:
    return [match[0] for pattern in MEASURED for match in re.finditer(pattern, prose(text))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_claims_no_figure_that_is_not_kept(path):
    assert not claims(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "claim",
    [
        "Its decode is 8.2 times\ntransformers' bfloat16.",
        "AWQ in half the time of others",
        "converted at a peak of 774 MiB",
        "took 23 % off the KL",
        "done in 73 s",
        "needs no GPU and takes a minute or two",
    ],
)
def test_a_claim_is_noticed(claim):
    assert claims(claim)
    assert not claims(f"```\n{claim}\n```")
