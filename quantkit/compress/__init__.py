"""Compress a model to a checkpoint: recipes, calibration, algorithms, the pipeline, and conversion between formats."""
