"""What an undescribed model is made of: layers, fused sets, smoothing pairs, seen by running it on random numbers."""
