"""Checkpoints that each serving engine reads, by release: one YAML file of rules per engine, and one judge."""

from quantkit.engines.judge import engine_names, find_engine, judge, judge_all
from quantkit.engines.rules import CPU, UNKNOWN, StoredLinear, StoredModel

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
