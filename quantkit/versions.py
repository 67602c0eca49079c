"""Which version of a package is installed."""

from __future__ import annotations

import importlib.metadata


def installed_version(package: str, otherwise: str = "unknown") -> str:
    """The version of a package by the name that pip knows; `otherwise` where it is not installed, only importable."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return otherwise
