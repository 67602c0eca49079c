"""Rules about which checkpoints each serving engine can load, by release: one YAML file per engine, and functions that
apply them.
"""

from quantkit.engines.devices import CPU
from quantkit.engines.rules import UNKNOWN, StoredLinear, StoredModel, engine_names, find_engine, judge, judge_all

__all__ = [
    "CPU",
    "UNKNOWN",
    "StoredLinear",
    "StoredModel",
    "engine_names",
    "find_engine",
    "judge",
    "judge_all",
]
