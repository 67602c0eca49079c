"""Verify a checkpoint: read it back from disk, run it beside its original, and check gates."""
