"""Where a search works and what it writes: trials and numbers, a recipe, and the compressed model if it is kept."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoints.replaceable import check_regular
from quantkit.checkpoints.staging import Stage, open_stage
from quantkit.checkpoints.work_folder import WorkFolder, work_folder
from quantkit.checkpoints.writer import writing
from quantkit.errors import OutputError


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

    def hand_over(self, draft: Path, trial: Path | None) -> None:
        """The recipe and what was asked for beside it take their places; the rest goes.

        Args:
            draft: the finished recipe in the work folder.
            trial: the model compressed by it, there too.
        """
        with writing(self.recipe.output):
            file = self.recipe.work.path / self.recipe.output.name
            shutil.copyfile(draft, file)
            self.recipe.promote(file)
            if self.checkpoint is not None and trial is not None:
                shutil.move(trial, self.checkpoint.work.checkpoint)
                self.checkpoint.promote(self.checkpoint.work.checkpoint)
            if not self.keep_work:
                self.work.clear()


@contextmanager
def open_outputs(
    output: Path, checkpoint: Path | None, work: Path | None, *, resume: bool, overwrite: bool
) -> Iterator[Outputs]:
    """Refuse what is taken, before anything is spent, and lock the rest.

    Args:
        output: file of the recipe.
        checkpoint: directory of the compressed model; None = it is not kept.
        work: where trials are kept; None = `<output>.search`, until done.
        resume: go on with what is there; otherwise it is deleted.
        overwrite: replace an existing recipe or checkpoint.
    Raises:
        OutputError: one of them is somebody else's, a link, or being written by another process.
    """
    if output.suffix not in (".yaml", ".yml"):
        raise OutputError(f"output {output} is the recipe to write; give a name that ends in .yaml")
    with ExitStack() as stack:
        recipe = stack.enter_context(open_stage(output, "search", overwrite=overwrite, check=check_regular))
        model = None
        if checkpoint is not None:
            model = stack.enter_context(open_stage(checkpoint, "search", overwrite=overwrite))
        beside = output.with_name(f"{output.name}.search")
        folder = stack.enter_context(work_folder(work or beside, "search", option="--work"))
        if not resume:
            folder.clear()
        yield Outputs(work=folder, keep_work=work is not None, recipe=recipe, checkpoint=model)
