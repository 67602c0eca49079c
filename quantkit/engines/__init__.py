"""Checkpoints that each serving engine reads, by release: one YAML file of rules per engine, and one judge."""

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
