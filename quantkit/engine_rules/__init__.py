"""Rules about which checkpoints each serving engine can load, by release: one YAML file per engine, and functions that
apply them.
"""

from quantkit.engine_rules.data_sheets import CPU
from quantkit.engine_rules.rules import UNKNOWN, StoredLinear, StoredModel, engine_names, find_engine, judge, judge_all

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
