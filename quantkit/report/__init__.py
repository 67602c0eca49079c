"""Reports: results in, text out. JSON, a page, a model card, JUnit XML, and comparisons of several. Torch-free.

Nothing is imported here: `quantkit --help` imports `table`.
"""
