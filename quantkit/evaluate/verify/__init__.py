"""Whether a checkpoint is what was asked for: read back from disk, run beside its original, judged by gates."""

from __future__ import annotations

from quantkit.evaluate.verify.files import set_aside, write_files
from quantkit.evaluate.verify.pair import Pair, check_gates, check_pair
from quantkit.evaluate.verify.run import VerifyOptions, check_options, verify_checkpoint, verify_pair

__all__ = [
    "Pair",
    "VerifyOptions",
    "check_gates",
    "check_options",
    "check_pair",
    "set_aside",
    "verify_checkpoint",
    "verify_pair",
    "write_files",
]
