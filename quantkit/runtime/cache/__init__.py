"""Storage of keys and values: pages, their owners, shared prefixes, and the size of the pool."""
