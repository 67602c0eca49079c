"""What a file is: one file per on-disk format, both directions."""

from quantkit.registry import Registry

__all__ = ["REGISTRY"]

REGISTRY = Registry(package=__name__, attribute="FORMAT", noun="format")
