"""Layers of a transformers model without its weights: built, given one layer at a time, and run."""
