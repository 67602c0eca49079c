"""The name of the distribution: one constant, which pyproject.toml, messages and pages agree with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from quantkit.distribution import DISTRIBUTION, install_command

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEXTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("quantkit/**/*.py"))]


def test_the_constant_is_the_name_in_pyproject():
    assert PROJECT["name"] == DISTRIBUTION
    assert install_command("serve") == "pip install 'quantkit-lm[serve]'"


def test_every_extra_that_is_named_exists():
    """Nothing tells a user to install `quantkit`, which is another project's name."""
    named = set()
    for path in TEXTS:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pip install ['\"]?quantkit(?![\w-])", text), path
        assert "quantkit[" not in re.sub(r"```.*?```", "", text, flags=re.DOTALL), path
        named |= set(re.findall(rf"{DISTRIBUTION}\[([\w,]+)\]|install_command\(['\"](\w+)['\"]\)", text))
    extras = {extra for pair in named for text in pair if text for extra in text.split(",")}
    assert len(extras) >= 4
    assert extras <= set(PROJECT["optional-dependencies"])


def test_the_version_has_one_home():
    assert "version" in PROJECT
    assert "version" not in PROJECT.get("dynamic", [])
    assert not re.search(r"^__version__ *=", (ROOT / "quantkit/__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert not re.search(r"^version:", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
