"""Events of a running compression. A listener decides what to show, but cannot change the run. Torch-free."""

from typing import Any

from quantkit.results import LayerRecord


class Listener:
    """Receives the pipeline's events: `plan` once; for each layer `layer_started`, `phase` several times, and
    `layer_finished`; `note` and `warning` at any time.

    Methods that a listener does not define do nothing.
    """

    def plan(self, summary: dict[str, Any]) -> None:
        """Called once, before the first layer.

        Args:
            summary: `num_layers`, `resumed_layers`, `predicted_bytes` (peak memory), `samples`; a key that does not
                apply may be missing.
        """

    def layer_started(self, index: int, name: str) -> None:
        """Called when a layer begins.

        Args:
            index: 0 for the first layer of the model, also after resuming.
            name: full module name, e.g. `model.layers.0`.
        """

    def phase(self, name: str) -> None:
        """Called when the current layer enters a phase.

        A phase is "load", a step's name, "round", "inputs", "kv cache", "errors", "write" or "advance".

        Between layers, the phase "original" advances the original model's hidden states.
        """

    def layer_finished(self, record: LayerRecord) -> None:
        """Called when a layer is on disk."""

    def note(self, text: str) -> None:
        """Called with information of one sentence."""

    def warning(self, text: str) -> None:
        """Called with a warning of one sentence, which does not stop the run."""


SILENT = Listener()
