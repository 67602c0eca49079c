"""Files of a search: measured numbers, trials, the recipe, and the compressed model if the user asked for it.

A search that was interrupted continues from its measured numbers. The file that holds them records the identity of the
search: a search for a different model, recipe, text or version refuses the file.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.bit_search.options import SearchOptions, SearchTarget
from quantkit.compress.pipeline.state import START_OVER, read_state, refuse_changes, write_state
from quantkit.errors import OutputError, ResumeError
from quantkit.formats import REGISTRY as FORMATS
from quantkit.machine.devices import MAX_THREADS, threads_within_quota
from quantkit.output.staging import Stage, check_checkpoint, check_gguf, check_regular, open_stage
from quantkit.output.work_folder import WorkFolder, work_folder
from quantkit.output.writer import writing


class SearchState:
    """Measured numbers, each with a key, saved after every measurement.

    Args:
        path: path of the file; read if it exists.
        identity: everything that determines the numbers, as plain data.
    Raises:
        ResumeError: the file belongs to a search with a different identity, or is damaged.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self._path, self._identity = path, json.loads(json.dumps(identity))  # tuples become lists, as in the saved file
        self._numbers: dict[str, float] = {}
        self.threads = threads_within_quota()  # the thread count of the first measurement
        self.resumed = 0
        if path.exists():
            self._read()
        path.parent.mkdir(parents=True, exist_ok=True)

    def get(self, key: str, measure: Callable[[], float]) -> float:
        """Return the number saved under a key; measure it first if there is none.

        Args:
            key: description of what is measured.
            measure: function that measures the number.
        """
        if key not in self._numbers:
            self._numbers[key] = measure()
            # Saved at once: a measurement takes seconds to minutes, and the search may be killed at any time.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """Locked output paths of a search.

    Args:
        work: folder of the trials and the measured numbers.
        keep_work: whether to keep the folder `work` for further searches.
        recipe: stage of the recipe's file.
        checkpoint: stage of the compressed model; None = do not keep the model.
    """

    work: WorkFolder
    keep_work: bool
    recipe: Stage
    checkpoint: Stage | None

    @property
    def draft(self) -> Path:
        """Temporary path of the recipe, until the search is complete."""
        return self.recipe.work.path / self.recipe.output.name

    @property
    def recipe_name(self) -> str:
        """Name of the recipe, after its file."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.recipe.output.stem).lstrip("._-") or "searched"

    def hand_over(self, trial: Path) -> None:
        """Move the recipe, and the checkpoint if one was requested, to their final paths; delete the work folder.

        A work folder that the user named with `--work` stays.

        Args:
            trial: folder or GGUF file of the model that was compressed with the recipe.
        """
        with writing(self.recipe.output):
            self.recipe.promote(self.draft)
            if self.checkpoint is not None:
                shutil.move(trial, self.checkpoint.work.checkpoint)
                self.checkpoint.promote(self.checkpoint.work.checkpoint)
            if not self.keep_work:
                self.work.clear()


@contextmanager
def open_outputs(model: str | None, target: SearchTarget, options: SearchOptions) -> Iterator[Outputs]:
    """Lock the output paths before the search starts; refuse paths that must not be overwritten.

    Args:
        model: directory or hub id; None = the demo model.
        target: target of the search.
        options: options of the search; without `work`, trials are kept in `<output>.search` until the search is done.
    Raises:
        OutputError: a path is a link, holds something that quantkit did not make, or is in use by another process; or
            the recipe's name does not end in .yaml or .yml.
    """
    name = "demo" if model is None else Path(model).name or Path(model).resolve().name
    # ./demo-bits-4.5.yaml, ./demo-bits-4.5-kv_bits-4.yaml
    output = options.output or Path(f"{name}-{re.sub('[<>]=|, ', '-', target.text)}.yaml")
    if output.suffix not in (".yaml", ".yml"):
        raise OutputError(f"output {output} must be a recipe file; give a name that ends in .yaml")
    with ExitStack() as stack:
        recipe = stack.enter_context(open_stage(output, "search", overwrite=options.overwrite, check=check_regular))
        kept = None
        if options.checkpoint is not None:
            check = check_gguf if FORMATS.load(options.recipe.format).suffix else check_checkpoint
            opened = open_stage(options.checkpoint, "search", overwrite=options.overwrite, check=check)
            kept = stack.enter_context(opened)
        folder = options.work or output.with_name(f"{output.name}.search")
        work = stack.enter_context(work_folder(folder, "search", option="--work"))
        if not options.resume:
            work.clear()
        yield Outputs(work=work, keep_work=options.work is not None, recipe=recipe, checkpoint=kept)
