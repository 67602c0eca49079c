"""What a search has measured so far, in a file: a search that is killed goes on from there.

Numbers are keyed by what was measured; the identity of the search is kept with them, and one of another model, recipe,
text or version is refused.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantkit.compress.pipeline.identity import START_OVER, read_state, refuse_changes, write_state
from quantkit.errors import ResumeError
from quantkit.machine.devices import MAX_THREADS, threads_within_quota


class SearchState:
    """MeasuredGroups numbers by key; saved after every one.

    Args:
        path: of the file; read if it is there.
        identity: everything that decides the numbers, as plain data.
    Raises:
        ResumeError: the file is of another search, or damaged.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self._path, self._identity = path, json.loads(json.dumps(identity))  # tuples as lists, as it is read again
        self._numbers: dict[str, float] = {}
        self.threads = threads_within_quota()  # that the first of them was measured with
        self.resumed = 0
        if path.exists():
            self._read()
        path.parent.mkdir(parents=True, exist_ok=True)

    def get(self, key: str, measure: Callable[[], float]) -> float:
        """The number under a key, measured now if it is not known.

        Args:
            key: what it is of.
            measure: makes it.
        """
        if key not in self._numbers:
            self._numbers[key] = measure()
            # At once: measuring takes seconds to minutes, and a kill may come at any time.
            write_state(self._path, {"identity": self._identity, "threads": self.threads, "numbers": self._numbers})
        return self._numbers[key]

    def _read(self) -> None:
        saved = read_state(self._path)
        try:
            self._numbers = {str(key): float(value) for key, value in saved["numbers"].items()}
            self.threads = min(max(1, int(saved.get("threads", self.threads))), MAX_THREADS)
            identity = saved["identity"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ResumeError(f"{self._path} is damaged ({error}); {START_OVER}") from error
        refuse_changes(
            identity, self._identity, f"the search in {self._path.parent}", f"give another --work, or {START_OVER}"
        )
        self.resumed = len(self._numbers)
