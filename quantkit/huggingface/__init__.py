"""Build a transformers model without its weights, and load and run its layers one at a time."""
