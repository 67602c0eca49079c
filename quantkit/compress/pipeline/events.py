"""Events of a running compression. Torch-free; a listener decides what to show, and cannot change the run."""

from typing import Any

from quantkit.results import LayerRecord


class Listener:
    """Called by the pipeline: the plan once; for each layer started, phase..., finished; warnings at any time.

    What a listener does not define shows nothing.
    """

    def plan(self, summary: dict[str, Any]) -> None:
        """Once, before any layer is worked on.

        Args:
            summary: `num_layers`, `resumed_layers`, `predicted_bytes` (memory at its highest), `samples`;
                a key that does not apply may be missing.
        """

    def layer_started(self, index: int, name: str) -> None:
        """A layer begins.

        Args:
            index: 0 for the first layer of the model, also after resuming.
            name: full module name, e.g. `model.layers.0`.
        """

    def phase(self, name: str) -> None:
        """The current layer enters a phase: "load", a step's name, "round", "inputs", "write" or "advance"; between
        layers "original", while the original moves inputs on."""

    def layer_finished(self, record: LayerRecord) -> None:
        """A layer is on disk."""

    def warning(self, text: str) -> None:
        """Something that the user should know but that stops nothing; one sentence."""


SILENT = Listener()
