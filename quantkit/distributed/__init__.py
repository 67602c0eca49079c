"""Several processes that do one job: which of them this is, what they tell each other, and that they end together.

The processes are those that torchrun starts, or `launch`, which asks torch for the same. Outside of `joined`, and in a
job of one, there is nobody to talk to: `rank` is 0, `world` 1, and what is told comes back as it is. Not how work is
cut: what is summed in which order is for those who know the work; what they promise is that the result does not depend
on the number of processes.
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
