"""Linears on the low-bit kernels that torch itself has, on CPU and CUDA."""
