"""Lookup by file name."""

from __future__ import annotations

import pkgutil

from quantkit import registry
from quantkit.compress import algorithms


def test_a_folder_is_listed_once(monkeypatch):
    """Each look-up of a member was a listing of the folder."""
    listings, plain = [], pkgutil.iter_modules
    monkeypatch.setattr(registry.pkgutil, "iter_modules", lambda path: listings.append(path) or plain(path))
    registry._members.cache_clear()
    assert len(algorithms.REGISTRY.all()) > 5
    assert algorithms.REGISTRY.all().keys() == set(algorithms.REGISTRY.names())
    assert len(listings) == 1


def test_names_are_no_ones_to_change():
    algorithms.REGISTRY.names().clear()
    assert "gptq" in algorithms.REGISTRY.names()
