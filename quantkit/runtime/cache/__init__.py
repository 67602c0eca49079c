"""Where keys and values live: pages, who holds them, shared prefixes, and how many fit."""
