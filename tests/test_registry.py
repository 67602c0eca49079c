"""Lookup by file name."""

from __future__ import annotations

import pkgutil

from quantkit import registry
from quantkit.models import families


def test_a_folder_is_listed_once(monkeypatch):
    """Where no file fits a model, every member is asked, and each of them was a listing of the folder."""
    listings, plain = [], pkgutil.iter_modules
    monkeypatch.setattr(registry.pkgutil, "iter_modules", lambda path: listings.append(path) or plain(path))
    registry._members.cache_clear()
    assert len(families.REGISTRY.all()) > 40
    assert families.REGISTRY.all().keys() == set(families.REGISTRY.names())
    assert len(listings) == 1


def test_names_are_no_ones_to_change():
    families.REGISTRY.names().clear()
    assert "llama" in families.REGISTRY.names()
