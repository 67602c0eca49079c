"""Run every recipe on every model: each trial is a sequence of commands, run on this machine or on Ray."""
