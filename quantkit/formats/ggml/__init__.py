"""Definitions of ggml, the library below llama.cpp: block types and their bytes, GGUF files, importance matrices."""
