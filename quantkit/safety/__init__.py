"""Limits on work caused by untrusted files: child processes, and bounds on time, memory and size."""
