"""Data sheet figures of devices: memory, bandwidth and dense peaks.

Data sheet figures give lower bounds on time. Real copies reach about 90 % of the bandwidth, and large products 70 to 80
% of the peak. Give measured figures with --bandwidth and --peak. A test checks that every row is complete and
plausible.
"""

from dataclasses import dataclass, replace

from quantkit.errors import InputError, suggestion

CPU, AMX, OTHER = 0, 1, -1
"""Values in place of a compute capability: any CPU, a CPU with AMX tiles, and a device without rules."""
CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)
"""Compute capabilities (times ten) of NVIDIA GPUs that rules distinguish."""
MIB, GB, TFLOP = 2**20, 10**9, 10**12


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator.

    Args:
        name: name for --device.
        title: full name of the device.
        memory_bytes: memory that the driver reports.
        bandwidth: bytes per second.
        peaks: operations per second without sparsity, keyed by number type; types without hardware units are missing.
        source: document that the figures come from.
        capability: compute capability times ten, or `OTHER`; None = unknown.
    """

    name: str
    title: str
    memory_bytes: int
    bandwidth: float
    peaks: dict[str, float]
    source: str
    capability: int | None = None

    def peak(self, compute: str) -> float:
        """Return the peak operations per second in a number type, or in 16 bits if the device has no units for the
        type.
        """
        return self.peaks.get(compute, self.peaks["bf16"])


def _device(
    name: str, capability: int | None, title: str, mib: int, gb_per_s: float, source: str = "", **teraflops: float
) -> Device:
    maker, model = title.split()[:2]
    return Device(
        name=name,
        title=title,
        memory_bytes=mib * MIB,
        bandwidth=gb_per_s * GB,
        peaks={key: value * TFLOP for key, value in teraflops.items()},
        source=source or f"{maker} {model} data sheet",
        capability=capability,
    )


_ADA, _GA102 = "NVIDIA Ada architecture white paper, appendix A", "NVIDIA GA102 architecture white paper"
_B200, _RTX_50 = "NVIDIA HGX B200 data sheet", "NVIDIA RTX Blackwell white paper"
# Compute capabilities are those of NVIDIA's page "CUDA GPUs".
_ROWS = (
    _device("b200", 100, "NVIDIA B200 180GB", 183359, 8000, _B200, bf16=2250, fp8=4500, int8=4500, fp4=9000),
    _device("h200", 90, "NVIDIA H200 SXM 141GB", 143771, 4800, bf16=989.5, fp8=1979, int8=1979),
    _device("gh200", 90, "NVIDIA GH200 96GB", 97871, 4000, bf16=989.5, fp8=1979, int8=1979),
    _device("h100", 90, "NVIDIA H100 SXM 80GB", 81559, 3350, bf16=989.5, fp8=1979, int8=1979),
    _device("h100-nvl", 90, "NVIDIA H100 NVL 94GB", 95830, 3900, bf16=835.5, fp8=1671, int8=1671),
    _device("h100-pcie", 90, "NVIDIA H100 PCIe 80GB", 81559, 2000, bf16=756, fp8=1513, int8=1513),
    _device("h20", 90, "NVIDIA H20 96GB", 97871, 4000, bf16=148, fp8=296, int8=296),
    _device("a100", 80, "NVIDIA A100 SXM 80GB", 81920, 2039, bf16=312, int8=624),
    _device("a100-pcie", 80, "NVIDIA A100 PCIe 80GB", 81920, 1935, bf16=312, int8=624),
    _device("a100-40gb", 80, "NVIDIA A100 40GB", 40960, 1555, bf16=312, int8=624),
    _device("a10", 86, "NVIDIA A10 24GB", 23028, 600, bf16=125, int8=250),
    _device("a6000", 86, "NVIDIA RTX A6000 48GB", 49140, 768, _GA102, bf16=154.8, int8=309.7),
    _device("l40s", 89, "NVIDIA L40S 48GB", 46068, 864, bf16=362, fp8=733, int8=733),
    _device("l4", 89, "NVIDIA L4 24GB", 23034, 300, bf16=121, fp8=242.5, int8=242.5),
    _device("t4", 75, "NVIDIA T4 16GB (fp16)", 15360, 320, bf16=65, int8=130),
    _device("v100", 70, "NVIDIA V100 SXM 32GB (fp16)", 32768, 900, bf16=125),
    _device("5090", 120, "NVIDIA RTX 5090 32GB", 32607, 1792, _RTX_50, bf16=209.5, fp8=419, int8=838, fp4=1676),
    _device("4090", 89, "NVIDIA RTX 4090 24GB", 24564, 1008, _ADA, bf16=165.2, fp8=330.3, int8=660.6),
    _device("4080", 89, "NVIDIA RTX 4080 16GB", 16376, 716.8, _ADA, bf16=97.5, fp8=194.9, int8=389.9),
    _device("3090", 86, "NVIDIA RTX 3090 24GB", 24576, 936, _GA102, bf16=71, int8=284),
    _device("mi300x", OTHER, "AMD MI300X 192GB", 196592, 5300, bf16=1307, fp8=2615, int8=2615),
)
DEVICES = {device.name: device for device in _ROWS}
NAMED = {name: device.capability for name, device in DEVICES.items()} | {"cpu": CPU, "cpu-amx": AMX}
"""Compute capability times ten, or `CPU`, `AMX` or `OTHER`, keyed by device name."""


def device_key(name: str) -> str:
    """Return the name as used in tables: lower case, without the manufacturer's name."""
    key = name.lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-").removeprefix("amd-")
    return key.removeprefix("rtx-").removeprefix("rtx")


def find_device(name: str) -> Device:
    """Return the device called `name`, see `device_key`.

    Raises:
        InputError: there is no such device; the message suggests the nearest name.
    """
    key = device_key(name)
    if key not in DEVICES:
        raise InputError(
            f"unknown device {name!r}{suggestion(key, DEVICES)}; known devices: {', '.join(DEVICES)}; for another "
            "device, give --memory and --bandwidth"
        )
    return DEVICES[key]


def make_device(
    name: str | None = None, memory_bytes: int | None = None, bandwidth: float | None = None, peak: float | None = None
) -> Device | None:
    """Return a device of the table with some figures replaced, or a device of given figures; None without arguments.

    Args:
        name: name in the table.
        memory_bytes, bandwidth, peak: replace the table's figures; `peak` is for 16 bits, and other types keep their
            ratio to it.
    Raises:
        InputError: there is no such device, or figures are given without memory.
    """
    if name is None and memory_bytes is None:
        if bandwidth is None and peak is None:
            return None
        raise InputError("--bandwidth and --peak need a device's memory size; give --device or --memory too")
    base = _device("given", None, "as given", 0, 0.0, "given") if name is None else find_device(name)
    peaks = base.peaks
    if peak is not None:
        first = base.peaks.get("bf16", peak)
        peaks = {key: value * peak / first for key, value in base.peaks.items()} or {"bf16": peak}
    return replace(
        base, memory_bytes=memory_bytes or base.memory_bytes, bandwidth=bandwidth or base.bandwidth, peaks=peaks
    )
