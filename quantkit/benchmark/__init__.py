"""Benchmarks of a machine and of the engine: ceilings, workloads, latencies, memory."""
