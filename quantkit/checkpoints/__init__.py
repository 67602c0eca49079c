"""Checkpoints read tensor by tensor: what a folder holds, its bytes, and its tokenizer."""
