"""Recipes times models: each trial is a command, run here or on Ray."""
