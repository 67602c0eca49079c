"""A transformers model without weights that hands out one decoder layer at a time with its real ones.

The model is built on the meta device, so its size does not matter; what a layer is called with (rotary embeddings,
masks) is found by running the model's own forward with its layers replaced by recorders.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoints.experts import rebuild_layer, set_parameter
from quantkit.checkpoints.layer_inputs import Recorder, build_model, pass_through
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import CheckpointError, ModelError
from quantkit.models.family import Family
from quantkit.models.linear_sets import LinearSet

# Shapes of batches whose arguments are remembered; a chat set has as many lengths as samples.
_MOST_SHAPES = 256


class Skeleton:
    """The model behind a checkpoint, weightless.

    Args:
        reader: where weights come from.
        family: names of the model's parts.
        dtype: of the weights handed out.
        device: where layers are put.
    Raises:
        ModelError: transformers cannot build the model, or it has no decoder layers where the family says.
    """

    def __init__(self, reader: CheckpointReader, family: Family, dtype: torch.dtype, device: torch.device) -> None:
        self.reader, self.family, self.dtype, self.device = reader, family, dtype, device
        self._model = build_model(reader)
        model: Any = self._model
        self._config = model.config.get_text_config()
        try:
            layers = self._model.get_submodule(family.layers)
        except AttributeError:
            layers = nn.ModuleList()
        if not isinstance(layers, nn.ModuleList) or not len(layers):
            raise ModelError(f"{reader.path}: the model has no decoder layers at {family.layers!r}")
        for layer in layers:
            rebuild_layer(layer, family)
        self._layers = layers
        self._load_stem()
        self._arguments: dict[tuple[int, int], list[dict[str, Any]]] = {}

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self._layers)

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return int(self._config.hidden_size)

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        config = self._config
        heads = getattr(config, "num_attention_heads", None) or 1
        return int(getattr(config, "head_dim", None) or config.hidden_size // heads)

    def layer_name(self, index: int) -> str:
        """Full module name of a layer."""
        return f"{self.family.layers}.{index}"

    def linear_sets(self, index: int) -> tuple[LinearSet, ...]:
        """Linears of a layer that read the same tensor, in running order; layers of one model may differ."""
        if self.family.layer_sets:
            return self.family.layer_sets[index]
        return self.family.sets_of_layer(lambda name: self._weight(index, name) is not None, self.reader.config)

    def _linear_names(self, index: int) -> list[str]:
        return [name for group in self.linear_sets(index) for name in group.linears]

    def other_linears(self) -> list[str]:
        """Full names of all linears of the model that are in no set: the head, gates, a vision tower."""
        sets = {f"{self.layer_name(i)}.{name}" for i in range(self.num_layers) for name in self._linear_names(i)}
        linears = [name for name, module in self._model.named_modules() if isinstance(module, nn.Linear)]
        return [name for name in linears if name not in sets]

    def has_parameter(self, name: str) -> bool:
        """Whether the model has a parameter of this full name."""
        owner, _, leaf = name.rpartition(".")
        try:
            return leaf in self._model.get_submodule(owner)._parameters
        except AttributeError:
            return False

    def blank_layer(self, index: int) -> nn.Module:
        """A copy of one layer without weights, on the meta device, in evaluation mode."""
        return copy.deepcopy(self._layers[index]).eval()

    def linear_shapes(self, index: int) -> dict[str, tuple[int, int]]:
        """(N, K) of each quantizable linear of a layer, by relative name, without reading a weight.

        Raises:
            ModelError: the layer lacks a linear that the family names.
        """
        shapes: dict[str, tuple[int, int]] = {}
        for name in self._linear_names(index):
            weight = self._weight(index, name)
            if weight is None:
                raise ModelError(f"{self.layer_name(index)} has no linear {name!r}; is the config right?")
            shapes[name] = (weight.shape[0], weight.shape[1])
        return shapes

    def _weight(self, index: int, name: str) -> nn.Parameter | None:
        """The weight of a module of a layer, on the meta device; None where there is none."""
        try:
            return self._layers[index].get_parameter(f"{name}.weight")
        except AttributeError:
            return None

    def check_tensors(self) -> None:
        """Every parameter of every layer and the embedding is in the checkpoint with the right shape.

        Raises:
            CheckpointError: names the tensor, what was expected and what was found.
        """
        expected = {f"{self.family.embedding}.weight": self._embedding().get_parameter("weight").shape}
        for index in range(self.num_layers):
            state = self.layer_tensors(index)
            expected |= {f"{self.layer_name(index)}.{name}": parameter.shape for name, parameter in state.items()}
        for name, shape in expected.items():
            self.reader.check_shape(name, tuple(shape))

    def layer_tensors(self, index: int) -> dict[str, Tensor]:
        """Parameters and saved buffers of a layer by relative name, on the meta device."""
        state: dict[str, Tensor] = self._layers[index].state_dict(keep_vars=True)
        return state

    def layer(self, index: int) -> nn.Module:
        """A copy of one layer with its weights read from disk, in evaluation mode.

        Raises:
            CheckpointError: a weight holds NaN or infinity.
        """
        # A copy: the skeleton itself stays weightless, or every layer that was handed out would remain in memory.
        layer = copy.deepcopy(self._layers[index])
        for name in self.layer_tensors(index):
            self._fill(layer, name, f"{self.layer_name(index)}.{name}", self.device)
        return layer.to(self.device).eval()

    def _fill(self, module: nn.Module, name: str, full: str, device: torch.device) -> None:
        """Give a module one of its parameters or saved buffers from the tensor `full` of the checkpoint."""
        value = self.read_finite(full)
        owner, _, leaf = name.rpartition(".")
        buffers = module.get_submodule(owner)._buffers
        if (buffer := buffers.get(leaf)) is not None:
            # In its own dtype: a buffer may hold indices or flags.
            buffers[leaf] = value.to(device, buffer.dtype)
        else:
            set_parameter(module, name, value.to(device, self.dtype))

    def read_finite(self, full: str) -> Tensor:
        """The tensor `full` of the checkpoint.

        Raises:
            CheckpointError: it holds NaN or infinity.
        """
        value = self.reader.tensor(full)
        # Found here, with its name: in the calibration of later layers a NaN has no origin any more.
        # Not by `isfinite` of each number, which takes several copies of the tensor.
        if value.is_floating_point() and value.numel() and not all(map(torch.isfinite, value.aminmax())):
            bad = int((~torch.isfinite(value)).sum())
            raise CheckpointError(f"{self.reader.path}: tensor {full} holds {bad} NaN or infinite values")
        return value

    def _load_stem(self) -> None:
        """Read what stands between embedding and first layer, e.g. learned positions; most families have nothing."""
        backbone, names = self._model.get_submodule(self.family.backbone), self.family
        known = tuple(f"{name}." for name in (names.layers, names.embedding, names.final_norm))
        for name in backbone.state_dict(keep_vars=True):
            full = f"{names.backbone}.{name}"
            if not full.startswith(known) and full in self.reader:
                self._fill(backbone, name, full, torch.device("cpu"))  # where hidden states are made

    def embed(self, token_ids: Tensor, table: Tensor, row_of: Tensor) -> Tensor:
        """Hidden states before the first layer.

        Args:
            token_ids: (B, T) int64.
            table: (U, D) embedding rows of the tokens in use.
            row_of: (V,) int64, row in `table` of each token id.
        Returns:
            (B, T, D) in the skeleton's dtype.
        """
        embedding = copy.deepcopy(self._embedding())
        embedding.__dict__["padding_idx"] = None  # that row of the full table is another one here
        set_parameter(embedding, "weight", table.to(self.dtype))
        hidden = self.record(embedding(row_of[token_ids]))[0].hidden
        assert hidden is not None
        return hidden

    def arguments(self, index: int, hidden: Tensor) -> dict[str, Any]:
        """Keyword arguments that the model would call layer `index` with, besides the hidden states (B, T, D)."""
        key = (hidden.shape[0], hidden.shape[1])
        if key not in self._arguments:
            if len(self._arguments) >= _MOST_SHAPES:
                self._arguments.clear()
            # What layers are called with depends on the shape alone, so zeros will do.
            recorded = self.record(torch.zeros(*key, hidden.shape[2], dtype=self.dtype))
            moved: dict[int, Tensor] = {}  # layers share their tensors: each is moved once
            self._arguments[key] = [_to_device(recorder.arguments, self.device, moved) for recorder in recorded]
        return self._arguments[key][index]

    def _embedding(self) -> nn.Module:
        return self._model.get_submodule(self.family.embedding)

    def record(self, hidden: Tensor, first: nn.Module | None = None) -> list[Recorder]:
        """What the model calls its layers with for hidden states (B, T, D); see `pass_through`."""
        return pass_through(self._model, self.family.backbone, self.family.layers, first, inputs_embeds=hidden)


def _to_device(value: Any, device: torch.device, moved: dict[int, Tensor]) -> Any:
    """`value` with every tensor in nested tuples, lists and dicts moved; `moved` has what was moved before, by id."""
    if isinstance(value, Tensor):
        return moved.setdefault(id(value), value.to(device))
    if isinstance(value, dict):
        return {key: _to_device(item, device, moved) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_to_device(item, device, moved) for item in value)
    return value
