"""GPTQ version 1, which every loader of GPTQ files reads: symmetric weights, the zero point stored minus one.

A zero point of 0 would be stored as -1, which does not fit; asymmetric weights therefore go to version 2 (`gptq_v2`).
Reading takes asymmetric ones too, as other tools have written them.
"""

from quantkit.formats._gptq import GPTQ

FORMAT = GPTQ(name="gptq", version="gptq", zero_offset=1)
