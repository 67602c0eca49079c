"""Look up the modules of a package by file name. Every public module is a member, which is imported on first use.

A new module is found without entry points, decorators or import side effects.
"""

import functools
import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any

from quantkit.errors import InputError, suggestion


@dataclass(frozen=True, kw_only=True, slots=True)
class Registry:
    """The modules of one package. Each module defines one object; its attribute name is the same in all modules.

    Args:
        package: dotted package name, e.g. "quantkit.formats".
        attribute: name of the object that every module defines, e.g. "FORMAT".
        noun: what messages call a member, e.g. "format".
    """

    package: str
    attribute: str
    noun: str

    def names(self) -> list[str]:
        """Return the sorted names of all members (not `base`, private modules or folders) without importing them."""
        return list(_members(tuple(importlib.import_module(self.package).__path__)))

    def find(self, name: str) -> str:
        """Return the name of a member without importing it; hyphens and underscores are equivalent.

        Raises:
            InputError: there is no such member; the message lists the names and suggests the nearest.
        """
        key, names = name.replace("_", "-"), self.names()
        if key not in names:
            raise InputError(f"unknown {self.noun} {name!r}{suggestion(key, names)}; available: {', '.join(names)}")
        return key

    def load(self, name: str) -> Any:
        """Import the member called `name` and return its object; raises the errors of `find`."""
        module = importlib.import_module(f"{self.package}.{self.find(name).replace('-', '_')}")
        return getattr(module, self.attribute)

    def all(self) -> dict[str, Any]:
        """Import all members and return their objects, keyed by name."""
        return {name: self.load(name) for name in self.names()}


@functools.cache
def _members(folders: tuple[str, ...]) -> list[str]:
    """Return the names of the members in a package's folders; the result is cached."""
    modules = (module.name for module in pkgutil.iter_modules(folders) if not module.ispkg)
    return sorted(name.replace("_", "-") for name in modules if name != "base" and not name.startswith("_"))
