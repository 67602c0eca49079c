"""What each serving engine reads, by release: one file per engine, which is data, and one function that judges."""

from quantkit.engines._devices import DEVICES, device_key
from quantkit.engines._judge import find_engine, judge, judge_all
from quantkit.engines.base import CPU, OTHER, Reads, StoredLinear, StoredModel

__all__ = [
    "CPU",
    "DEVICES",
    "OTHER",
    "Reads",
    "StoredLinear",
    "StoredModel",
    "device_key",
    "find_engine",
    "judge",
    "judge_all",
]
