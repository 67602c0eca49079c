"""The engine behind an HTTP API compatible with OpenAI's. Needs `quantkit[serve]`."""
