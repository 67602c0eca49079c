"""The site's navigation against the pages; `mkdocs build --strict` in .ci/run checks links and anchors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
SITE = ROOT / "website"
SECTIONS = ["Start", "Guides", "Reference", "How it works", "Results"]


class Loader(yaml.SafeLoader):
    """Reads Python tags, such as that of the function that makes anchors, as plain data."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, _, node: loader.construct_mapping(node))


def navigation() -> list[dict[str, Any]]:
    return yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]


def pages(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from pages(part)


def test_every_page_is_in_the_navigation_once():
    written = [str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]]
    assert sorted(pages(navigation())) == sorted(written)
    assert [title for section in navigation() for title in section] == SECTIONS


def test_the_site_shows_the_repository_s_own_files():
    links = [path for path in SITE.iterdir() if path.is_symlink()]
    assert links == list(SITE.iterdir())
    assert all(path.resolve() == (ROOT / path.name).resolve() and path.exists() for path in links)
