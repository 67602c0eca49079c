"""Run one job in several processes: start and end them, number them by rank, and exchange data between them.

The processes are started by torchrun, or by `launch`, which uses torch's launcher. Outside of `joined`, and in a job of
one process, `rank` is 0, `world` is 1, and collectives return their input. Callers decide how to divide the work and in
which order to sum. They must make sure that the result does not depend on the number of processes.
"""

from quantkit.distributed.collectives import assign_work, barrier, broadcast, exchange, fill, gather, share_out
from quantkit.distributed.job import is_launched, is_writer, joined, launch, rank, world

__all__ = [
    "assign_work",
    "barrier",
    "broadcast",
    "exchange",
    "fill",
    "gather",
    "is_launched",
    "is_writer",
    "joined",
    "launch",
    "rank",
    "share_out",
    "world",
]
