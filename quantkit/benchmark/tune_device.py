"""`quantkit tune` without its command line: the GPU of this machine, its file, and which files are in force.

The search is in `tune`, what is searched in `tune_cases`, how it runs in `tune_problems`.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from quantkit.benchmark.options import TuneOptions
from quantkit.benchmark.tune import CaseReport, Tuning, tune
from quantkit.benchmark.tune_cases import cases_of, read_shapes
from quantkit.benchmark.tune_problems import opener
from quantkit.devices import pick_device
from quantkit.errors import InputError
from quantkit.kernels import gpu
from quantkit.kernels.gpu import configs, tuned
from quantkit.registry import installed_version


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedFile:
    """A file of tuned choices, there or not.

    Args:
        path: where.
        device: the GPU that it is for.
        is_here: whether this machine has that GPU.
        table: what it holds; None where it cannot be used, or is not there.
        problem: why it cannot be used.
    """

    path: Path
    device: str
    is_here: bool
    table: tuned.TunedTable | None
    problem: str = ""

    @property
    def is_in_force(self) -> bool:
        """Whether launches here ask it."""
        return self.is_here and self.table is not None


def tune_device(options: TuneOptions, *, report: CaseReport = lambda outcome, number, total: None) -> Tuning:
    """Measure on a GPU of this machine, and write its file.

    Args:
        options: what; without an output, the user's file for that GPU is written, which launches ask from then on.
        report: see `tune`.
    Raises:
        InputError: there is no CUDA device or no Triton, or what `tune` and `read_shapes` raise.
        OutputError: the file cannot be written.
    """
    gpu_device = find_gpu(options.device)
    shapes = read_shapes(options)
    name, chip = torch.cuda.get_device_name(gpu_device), gpu.capability(gpu_device)
    path = options.output or tuned.user_file(name)
    fresh = tuned.TunedTable(device=name, capability=chip, versions=versions(), entries=(), path=path)
    cases, problems = cases_of(shapes, options, chip), opener(gpu_device, torch.bfloat16)
    with torch.inference_mode(), torch.cuda.device(gpu_device):
        tuning = tune(cases, problems, fresh, seconds=options.seconds, again=options.again, report=report)
    # Choices are cached in the process, and the file has just changed.
    configs.forget()
    return tuning


def find_gpu(name: str) -> torch.device:
    """The CUDA device that is meant.

    Raises:
        InputError: there is none, or no Triton.
    """
    device = pick_device(name)
    if device.type != "cuda":
        raise InputError("there is no CUDA device here to tune for; run this on the machine with the GPU")
    if not gpu.is_installed():
        raise InputError("Triton is not installed, so there is nothing to tune; pip install 'quantkit[cuda]'")
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def versions() -> dict[str, str]:
    """Of what a measurement depends on."""
    # Another compiler may make another choice the fastest, so figures of different versions are not mixed.
    others = {name: installed_version(name, "not installed") for name in ("quantkit", "triton")}
    return {"torch": str(torch.__version__), **others}


def find_files() -> list[TunedFile]:
    """The files of this machine's GPUs, there or not, then those of other GPUs; the user's before shipped ones."""
    here = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    files = {
        path: _tuned_file(path, name)
        for name in dict.fromkeys(here)
        for path in (tuned.user_file(name), tuned.shipped_file(name))
    }
    for folder in (tuned.user_folder(), tuned.shipped_folder()):
        files |= {path: _tuned_file(path, None) for path in sorted(folder.glob("*.json")) if path not in files}
    return list(files.values())


def _tuned_file(path: Path, name: str | None) -> TunedFile:
    if name is not None and not path.exists():
        return TunedFile(path=path, device=name, is_here=True, table=None)
    try:
        table = tuned.read(path, name)
    except InputError as error:
        return TunedFile(path=path, device=name or path.stem, is_here=name is not None, table=None, problem=str(error))
    return TunedFile(path=path, device=table.device, is_here=name is not None, table=table)
