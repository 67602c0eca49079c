"""Evaluate a model on the bundled runtime: lm-eval tasks, perplexity, long-context retrieval and chat behaviour."""
