"""A measured figure needs the run that gave it: under evals/results, or it is no figure of these pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATED = ("accuracy.md",)  # from evals/results by evals/accuracy/page.py, which a test repeats
PAGES = [path for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))) if path.name not in GENERATED]

# How measurements of speed, quality and memory read. What is printed as an example stands in code blocks.
MEASURED = (
    r"\d[\d.,]* (?:times|x) (?:transformers|llama|vLLM|the speed|as fast|faster|slower)",
    r"(?:half|twice|a third of|a quarter of) the time",
    r"\d[\d.,]* ?(?:tokens/s|ms per)",
    r"\d[\d.,]* % (?:off|less|fewer|faster|slower|at)",
    r"peak of \d",
    r"in \d[\d.,]* s\b",
)


def prose(text: str) -> str:
    text = re.sub(
        r"<!-- gpu.*?<!-- gpu: end -->", "", text, flags=re.DOTALL
    )  # made by evals/gpu/page.py, a test of its own
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
    ],
)
def test_a_claim_is_noticed(claim):
    assert claims(claim)
    assert not claims(f"```\n{claim}\n```")


def test_the_standing_beside_other_tools_is_that_of_the_rows():
    """The sum over the models of docs/accuracy.md, which is made from evals/results/accuracy."""
    accuracy = (ROOT / "docs/accuracy.md").read_text(encoding="utf-8")
    number = r"(\d+) ahead, (\d+) level, (\d+) behind"
    lines = re.findall(rf"of (\d+) rows: perplexity {number}; KL {number}\.", accuracy)
    total, *signs = (sum(map(int, column)) for column in zip(*lines, strict=True))
    words = "{} ahead, {} level, {} behind"
    promises = " ".join((ROOT / "docs/promises.md").read_text(encoding="utf-8").split())
    assert f"on {total} rows" in promises
    assert f"KL to the original: {words.format(*signs[3:])}. Perplexity: {words.format(*signs[:3])}." in promises
