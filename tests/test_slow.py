"""The list of slow tests names tests that there are."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent


def test_whatever_is_listed_is_there():
    listed = [line.partition("[")[0].split("::") for line in (TESTS / "slow.txt").read_text().splitlines()]
    sources = {file: (TESTS / file).read_text() for file, _ in listed}
    gone = [f"{file}::{name}" for file, name in listed if f"def {name}(" not in sources[file]]
    assert gone == [], "tests/slow.txt lists these; take them out"
