"""Data of one decoder layer during calibration: texts, hidden states, statistics."""
