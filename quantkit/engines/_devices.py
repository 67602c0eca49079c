"""What rules know of a device by its name: the compute capability, or that it is a CPU."""

from quantkit.engines.base import AMX, CPU, OTHER
from quantkit.errors import InputError, suggestion

# Of NVIDIA's documentation, "CUDA GPUs".
_CAPABILITIES = {
    100: ("b200",),
    120: ("5090",),
    90: ("h200", "gh200", "h100", "h100-nvl", "h100-pcie", "h20"),
    89: ("l40s", "l4", "4090", "4080"),
    86: ("a10", "a6000", "3090"),
    80: ("a100", "a100-pcie", "a100-40gb"),
    75: ("t4",),
    70: ("v100",),
    CPU: ("cpu",),
    AMX: ("cpu-amx",),
    OTHER: ("mi300x",),
}
DEVICES = {name: capability for capability, names in _CAPABILITIES.items() for name in names}
"""Compute capability times ten by name, or `CPU`, `AMX` or `OTHER`."""


def device_key(name: str) -> str:
    """A name as tables have it: upper case and a maker's name in front do not matter."""
    key = name.lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-").removeprefix("amd-")
    return key.removeprefix("rtx-").removeprefix("rtx")


def find_capability(name: str) -> int:
    """What rules are asked about for a device.

    Raises:
        InputError: no such device; suggests the nearest.
    """
    key = device_key(name)
    if key not in DEVICES:
        raise InputError(f"unknown device {name!r}{suggestion(key, DEVICES)}; there are: {', '.join(DEVICES)}")
    return DEVICES[key]
