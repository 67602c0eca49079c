"""How OpenMP's idle threads wait, which is said in the environment before torch is imported."""

import os


def sleep_soon() -> None:
    """They would spin for milliseconds, so that answers come sooner; what answers nobody only loses CPU time by it."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
