"""Storage of keys and values: pages, who holds them, shared prefixes, and how many fit."""
