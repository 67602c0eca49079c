"""The bundled inference engine: prefill and decode over a paged, quantized KV cache."""
