"""Evaluate the quality of a model: lm-eval tasks, perplexity and long-context retrieval, on the bundled runtime."""
