"""Reading single entries of config.json: kinds are checked, and what is wrong is said with the key and the value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quantkit.errors import ModelError


class NotNative(ModelError):
    """The model asks for something that this runtime does not compute, but transformers may.

    Args:
        what: the key and its value.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"config.json: {what} is not computed natively; use backend='transformers'")


class Settings:
    """The entries of a config.json, with a family's defaults behind them.

    A null counts as absent, but not as a wish for the family's default: `attn_logit_softcapping: null` means none.

    Args:
        config: contents of config.json.
        defaults: values of keys that it lacks.
        where: how the entries are called in messages.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any], where: str = "config.json") -> None:
        self._config, self._defaults, self._where = config, defaults, where

    def get(self, *keys: str) -> Any:
        """The first of these keys that is there, else the first default of them, else None."""
        for key in keys:
            if self._config.get(key) is not None:
                return self._config[key]
        if any(key in self._config for key in keys):
            return None
        return next((self._defaults[key] for key in keys if key in self._defaults), None)

    def count(self, *keys: str, default: int | None = None, at_least: int = 1) -> int:
        """A whole number.

        Raises:
            ModelError: it is missing without a default, no whole number, or too small.
        """
        value = self._found(keys, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise ModelError(f"{self._where}: {keys[0]} is {value!r}, not a whole number of at least {at_least}")
        return value

    def number(self, *keys: str | None, default: float | None = None) -> float:
        """A finite number; a key of None is one that the family does not have.

        Raises:
            ModelError: it is missing without a default, or no finite number.
        """
        names = tuple(key for key in keys if key is not None)
        value = self._found(names, default) if names else default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ModelError(f"{self._where}: {names[0]} is {value!r}, not a finite number")
        return float(value)

    def optional_number(self, key: str | None) -> float | None:
        """A finite number, or None where there is none."""
        return None if key is None or self.get(key) is None else self.number(key)

    def flag(self, key: str | bool | None, default: bool) -> bool:
        """Whether an entry is set to something true; a constant stands for itself, None for the default."""
        if not isinstance(key, str):
            return default if key is None else key
        value = self.get(key)
        return default if value is None else bool(value)

    def text(self, *keys: str, default: str) -> str:
        """A string.

        Raises:
            ModelError: it is something else.
        """
        value = self._found(keys, default)
        if not isinstance(value, str):
            raise ModelError(f"{self._where}: {keys[0]} is {value!r}, not a name")
        return value

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of this many finite numbers.

        Raises:
            ModelError: it is missing or something else.
        """
        value = self._found((key,), None)
        if not isinstance(value, list) or len(value) != count:
            size = f" of {len(value)}" if isinstance(value, list) else ""
            raise ModelError(f"{self._where}: {key} is a {type(value).__name__}{size}, not a list of {count} numbers")
        return tuple(Settings({key: item}, {}, self._where).number(key) for item in value)

    def _found(self, keys: tuple[str, ...], default: Any) -> Any:
        value = self.get(*keys)
        if value is None and default is None:
            raise ModelError(f"{self._where}: {keys[0]!r} is missing; copy the original config.json again")
        return default if value is None else value
