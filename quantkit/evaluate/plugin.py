"""Makes `lm_eval --model quantkit` known to lm-eval's own command line.

lm-eval from the release after 0.4.13 on asks installed packages for models (entry points `lm_eval.models`) and needs
nothing from here. Older ones know only their own list. They do import torch before they look a model up, and torch
asks installed packages for what to run when it is imported (entry points `torch.backends`); so that is when
`register` is called. It runs at every import of torch, which is why it looks at `sys.modules` and imports nothing
where lm-eval is not already running.
"""

import contextlib
import sys

NAME, TARGET = "quantkit", "quantkit.evaluate.language_model:QuantkitLM"


def register() -> None:
    """Add the model to lm-eval's registry, by name only; nothing happens in a process that does not run lm-eval."""
    if "lm_eval" not in sys.modules:
        return
    # Whatever another lm-eval does differently must not keep torch from being imported.
    with contextlib.suppress(Exception):
        import lm_eval.models  # noqa: F401 - fills the registry, which is done only while it is empty
        from lm_eval.api.registry import model_registry

        if NAME not in model_registry:
            model_registry.register(NAME, target=TARGET)
