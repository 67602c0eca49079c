"""Read checkpoints tensor by tensor, with their config and tokenizer."""
