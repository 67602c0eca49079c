"""From a model directory to a decoder that runs: config, tensors, blocks, head."""
