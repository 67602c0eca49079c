"""Loading a model directory into a decoder that runs: config, tensors, blocks, head."""
