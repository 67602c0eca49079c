"""Loading of a model directory as a decoder that is ready to run: config, tensors, blocks, head."""
