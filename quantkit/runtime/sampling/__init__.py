"""From logits to the tokens of requests."""
