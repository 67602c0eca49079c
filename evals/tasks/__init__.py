"""The shipped lm-eval tasks and the demo language's items; installed as the package `quantkit.tasks`."""
