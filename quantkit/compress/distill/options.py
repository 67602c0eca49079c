"""Options and result of a distillation, without torch, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass, field

from quantkit.settings import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillOptions:
    """Options of a distillation. The text of a field's `setting` describes it; this list adds what the texts leave out.

    Args:
        learning_rate: the step size grows over the first sixteenth of the steps, then falls to zero along a cosine.
    """

    data: str = setting(
        "bundled",
        "Text to train on: 'bundled', a .txt or .jsonl file, or hub:NAME[:CONFIG].",
        flag="--calibration NAME|FILE",
    )
    samples: int = setting(
        128, "Number of sequences. One in eight is held out to measure the KL.", flag="--samples", minimum=2
    )
    sequence_length: int = setting(512, "Tokens per sequence.", flag="--sequence-length", minimum=8)
    steps: int = setting(128, "Maximum number of training steps.", flag="--steps", minimum=1)
    batch_size: int = setting(4, "Sequences per step.", flag="--batch-size", minimum=1)
    learning_rate: float = setting(
        0.002,
        "Step size: about the largest relative change of a scale in one step.",
        flag="--learning-rate X",
        above=0.0,
    )
    check_every: int = setting(
        16, "Steps between two measurements on the held-out sequences.", flag="--check-every", minimum=1
    )
    patience: int = setting(
        3, "Training ends after this many measurements in a row without a new lowest KL.", flag="--patience", minimum=1
    )
    seed: int = setting(0, "Seed of the choice and the order of the sequences.", flag="--seed", minimum=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Distillation:
    """Result of a distillation.

    Args:
        checkpoint, original, output: paths of the checkpoint, of its original, and of the new checkpoint.
        kl_before, kl_after: mean KL divergence from the original on the held-out sequences, in nats per token.
        steps: number of training steps that led to the result; 0 = no step lowered the KL.
        steps_run: number of all steps that ran.
        trained_numbers: number of scales and of elements of vectors that were trained.
        history: KL at each measurement, keyed by the number of steps before it.
        seconds: time that this process took.
        peak_bytes: peak memory of this process.
    """

    checkpoint: str
    original: str
    output: str
    kl_before: float
    kl_after: float
    steps: int
    steps_run: int
    trained_numbers: int
    history: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0
    peak_bytes: int = 0
