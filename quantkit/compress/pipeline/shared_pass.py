"""A model compressed by several recipes on one pass of calibration data; each as `quantize` does it, byte for byte.

For recipes that differ in their weights alone and have `calibration.inputs: original`: what enters a layer is then the
same for all. Interrupted, either of the two goes on with what the other has left.
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from quantkit.compress.pipeline.events import SILENT
from quantkit.compress.pipeline.finish import finish_run
from quantkit.compress.pipeline.identity import run_identity
from quantkit.compress.pipeline.inputs import read_samples
from quantkit.compress.pipeline.plan import build_plan
from quantkit.compress.pipeline.run import CompressionRun, calibrate_layers, computing, pick_mode
from quantkit.compress.pipeline.state import load_state
from quantkit.compress.recipe import Recipe
from quantkit.output.staging import Stage, open_stage
from quantkit.output.writer import writing


def quantize_together(model: str | None, recipes: Mapping[Path, Recipe], *, device: str) -> None:
    """Compress a model to several checkpoints, in one process; the same call goes on where it was interrupted.

    Args:
        model: directory or hub id; None = the bundled demo model.
        recipes: by the directory to write, which must not be there.
        device: "auto", "cpu", "cuda" or "cuda:<i>".
    Raises:
        InputError, ResourceError: as `quantize`.
    """
    started = time.perf_counter()
    plans = [build_plan(model, recipe, output, device) for output, recipe in recipes.items()]
    samples = read_samples(plans[0])
    assert samples is not None, "trials look at data"
    with ExitStack() as stack:
        stages: list[Stage] = []
        runs: list[CompressionRun] = []
        for plan in plans:
            stage = stack.enter_context(open_stage(plan.output, "quantize", overwrite=False, resumable=True))
            with writing(stage.work.path):
                state = load_state(stage.work, run_identity(plan, samples), resume=True)
            stages.append(stage)
            runs.append(CompressionRun(plan=plan, state=state, work=stage.work, listener=SILENT))
        resumed = [len(run.state.records) for run in runs]
        # Sums depend on the number of threads, and a trial that was interrupted has one already.
        threads = [run.state.identity["compute"]["threads"] for run in runs]
        for num_threads in dict.fromkeys(threads):
            alike = [run for run, own in zip(runs, threads, strict=True) if own == num_threads]
            with writing(alike[0].work.path), computing(alike[0].plan, alike[0].state):
                calibrate_layers(alike, samples, pick_mode("auto", alike[0].plan))
        for run, stage, layers in zip(runs, stages, resumed, strict=True):
            with writing(run.work.path), computing(run.plan, run.state):
                finish_run(
                    run.plan,
                    run.state,
                    run.work.checkpoint,
                    samples=samples,
                    resumed=layers,
                    warnings=(*run.plan.warnings, *samples.warnings),
                    started=started,
                )
                stage.promote(run.work.checkpoint)
