"""Where a search works and what it writes: trials and numbers, a recipe, and the compressed model if it is kept."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantkit.bit_search.options import SearchOptions
from quantkit.errors import OutputError
from quantkit.output.staging import Stage, check_regular, open_stage
from quantkit.output.work_folder import WorkFolder, work_folder
from quantkit.output.writer import writing


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """All that a search writes, locked.

    Args:
        work: of trials and measured numbers.
        keep_work: it stays for further searches.
        recipe: stage of the recipe's file.
        checkpoint: stage of the compressed model; None = it is not kept.
    """

    work: WorkFolder
    keep_work: bool
    recipe: Stage
    checkpoint: Stage | None

    @property
    def draft(self) -> Path:
        """The recipe until everything is known; only then it gets its name."""
        return self.recipe.work.path / self.recipe.output.name

    def hand_over(self, trial: Path) -> None:
        """The recipe and what was asked for beside it take their places; the rest goes.

        Args:
            trial: the model compressed by the recipe, in the work folder.
        """
        with writing(self.recipe.output):
            self.recipe.promote(self.draft)
            if self.checkpoint is not None:
                shutil.move(trial, self.checkpoint.work.checkpoint)
                self.checkpoint.promote(self.checkpoint.work.checkpoint)
            if not self.keep_work:
                self.work.clear()


@contextmanager
def open_outputs(output: Path, options: SearchOptions) -> Iterator[Outputs]:
    """Refuse what is taken, before anything is spent, and lock the rest.

    Args:
        output: file of the recipe.
        options: of the search; without a `work` of its own, trials are kept in `<output>.search` until done.
    Raises:
        OutputError: one of them is somebody else's, a link, or being written by another process.
    """
    if output.suffix not in (".yaml", ".yml"):
        raise OutputError(f"output {output} is the recipe to write; give a name that ends in .yaml")
    with ExitStack() as stack:
        recipe = stack.enter_context(open_stage(output, "search", overwrite=options.overwrite, check=check_regular))
        model = None
        if options.checkpoint is not None:
            model = stack.enter_context(open_stage(options.checkpoint, "search", overwrite=options.overwrite))
        folder = options.work or output.with_name(f"{output.name}.search")
        work = stack.enter_context(work_folder(folder, "search", option="--work"))
        if not options.resume:
            work.clear()
        yield Outputs(work=work, keep_work=options.work is not None, recipe=recipe, checkpoint=model)
