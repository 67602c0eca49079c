"""Calibration: token ids and images, the hidden states that enter a decoder layer, and statistics of the layer's
linears.
"""
