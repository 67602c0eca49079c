"""Quality of a model: lm-eval tasks, perplexity and long-context retrieval, through the bundled runtime."""
