"""Register the model name `quantkit` in lm-eval 0.4.12 and 0.4.13. Later releases use the entry point `lm_eval.models`.

Importing this module registers the name. If the module is run as a program, it starts lm-eval's own command line:

    python -m quantkit.evaluate.plugin --model quantkit --model_args pretrained=OUT --tasks hellaswag
"""

import lm_eval.models  # noqa: F401 - fills the registry, which lm-eval does only while it is empty
from lm_eval.api.registry import model_registry

NAME, TARGET = "quantkit", "quantkit.evaluate.language_model:QuantkitLM"

if NAME not in model_registry:
    model_registry.register(NAME, target=TARGET)

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
