"""A transformers model without weights, and hidden states passed through it with recorders in place of its layers.

What a layer is called with (rotary embeddings, masks) is only known to the model's own forward, which runs here as it
is; nothing is computed in the layers.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoints.folder import CONFIG_NAME
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import ModelError, first_line
from quantkit.models.config import check_repeats


class _Recorded(Exception):
    """Raised by the last recorder to end the forward pass before the final norm, which has no weights."""


class _OtherShape(Exception):
    """Raised by a recorder that is given something else than the first one was."""


Compute = Callable[[Tensor, dict[str, Any]], Any]
"""A layer's work: hidden states and its other arguments by name to whatever the layer returns."""


def compute_with(layer: nn.Module) -> Compute:
    """A layer as it is; hidden states are copied, since it may add to them in place."""
    return lambda hidden, arguments: layer(hidden.clone(), **arguments)


class Recorder(nn.Module):
    """Stands in for a decoder layer, returns its input and keeps what else it was called with.

    Args:
        layer: whose place it takes.
        last: whether it ends the forward pass.
        length: of the tuple with the hidden states first that the model expects of its layers; 0 = no tuple.
        shape: batch and tokens, two dimensions of the hidden states; the first recorder adds all of theirs.
        compute: what runs in place of passing through.
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
        """Record and pass through."""
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
        """Several residual streams are a dimension behind batch and tokens, or one before them."""
        if len(self._shape) == 1 and len(shape) >= 3 and self._shape[0] in (shape[:2], shape[1:3]):
            self._shape.append(shape)
        if shape != self._shape[-1]:
            raise _OtherShape(tuple(shape))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Models ask their layers for facts, such as the kind of attention that decides about the mask.
            return getattr(self.__dict__["_layer"][0], name)


def pass_through(
    model: nn.Module, backbone: str, layers: str, computed: Mapping[int, Compute] | None = None, **inputs: Any
) -> list[Recorder]:
    """Run a model up to its last layer without computing any.

    Args:
        model: parameters may be on the meta device but for those that are used before the layers.
        backbone: name of the module that takes `inputs` and passes hidden states through the layers.
        layers: name of the list of them.
        computed: what to compute in place of some layers, by number; the one behind the last of them ends the run.
        inputs: `inputs_embeds`, hidden states (B, T, D), or `input_ids` (B, T), and whatever else behind it.
    Returns:
        a recorder for each layer that was reached.
    Raises:
        ModelError: the hidden states do not pass through these layers in order.
    """
    for length in range(4):  # a model may take the first of several outputs
        try:
            recorders = _pass(model, backbone, layers, length, inputs, computed or {})
        except (_OtherShape, IndexError):
            continue
        except ValueError as error:
            # A model that takes a tensor for a tuple fails with these words; any other ValueError is its own.
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
    assert isinstance(originals, nn.ModuleList), f"{layers} is no list"
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
    """The transformers model of a checkpoint's config, parameters on the meta device, buffers real.

    The class that config.json names, where transformers has it; else its causal language model for such a config.

    Raises:
        ModelError: transformers cannot build it.
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
    """A checkpoint's config in the words of transformers, and the class of its model.

    The one that config.json names, if it is one for such a config; else the automatic one of causal LMs.

    Raises:
        ModelError: it has more layers or experts than any model.
    """
    import transformers

    check_repeats(reader.config, str(reader.path / CONFIG_NAME))
    config = transformers.AutoConfig.from_pretrained(reader.path, local_files_only=True, trust_remote_code=False)
    for name in reader.config.get("architectures") or ():
        kind = getattr(transformers, str(name), None)
        # A class for another kind of config, a wrapper's for instance, would look for entries that are not there.
        if getattr(kind, "config_class", None) is type(config):
            return config, kind
    return config, transformers.AutoModelForCausalLM
