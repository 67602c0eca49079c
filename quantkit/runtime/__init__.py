"""The bundled inference engine: prefill and decode over a paged KV cache that can be quantized."""
