"""Whether a checkpoint is what was asked for: read back from disk, run beside its original, judged by gates."""
