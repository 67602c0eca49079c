"""Train the scales and norms of a compressed checkpoint until its logits resemble the original's; see `run.distill`."""
