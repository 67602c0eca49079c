"""Proof that a checkpoint is what was asked for: read back from disk, run beside its original, judged by gates."""

from __future__ import annotations

from quantkit.evaluate.verify.files import set_aside, write
from quantkit.evaluate.verify.pair import Pair, check_gates, check_pair
from quantkit.evaluate.verify.run import VerifyOptions, check, verify, verify_checkpoint

__all__ = [
    "Pair",
    "VerifyOptions",
    "check",
    "check_gates",
    "check_pair",
    "set_aside",
    "verify",
    "verify_checkpoint",
    "write",
]
