"""Structure of an undescribed model: layers, fused sets and smoothing pairs, found by running it on random numbers."""
