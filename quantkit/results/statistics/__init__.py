"""Statistics of comparisons and latencies in plain Python: confidence intervals, tests and fits."""
