"""Build a transformers model without weights and record the arguments with which it calls its layers.

Only the model's own forward knows the arguments of a layer (rotary embeddings, masks). This forward runs unchanged,
with each layer replaced by a recorder, which by default computes nothing.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoints.folder import CONFIG_NAME, text_folder
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import ModelError, first_line
from quantkit.models.config import check_repeats


class _Recorded(Exception):
    """Signal from the last recorder that ends the forward pass before the final norm, whose weights are not loaded."""


class _OtherShape(Exception):
    """Signal from a recorder whose input differs in shape from the first recorder's input."""


Compute = Callable[[Tensor, dict[str, Any]], Any]
"""Computation of a layer: a function from hidden states and other arguments, keyed by name, to the layer's output."""


def compute_with(layer: nn.Module) -> Compute:
    """Return a function that runs the layer on a copy of the hidden states: a layer may modify its input in place."""
    return lambda hidden, arguments: layer(hidden.clone(), **arguments)


class Recorder(nn.Module):
    """Replacement for a decoder layer that returns its input and records its other arguments.

    Args:
        layer: the replaced layer.
        last: whether this recorder ends the forward pass.
        length: length of the tuple that the model expects from a layer, hidden states first; 0 = no tuple.
        shape: list shared by all recorders. It begins with the shape (batch size, tokens); the first recorder appends
            the full shape of the hidden states.
        compute: computation of the layer; None = return the input.
    """

    def __init__(
        self, layer: nn.Module, last: bool, length: int, shape: list[torch.Size], compute: Compute | None = None
    ) -> None:
        super().__init__()
        self._compute = compute
        self._layer, self._last, self._length = [layer], last, length  # in a list, so that it is not registered
        self._names = list(inspect.signature(layer.forward).parameters)
        self._shape = shape
        self.hidden: Tensor | None = None
        self.arguments: dict[str, Any] = {}

    def forward(self, *given: Any, **named: Any) -> Any:
        """Record the arguments; return the result of `compute`, or else the hidden states unchanged.

        Raises:
            _Recorded: this is the last recorder.
            _OtherShape: the hidden states differ in shape from those of the first recorder.
        """
        arguments = {**dict(zip(self._names, given, strict=False)), **named}
        hidden = arguments.pop(self._names[0])
        self._check(hidden.shape)
        self.hidden, self.arguments = hidden, arguments
        if self._last:
            raise _Recorded
        if self._compute is not None:
            return self._compute(hidden, arguments)
        return (hidden, *[None] * (self._length - 1)) if self._length else hidden

    def _check(self, shape: torch.Size) -> None:
        """Check the shape of the hidden states. Residual streams may add a dimension before or after (B, T)."""
        if len(self._shape) == 1 and len(shape) >= 3 and self._shape[0] in (shape[:2], shape[1:3]):
            self._shape.append(shape)
        if shape != self._shape[-1]:
            raise _OtherShape(tuple(shape))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Models read attributes of their layers, such as the kind of attention that determines the mask.
            return getattr(self.__dict__["_layer"][0], name)


def pass_through(
    model: nn.Module, backbone: str, layers: str, computed: Mapping[int, Compute] | None = None, **inputs: Any
) -> list[Recorder]:
    """Run a model up to its last layer, and compute only the layers in `computed`.

    Args:
        model: the model; only parameters that are used before the layers must be off the meta device.
        backbone: name of the module that takes `inputs` and passes hidden states through the layers.
        layers: name of the list of layers.
        computed: computations of the layers that are to run, keyed by layer number. If there are any, the run ends at
            the layer after the last of them.
        inputs: `inputs_embeds`, hidden states (B, T, D), or `input_ids` (B, T), and further arguments.
    Returns:
        A recorder for each layer that was reached.
    Raises:
        ModelError: the hidden states do not pass through these layers in order.
    """
    for length in range(4):  # a model may take the first of several outputs
        try:
            recorders = _pass(model, backbone, layers, length, inputs, computed or {})
        except (_OtherShape, IndexError):
            continue
        except ValueError as error:
            # A model that expects a tuple fails on a tensor with these words; any other ValueError is a real error.
            if "to unpack" not in str(error):
                raise
            continue
        if all(recorder.hidden is not None for recorder in recorders):
            return recorders
        break
    raise ModelError(f"the model's forward does not pass its hidden states through {layers}")


@torch.inference_mode()
def _pass(
    model: nn.Module,
    backbone: str,
    layers: str,
    length: int,
    inputs: dict[str, Any],
    computed: Mapping[int, Compute],
) -> list[Recorder]:
    owner, _, leaf = layers.rpartition(".")
    parent, originals = model.get_submodule(owner), model.get_submodule(layers)
    assert isinstance(originals, nn.ModuleList), f"{layers} is not a list"
    shape = [next(iter(inputs.values())).shape[:2]]
    last = max(computed) + 1 if computed else len(originals) - 1
    recorders = [
        Recorder(layer, number == last, length, shape, computed.get(number)) for number, layer in enumerate(originals)
    ]
    setattr(parent, leaf, nn.ModuleList(recorders))
    try:
        model.get_submodule(backbone)(**inputs, use_cache=False)
    except _Recorded:
        pass
    finally:
        setattr(parent, leaf, originals)
    return recorders[: last + 1]


def build_model(reader: CheckpointReader) -> nn.Module:
    """Build the transformers model of a checkpoint's config, with parameters on the meta device and buffers in memory.

    See `config_and_class` for the class of the model.

    Raises:
        ModelError: transformers cannot build the model.
    """
    from accelerate import init_empty_weights

    try:
        config, kind = config_and_class(reader)
        # Buffers such as rotary frequencies are computed and not stored: on the meta device they would be lost.
        with init_empty_weights(include_buffers=False):
            build = getattr(kind, "_from_config", None) or kind.from_config
            model: nn.Module = build(config)
            return model.eval()
    except ModelError:
        raise
    except Exception as error:  # whatever transformers raises on a config it cannot use
        reason = first_line(error)
        raise ModelError(f"{reader.path}: transformers cannot build this model from config.json: {reason}") from error


def config_and_class(reader: CheckpointReader) -> tuple[Any, Any]:
    """Return the transformers config of a checkpoint, and the class of its model.

    The class is the one that config.json names, if it accepts such a config; otherwise AutoModelForCausalLM.

    Raises:
        ModelError: the config has an implausible number of layers or experts.
    """
    import transformers

    check_repeats(reader.config, str(reader.path / CONFIG_NAME))
    folder = text_folder(reader.path)
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    for name in reader.config.get("architectures") or ():
        kind = getattr(transformers, str(name), None)
        # A class for a different kind of config, e.g. that of a wrapper, would look for entries that are missing.
        if getattr(kind, "config_class", None) is type(config):
            return config, kind
    return config, transformers.AutoModelForCausalLM
