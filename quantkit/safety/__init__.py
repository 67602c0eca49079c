"""Limits on work caused by untrusted files: bounds on the size, depth and time of reading."""
