"""Reports: results in, text out."""
