"""Descriptions of models as data: families, sets of linears that share an input, module names. Torch-free."""
