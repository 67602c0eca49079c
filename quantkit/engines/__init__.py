"""What each serving engine reads, by release: one file per engine, which is data, and one function that judges."""

from quantkit.engines._judge import find_engine, judge, judge_all
from quantkit.engines.base import CPU, Reads, StoredLinear, StoredModel

__all__ = ["CPU", "Reads", "StoredLinear", "StoredModel", "find_engine", "judge", "judge_all"]
