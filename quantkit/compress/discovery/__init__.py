"""Structure of a model without a family file: layers, sets of linears and smoothing pairs, found by running it."""
