"""What each serving engine reads, by release: one file per engine, which is data, and the function that reads it."""

from quantkit.engines.base import CPU, Reads, StoredLinear, StoredModel, Verdict
from quantkit.engines.judge import find_engine, judge, judge_all

__all__ = ["CPU", "Reads", "StoredLinear", "StoredModel", "Verdict", "find_engine", "judge", "judge_all"]
