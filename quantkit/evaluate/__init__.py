"""How good a model is: lm-eval tasks, perplexity and long-context retrieval, through the bundled runtime."""
