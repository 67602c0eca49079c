"""Bounds on work that other people's files cause: child processes, limits on time, memory and size."""
