"""Run every recipe on every model: each trial is a command, run on this machine or on Ray."""
