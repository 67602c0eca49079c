"""Models as data: families, the sets of linears that share an input, names of modules. Torch-free."""
