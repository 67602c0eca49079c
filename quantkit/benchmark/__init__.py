"""What a machine can do and what a run of the engine did: ceilings, workloads, latencies, memory."""
