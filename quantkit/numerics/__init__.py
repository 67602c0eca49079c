"""Quantized numbers: types, schemes, tensors and the arithmetic between them. Torch, no I/O."""
