"""What ggml, the library below llama.cpp, defines: block types and their bytes, GGUF files, importance matrices."""
