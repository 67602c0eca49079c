"""README and the pages with figures are what evals/results gives, and README shows none that is stale."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "evals"))

import pages  # noqa: E402
import provenance  # noqa: E402


@pytest.mark.parametrize("name", pages.PAGES)
def test_a_page_is_what_the_results_give(name):
    before, after = pages.rewritten(name)
    assert before == after, "run: python evals/pages.py --write"


def test_the_readme_shows_no_stale_figure():
    assert provenance.MARK not in (ROOT / "README.md").read_text(encoding="utf-8")


def test_what_stands_between_the_two_comments_is_replaced():
    begin, end = "<!-- x: made by evals/pages.py -->\n", "<!-- x: end -->\n"
    page = f"a\n{begin}old\n{end}b\n"
    assert pages.section(page, "x", "new\nlines") == f"a\n{begin}new\nlines\n{end}b\n"
    assert pages.section(page, "x", "") == f"a\n{begin}{end}b\n"
    with pytest.raises(SystemExit, match="y: made by"):
        pages.section(page, "y", "new")


def test_what_compression_costs_is_said_on_one_page_alone():
    """Costs in docs/accuracy.md are of other models than those in docs/performance.md; a search is no row there."""
    works = pages.generator("cost/works.py").WORKS
    models = pages.generator("accuracy/rows.py").MODELS
    assert not {work.model for work in works if work.target is None} & {model.name for model in models}


def test_the_readme_counts_the_models_of_the_rows():
    """A sentence that is written otherwise would not be replaced."""
    rows = pages.generator("page_sections/models_page.py")
    assert rows.sentence(rows.newest()) in (ROOT / "README.md").read_text(encoding="utf-8")
