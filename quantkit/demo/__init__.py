"""The bundled demo model, its tokenizer and its calibration text. Data only; how it was made is in evals/demo."""
