"""Find layers, sets of linears and smoothing pairs of a model without a family file, by running the model."""
