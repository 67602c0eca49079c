"""A transformers model without weights that loads one decoder layer at a time.

The model is on the meta device, so its size does not matter. The arguments of a layer (rotary embeddings, masks) are
found by running the model's own forward with recorders in place of its layers.
"""

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import CheckpointError, ModelError
from quantkit.huggingface.experts import rebuild_layer, set_parameter, set_stored
from quantkit.huggingface.layer_call import (
    Batch,
    LayerCall,
    hand_back,
    merged,
    moved,
    tensors_beside,
    tensors_missing,
)
from quantkit.huggingface.layer_inputs import Compute, Recorder, build_model, pass_through
from quantkit.huggingface.load_rules import tower_linears
from quantkit.models.family import Family
from quantkit.models.linear_sets import LinearSet

# Number of batch shapes whose arguments are cached; in a set of chats, every sample may have a different length.
_MOST_SHAPES = 256


class Skeleton:
    """The model of a checkpoint, without weights.

    Args:
        reader: reader of the checkpoint.
        family: family of the model; it names the model's modules.
        dtype: dtype of loaded weights.
        device: device of loaded layers.
    Raises:
        ModelError: transformers cannot build the model, or the model has no decoder layers under the family's name.
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
        tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        self._tied = {name: other for name, other in tied.items() if name.startswith(f"{family.layers}.")}
        self._load_stem()
        self._arguments: dict[tuple[int, int], list[dict[str, Any]]] = {}

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self._layers)

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states; the width of the embeddings if config.json does not give it."""
        return int(getattr(self._config, "hidden_size", None) or self.embedding_width)

    @property
    def vocab_size(self) -> int:
        """Number of token embeddings."""
        return int(self._embedding().get_parameter("weight").shape[0])

    @property
    def embedding_width(self) -> int:
        """Width of a token embedding before any projection."""
        return int(self._embedding().get_parameter("weight").shape[1])

    def layer_config(self, index: int) -> Any:
        """Return the transformers config of one layer; in some models, widths differ between layers."""
        config = self._config
        return config.per_layer_config[index] if getattr(config, "is_heterogeneous", False) else config

    def head_dim(self, index: int) -> int:
        """Return the width of an attention head of a layer."""
        config = self.layer_config(index)
        heads = getattr(config, "num_attention_heads", None) or 1
        return int(getattr(config, "head_dim", None) or self.hidden_size // heads)

    def layer_name(self, index: int) -> str:
        """Return the full module name of a layer."""
        return f"{self.family.layers}.{index}"

    def linear_sets(self, index: int) -> tuple[LinearSet, ...]:
        """Return the sets of linears of a layer that read the same tensor, in execution order."""
        if self.family.layer_sets:
            return self.family.layer_sets[index]
        return self.family.sets_of_layer(lambda name: self._weight(index, name) is not None, self.reader.config)

    def _linear_names(self, index: int) -> list[str]:
        return [name for group in self.linear_sets(index) for name in group.linears]

    def other_linears(self) -> list[str]:
        """Return the full names of all linears that are in no set, e.g. of the head and a vision tower."""
        sets = {f"{self.layer_name(i)}.{name}" for i in range(self.num_layers) for name in self._linear_names(i)}
        linears = [name for name, module in self._model.named_modules() if isinstance(module, nn.Linear)]
        return [name for name in linears if name not in sets]

    def tower_linears(self) -> dict[str, tuple[int, int]]:
        """Return the shape (N, K) of each linear outside the language model, keyed by full name; see `load_rules`."""
        return tower_linears(self._model, self.family)

    def has_parameter(self, name: str) -> bool:
        """Whether the model has a parameter of this full name."""
        owner, _, leaf = name.rpartition(".")
        try:
            return leaf in self._model.get_submodule(owner)._parameters
        except AttributeError:
            return False

    def blank_layer(self, index: int) -> nn.Module:
        """Return a copy of one layer without weights, on the meta device, in evaluation mode."""
        return copy.deepcopy(self._layers[index]).eval()

    def linear_shapes(self, index: int) -> dict[str, tuple[int, int]]:
        """Return the shape (N, K) of each quantizable linear of a layer, keyed by relative name; read no weights.

        Raises:
            ModelError: the layer lacks a linear that the family names.
        """
        shapes: dict[str, tuple[int, int]] = {}
        for name in self._linear_names(index):
            weight = self._weight(index, name)
            if weight is None:
                raise ModelError(
                    f"{self.layer_name(index)} has no linear {name!r}; check the architecture in config.json"
                )
            shapes[name] = (weight.shape[0], weight.shape[1])
        return shapes

    def _weight(self, index: int, name: str) -> nn.Parameter | None:
        """Return the weight of a module in a layer, on the meta device; None if there is no such weight."""
        try:
            return self._layers[index].get_parameter(f"{name}.weight")
        except AttributeError:
            return None

    def check_tensors(self) -> None:
        """Check that the checkpoint has every parameter of every layer and the embedding, with the right shape.

        Raises:
            CheckpointError: a tensor is missing or has a different shape; the message gives its name and both shapes.
        """
        expected = {f"{self.family.embedding}.weight": self._embedding().get_parameter("weight").shape}
        for index in range(self.num_layers):
            state = self.layer_tensors(index)
            expected |= {f"{self.layer_name(index)}.{name}": parameter.shape for name, parameter in state.items()}
        for name, shape in expected.items():
            self.reader.check_shape(self._stored(name), tuple(shape))

    def _stored(self, name: str) -> str:
        """Return the name under which files store a tensor that several layers may share."""
        return name if name in self.reader else self._tied.get(name, name)

    def is_shared(self, index: int, module: str) -> bool:
        """Whether `module`, relative to layer `index`, shares its weight with a different layer."""
        name = f"{self.layer_name(index)}.{module}.weight"
        return name in self._tied or name in self._tied.values()

    def layer_tensors(self, index: int) -> dict[str, Tensor]:
        """Return the parameters and persistent buffers of a layer, on the meta device, keyed by relative name."""
        state: dict[str, Tensor] = self._layers[index].state_dict(keep_vars=True)
        return state

    def layer(self, index: int) -> nn.Module:
        """Return a copy of one layer with its weights read from disk, in evaluation mode.

        Raises:
            CheckpointError: a weight contains NaN or infinity.
        """
        # Fill a copy: in the skeleton itself, the weights of every layer would remain in memory.
        layer = copy.deepcopy(self._layers[index])
        for name in self.layer_tensors(index):
            value = self.read_finite(f"{self.layer_name(index)}.{name}")
            set_stored(layer, name, value, self.dtype, self.device)
        return layer.to(self.device).eval()

    def read_finite(self, full: str) -> Tensor:
        """Read the tensor with the full name `full` from the checkpoint.

        Raises:
            CheckpointError: the tensor contains NaN or infinity.
        """
        value = self.reader.tensor(self._stored(full))
        # Checked here, where the tensor's name is known: calibration cannot tell from which tensor a NaN comes.
        # Check the minimum and maximum, because `isfinite` of each number takes several copies of the tensor.
        if value.is_floating_point() and value.numel() and not all(map(torch.isfinite, value.aminmax())):
            bad = int((~torch.isfinite(value)).sum())
            raise CheckpointError(
                f"{self.reader.path}: tensor {full} holds {bad} NaN or infinite values; download the checkpoint again"
            )
        return value

    def _load_stem(self) -> None:
        """Read the weights between the embedding and the first layer, e.g. learned positions, if there are any."""
        backbone, names = self._model.get_submodule(self.family.backbone), self.family
        known = tuple(f"{name}." for name in (names.layers, names.embedding, names.final_norm))
        tables = {f"{name}.weight" for name, module in backbone.named_modules() if isinstance(module, nn.Embedding)}
        for name in backbone.state_dict(keep_vars=True):
            full = f"{names.backbone}.{name}"
            if names.hands_on and name in tables:
                continue  # `_with_rows` reads single rows: a table per layer is as large as the model
            if not full.startswith(known) and full in self.reader:
                # Hidden states are computed on the CPU.
                set_stored(backbone, name, self.read_finite(full), self.dtype, torch.device("cpu"))

    def embed(self, token_ids: Tensor, table: Tensor, row_of: Tensor) -> Tensor:
        """Compute the hidden states before the first layer.

        Args:
            token_ids: (B, T) int64.
            table: (U, D) embedding rows of the tokens in use.
            row_of: (V,) int64, row of each token id in `table`.
        Returns:
            (B, T, D) in the skeleton's dtype.
        """
        embedding = copy.deepcopy(self._embedding())
        embedding.__dict__["padding_idx"] = None  # an index of the full table, not of these rows
        set_parameter(embedding, "weight", table.to(self.dtype))
        hidden = self.record(embedding(row_of[token_ids]))[0].hidden
        assert hidden is not None
        return hidden

    def arguments(self, index: int, batch: Batch) -> dict[str, Any]:
        """Return the keyword arguments, except hidden states, with which the model calls layer `index`."""
        if isinstance(batch, LayerCall):
            usual = self._usual_arguments(index, batch)
            # Copies, because a layer may modify in place what the next layer receives.
            arguments: dict[str, Any] = moved(merged(usual, batch.beside), self.device, copy=True)
            return {**arguments, **dict.fromkeys(batch.absent)}
        return self._usual_arguments(index, batch)

    def _usual_arguments(self, index: int, batch: Batch) -> dict[str, Any]:
        """Return the arguments of a layer that depend only on the shape (B, T) of the layer's input."""
        key = (batch.shape[0], batch.shape[1])
        if key not in self._arguments:
            if len(self._arguments) >= _MOST_SHAPES:
                self._arguments.clear()
            # These arguments depend only on the shape, so zeros will do.
            if self.family.hands_on:
                recorded = self._record_ids(torch.zeros(key, dtype=torch.int64))
            else:
                recorded = self.record(torch.zeros(*key, self.embedding_width, dtype=self.dtype))
            # Layers share tensors, so move each tensor only once.
            once = functools.cache(lambda value: value.to(self.device))
            self._arguments[key] = [tree_map_only(Tensor, once, recorder.arguments) for recorder in recorded]
        return self._arguments[key][index]

    def first_call(self, token_ids: Tensor, inputs: Mapping[str, Any] | None = None) -> LayerCall:
        """Return the call of the first layer for one sequence (1, T), with the arguments that the model passes.

        Args:
            token_ids: token ids of the sequence.
            inputs: arguments of the language model if the sequence has other inputs, e.g. images, see `LayerCall`.
        """
        call = LayerCall(token_ids=token_ids, hidden=token_ids, inputs=inputs)  # `_call` replaces the hidden states
        return self._call(0, call, self._record_call(call)[0])

    def next_call(self, index: int, call: LayerCall, compute: Compute) -> LayerCall:
        """Run layer `index` and return the call of the next layer.

        Args:
            index: number of a layer that is not the last.
            call: call of this layer.
            compute: function that computes the layer. The model's own code passes the layer's outputs on.
        """
        layer = self._compute(call, compute)
        return self._call(index + 1, call, self._record_call(call, {index: layer})[-1])

    def call_after(self, computes: Sequence[Compute], token_ids: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Run the first layers in one forward pass; return the hidden states and arguments of the layer after them.

        Args:
            computes: functions that compute these layers, in order.
            token_ids: (B, T) int64.
        """
        layers = {index: self._compute(None, compute) for index, compute in enumerate(computes)}
        recorder = self._record_ids(token_ids, layers)[-1]
        assert recorder.hidden is not None
        return recorder.hidden, recorder.arguments

    def norm_names(self) -> list[str]:
        """Return the names of the parameters of the norm after the last layer, relative to the norm."""
        return [name for name, _ in self._model.get_submodule(self.family.final_norm).named_parameters()]

    def final_parts(self) -> tuple[nn.Module, Tensor, Tensor | None]:
        """Return the norm after the last layer, with its weights, and the weight (V, D) and the bias of the head."""
        names, norm = self.family, copy.deepcopy(self._model.get_submodule(self.family.final_norm))
        for name in self.norm_names():
            set_stored(norm, name, self.read_finite(f"{names.final_norm}.{name}"), self.dtype, self.device)
        head = f"{names.head}.weight"
        weight = self.read_finite(head if head in self.reader else f"{names.embedding}.weight")
        bias = f"{names.head}.bias"
        biases = self.read_finite(bias).to(self.device, self.dtype) if bias in self.reader else None
        return norm.to(self.device), weight.to(self.device, self.dtype), biases

    def hand_on(self) -> None:
        """Run the layers inside the model's own forward from now on; see `Family.hands_on`."""
        self.family = replace(self.family, hands_on=True)
        self._arguments.clear()

    def _compute(self, call: LayerCall | None, compute: Compute) -> Compute:
        """Return a function that takes a layer's place in the model's forward pass.

        The forward pass runs on the CPU. The function moves the layer's inputs to `self.device`, runs `compute` there
        and moves the outputs back to the CPU. If `call` is given, its hidden states and tensors replace those of the
        forward pass.
        """

        def run(hidden: Tensor, arguments: dict[str, Any]) -> Any:
            states, beside = (hidden, {}) if call is None else (call.hidden, call.beside)
            used = moved(merged(arguments, beside), self.device, copy=call is not None)
            output = compute(states.to(self.device), used)
            hand_back(arguments, used, "cpu")
            return moved(output, "cpu")

        return run

    def _call(self, index: int, before: LayerCall, recorder: Recorder) -> LayerCall:
        """Return the call of layer `index` from a recorder's record; `before` is an earlier call of the sequence."""
        assert recorder.hidden is not None
        usual = moved(self._usual_arguments(index, before), "cpu")
        beside = {path: value.clone() for path, value in tensors_beside(recorder.arguments, usual).items()}
        absent = () if before.inputs is None else tuple(tensors_missing(recorder.arguments, usual))
        if inside := [path for path in absent if "/" in path]:
            raise ModelError(
                f"{self.layer_name(index)} receives {inside[0]} for plain texts but not for texts with images; "
                "quantkit does not support this"
            )
        return replace(before, hidden=recorder.hidden, beside=beside, absent=absent)

    def _embedding(self) -> nn.Module:
        return self._model.get_submodule(self.family.embedding)

    def record(self, hidden: Tensor, computed: Mapping[int, Compute] | None = None) -> list[Recorder]:
        """Record the calls of the layers for embeddings (B, T, D); see `pass_through`."""
        return pass_through(self._model, self.family.backbone, self.family.layers, computed, inputs_embeds=hidden)

    def _record_call(self, call: LayerCall, computed: Mapping[int, Compute] | None = None) -> list[Recorder]:
        """Record the calls of the layers for the sequence of a call; see `pass_through`."""
        if call.inputs is None:
            return self._record_ids(call.token_ids, computed)
        return pass_through(self._model, self.family.backbone, self.family.layers, computed, **call.inputs)

    def _record_ids(self, token_ids: Tensor, computed: Mapping[int, Compute] | None = None) -> list[Recorder]:
        """Record the calls of the layers for token ids (B, T); load only the embedding rows of these tokens."""
        names = self.family
        backbone = self._model.get_submodule(names.backbone)
        tables = {
            f"{names.backbone}.{name}".removeprefix("."): module
            for name, module in backbone.named_modules()
            if isinstance(module, nn.Embedding) and module.weight.is_meta
        }
        hooks = [
            module.register_forward_pre_hook(functools.partial(self._with_rows, f"{name}.weight"))
            for name, module in tables.items()
            if not name.startswith(f"{names.layers}.")
        ]
        weights = {module: module.weight for module in tables.values()}
        try:
            return pass_through(self._model, names.backbone, names.layers, computed, input_ids=token_ids)
        finally:
            for hook in hooks:
                hook.remove()
            for module, weight in weights.items():
                module.weight = weight

    def _with_rows(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Load the embedding rows of the requested tokens into a table, and replace token ids with row indices."""
        used, rows = torch.unique(args[0], return_inverse=True)
        module.__dict__["padding_idx"] = None  # an index of the full table, not of these rows
        set_parameter(module, "weight", self.reader.gather_rows(name, used.flatten()).to(self.dtype))
        return (rows, *args[1:])
