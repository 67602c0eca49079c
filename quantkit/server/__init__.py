"""Serve the engine through an HTTP API compatible with OpenAI's. Needs the extra `serve`."""
