"""What a serving engine makes of a checkpoint, by the rules of one of its releases."""

from dataclasses import dataclass

from quantkit.results._record import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReading(Record):
    """How one engine takes a checkpoint.

    Args:
        engine, release: of which it is said.
        reads: "fast", "slow", "unknown" (no rule is about it), "wrong" (it loads and computes other numbers) or "no":
            of the linear that it takes worst.
        reason: why, or by which kernel.
        source: file and function of the release.
        cache: what becomes of the KV cache, where it is not what the checkpoint asks for.
        error: what the engine itself says where it refuses; "" = not known.
    """

    engine: str
    release: str
    reads: str
    reason: str
    source: str = ""
    cache: str = ""
    error: str = ""

    @property
    def is_right(self) -> bool:
        """Whether it computes with the numbers that are stored."""
        return self.reads in ("fast", "slow")
