"""Gates: promises about a checkpoint such as `recovery>=98.9`, read and judged on a report. Torch-free."""
