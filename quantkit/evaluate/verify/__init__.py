"""Verify a checkpoint: read it back from disk, compare it with its original, and check gates."""
