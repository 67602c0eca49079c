"""How good a model is: lm-eval tasks, perplexity and long-context retrieval, through the bundled runtime.

Nothing is imported here: `plugin` is called while torch itself is being imported.
"""
