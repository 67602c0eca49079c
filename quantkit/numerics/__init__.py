"""Number types, schemes, quantized tensors and their arithmetic, on torch tensors and without I/O."""
