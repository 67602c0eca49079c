"""Bytes in, bytes out: reading and writing safetensors checkpoints within bounded memory, never the whole model."""
