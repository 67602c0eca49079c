"""One decoder layer and what flows into it: calibration text, hidden states, statistics."""
