"""Ministral, counted only: Mistral where config.json may list which layers have the window."""

from quantkit.models.family import Family, Window

FAMILY = Family(window=Window(rule="listed"), defaults={"sliding_window": 4096}, native=False)
