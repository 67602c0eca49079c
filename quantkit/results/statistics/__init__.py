"""Statistics of comparisons and latencies, in plain Python: intervals that cover what they say, tests, fits."""
