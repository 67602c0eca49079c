"""Lookup by file name: dropping a module into a package registers it, and it is imported on first use.

Not a plug-in system: there are no entry points, decorators or import side effects. Also what version of a library is
installed.
"""

import functools
import importlib
import pkgutil
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from quantkit.errors import InputError, suggestion


@dataclass(frozen=True, kw_only=True, slots=True)
class Registry:
    """The modules of one package, each exposing one object under the same attribute name.

    Args:
        package: dotted package name, e.g. "quantkit.formats".
        attribute: what every module of it defines, e.g. "FORMAT".
        noun: what a member is called in messages, e.g. "format".
    """

    package: str
    attribute: str
    noun: str

    def names(self) -> list[str]:
        """Sorted names of all members, without importing them; `base` and private modules are none."""
        return list(_members(tuple(importlib.import_module(self.package).__path__)))

    def find(self, name: str) -> str:
        """The name of the member called `name`, which is not imported; hyphens and underscores are the same.

        Raises:
            InputError: no such member; the message lists the names and suggests the nearest.
        """
        key, names = name.replace("_", "-"), self.names()
        if key not in names:
            raise InputError(f"unknown {self.noun} {name!r}{suggestion(key, names)}; there are: {', '.join(names)}")
        return key

    def load(self, name: str) -> Any:
        """The member called `name`; raises as `find`."""
        module = importlib.import_module(f"{self.package}.{self.find(name).replace('-', '_')}")
        return getattr(module, self.attribute)

    def all(self) -> dict[str, Any]:
        """Every member by name; imports them all."""
        return {name: self.load(name) for name in self.names()}


@functools.cache
def _members(folders: tuple[str, ...]) -> list[str]:
    """Names of the members in a package's folders, which are listed once: a look-up asks for each member's name."""
    modules = (module.name for module in pkgutil.iter_modules(folders))
    return sorted(name.replace("_", "-") for name in modules if name != "base" and not name.startswith("_"))


def installed_version(name: str, absent: str) -> str:
    """Version of an installed package; `absent` where it is not, as quantkit itself in a source checkout."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return absent
