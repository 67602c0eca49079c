"""Run one job in several processes: rank and world size, collectives, and a common end.

Either torchrun or `launch`, which uses torch's launcher, starts the processes. Outside of `joined`, and in a job of one
process, `rank` is 0, `world` is 1, and collectives return their input. Callers decide how to divide the work and in
which order to sum; they guarantee that the result does not depend on the number of processes.
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
