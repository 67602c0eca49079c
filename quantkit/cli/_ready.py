"""What each process of a compression imports, imported once: `launch` forks them from a process that has it."""

import contextlib
import os

from quantkit.checkpoints.memory import importing, spare_memory
from quantkit.cli._memory import guard_imports

# What fails here fails again where it is told.
with contextlib.suppress(Exception):
    guard_imports()
    # Has torch look for GPUs in a way that leaves them to the processes to be forked.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        with importing("torch"):
            import quantkit.compress.recipe
        spare_memory()
        import quantkit.compress.pipeline.run  # noqa: F401
    finally:
        del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
