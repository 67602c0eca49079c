"""From a model to a checkpoint: recipes, calibration, algorithms, the pipeline that runs them, and conversion."""
