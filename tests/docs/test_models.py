"""docs/models.md and README's sentence on models are what the kept rows say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "evals" / "checks"))

import models_page  # noqa: E402


def test_the_page_is_made_of_the_rows():
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    assert page == models_page.render(models_page.newest()), "python evals/checks/every_model.py --page"


def test_the_readme_says_the_number():
    said = re.findall(models_page.SENTENCE, (ROOT / "README.md").read_text(encoding="utf-8"))
    assert said == [models_page.sentence(models_page.newest())]
