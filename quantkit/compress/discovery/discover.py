"""Find the structure of models that no file in `models.families` describes, by running them on random numbers.

The decoder layers are the modules through which hidden states pass. Linears that read the same tensor form one set. The
norm or linear that computes this tensor can absorb the set's smoothing scale if that does not change the layer's
output. Each kind of layer is examined once, with random float32 weights. So memory holds few layers, and the result
does not depend on the checkpoint's weights. Code that comes with a checkpoint is never run.
"""

import copy
import functools
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.discovery.input_sets import Gates
from quantkit.compress.discovery.layer_structure import Survey, survey, survey_modules
from quantkit.compress.discovery.layout import find_model_layout
from quantkit.compress.discovery.stacked_experts import fill_randomly, find_experts
from quantkit.errors import ModelError, first_line, located
from quantkit.huggingface.experts import holds_stacked_experts
from quantkit.huggingface.layer_call import Batch, LayerCall, hidden_states, states_of, tensors_beside
from quantkit.huggingface.layer_inputs import build_model, compute_with
from quantkit.huggingface.names import Renaming, find_stored_names
from quantkit.huggingface.skeleton import Skeleton
from quantkit.models.family import Family
from quantkit.models.linear_sets import LinearSet

# Numbers of sequences and tokens in the trial runs: enough that every expert of a small mixture sees some tokens.
_SHAPE = (2, 24)
# Number of layers that are checked together: running them one by one must give the same result as running the model.
_TOGETHER = 2
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class Discovery:
    """Structure found in a model.

    Args:
        name: class of the model.
        family: names of the model's parts, and the sets of linears of each layer.
        surveys: structure of each kind of layer; layers are of one kind if they have the same modules and settings.
        kinds: for each layer, the index of its kind in `surveys`.
        obstacle: reason why the layers cannot run one after another and so cannot be calibrated; empty if they can.
    """

    name: str
    family: Family
    surveys: tuple[Survey, ...]
    kinds: tuple[int, ...]
    obstacle: str = ""

    @property
    def summary(self) -> str:
        """Describe the structure in one line for the user."""
        distinct = {(item.sets, item.dropped): item for item in self.surveys}.values()
        counts = sorted({sum(len(group.linears) for group in item.sets) for item in distinct})
        linears = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        pairs, failed = (sum(numbers) for numbers in zip(*[(i.pairs, len(i.dropped)) for i in distinct], strict=True))
        dropped = list(dict.fromkeys(text for item in distinct for text in item.dropped))
        text = f"no family file for {self.name}: found {len(self.kinds)} layers at {self.family.layers}, {linears} "
        if self.obstacle:
            return (
                f"{text}linears each; the layers cannot run one after another ({self.obstacle}), so "
                "only recipes without calibration data can be used"
            )
        text += f"linears each, {pairs - failed} of {pairs} smoothing pairs verified"
        return "; ".join([text, *(f"dropped: {reason}" for reason in dropped)])

    @property
    def record(self) -> dict[str, Any]:
        """Return the structure as plain data, for the manifest."""
        names = ("backbone", "layers", "embedding", "final_norm", "head", "stored_prefix", "stored_head", "transposed")
        experts = self.family.experts
        return {
            "model": self.name,
            "summary": self.summary,
            "modules": {name: getattr(self.family, name) for name in names},
            "experts": None if experts is None else asdict(experts),
            "kinds": [asdict(item) for item in self.surveys],
            "kind_of_layer": list(self.kinds),
        }

    @property
    def identity(self) -> dict[str, Any]:
        """Return the part of the structure that affects the result of a compression, as plain data."""
        kept = {key: value for key, value in self.record.items() if key in ("modules", "experts", "kind_of_layer")}
        return {**kept, "sets": [[asdict(group) for group in item.sets] for item in self.surveys]}


def discover(reader: CheckpointReader) -> Discovery:
    """Find the structure of a model.

    Args:
        reader: reader of the checkpoint. Of the layers' tensors, only names and shapes are used.
    Raises:
        ModelError: the model does not consist of decoder layers, or none of its linears can be quantized; the message
            says why.
    """
    name = str((reader.config.get("architectures") or ["this model"])[0])
    model: Any = build_model(reader)
    with located(str(reader.path)):
        layout, obstacle = find_model_layout(model)
        bare = replace(_with_stored_names(reader, layout, model), hf_names=(name,))
    del model
    skeleton = Skeleton(ModelReader.of(reader, bare), bare, torch.float32, torch.device("cpu"))
    configs = [skeleton.layer_config(index) for index in range(skeleton.num_layers)]
    gates = Gates(
        most=max(int(getattr(config, "num_attention_heads", 0) or 0) for config in configs),
        experts=frozenset(int(getattr(config, key, 0) or 0) for config in configs for key in _EXPERTS),
    )
    surveys, kinds, obstacle = _survey_all(skeleton, gates, obstacle)
    if not any(item.sets for item in surveys):
        raise ModelError(f"{reader.path}: the decoder layers of {name} have no linears that can be quantized")
    sets = tuple(_without_shared(skeleton, index, surveys[kind].sets) for index, kind in enumerate(kinds))
    touched = any(item.touches_weights for item in surveys)
    family = replace(skeleton.family, linear_sets=sets[0], layer_sets=sets, decode_at_load=touched)
    return Discovery(name=name, family=family, surveys=surveys, kinds=kinds, obstacle=obstacle)


def _without_shared(skeleton: Skeleton, index: int, sets: tuple[LinearSet, ...]) -> tuple[LinearSet, ...]:
    """Return the sets of a layer without those linears that share weights with other layers; these stay unquantized. If
    any module of a set shares weights with other layers, the set gets no source.
    """
    kept: list[LinearSet] = []
    for group in sets:
        own = tuple(name for name in group.linears if not skeleton.is_shared(index, name))
        touched = (*group.linears, *group.beside, *([group.source] if group.source else []))
        if any(skeleton.is_shared(index, name) for name in touched):
            group = replace(group, linears=own, source=None)
        kept += [group] if own else []
    return tuple(kept)


def _survey_all(skeleton: Skeleton, gates: Gates, obstacle: str) -> tuple[tuple[Survey, ...], tuple[int, ...], str]:
    """Return the structure of each kind of layer, the kind of every layer, and the reason why layers cannot be
    calibrated ("" if they can).

    First, one layer of each kind runs by itself. If that fails, e.g. because layers exchange more than hidden states,
    all layers run in the model's own order. If that fails too, the structure is derived from the layers' modules alone.
    """
    signatures = [_signature(skeleton.blank_layer(index)) for index in range(skeleton.num_layers)]
    distinct = list(dict.fromkeys(signatures))  # in order of their first layers; the position is the kind's number
    kinds = tuple(map(distinct.index, signatures))
    firsts = [signatures.index(signature) for signature in distinct]
    for run in () if obstacle else (_survey_each, _survey_in_order):
        try:
            return run(skeleton, firsts, gates), kinds, ""
        except Exception as error:  # a layer that does not run by itself may raise anything
            obstacle = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {first_line(error)}"
    return tuple(survey_modules(skeleton.blank_layer(index), gates) for index in firsts), kinds, obstacle


@torch.inference_mode()
def _survey_each(skeleton: Skeleton, firsts: Sequence[int], gates: Gates) -> tuple[Survey, ...]:
    """Examine one layer of each kind by itself, if layers exchange only hidden states.

    Raises:
        ModelError: layers exchange more than hidden states.
    """
    if skeleton.family.hands_on:
        raise ModelError("its layers use token ids directly, not only their embeddings")
    states = torch.zeros(*_SHAPE, skeleton.embedding_width)
    streams = skeleton.record(states)[0].hidden
    if streams is None or streams.shape[:2] != _SHAPE:
        raise ModelError("its layers have several residual streams, in a dimension before the sequences")
    surveys: list[Survey] = []
    for index in firsts:
        generator = torch.Generator().manual_seed(index)
        block = _random_layer(skeleton, index, generator)
        hidden = torch.randn(streams.shape, generator=generator)
        shared = [item for item in skeleton.arguments(index, hidden).values() if _is_empty(item)]
        if index == 0 and skeleton.num_layers > 1:
            _check_alone(skeleton, block, hidden)
        surveys.append(_survey_layer(skeleton, index, block, hidden, gates))
        if not all(map(_is_empty, shared)):  # the layer has put data for other layers into a shared argument
            raise ModelError("its layers pass on more than hidden states")
    return tuple(surveys)


@torch.inference_mode()
def _survey_in_order(skeleton: Skeleton, firsts: Sequence[int], gates: Gates) -> tuple[Survey, ...]:
    """Examine one layer of each kind, if layers exchange more than hidden states. All layers run in order, each with
    the arguments that the model passes to it.
    """
    skeleton.hand_on()
    generator = torch.Generator().manual_seed(0)
    call = skeleton.first_call(torch.randint(skeleton.vocab_size, (1, _SHAPE[0] * _SHAPE[1]), generator=generator))
    surveys: list[Survey] = []
    before: list[nn.Module] = []
    for index in range(max(firsts) + 1):
        block = _random_layer(skeleton, index, torch.Generator().manual_seed(index))
        if index in firsts:
            surveys.append(_survey_layer(skeleton, index, block, call, gates))
        if index + 1 < skeleton.num_layers:
            call = skeleton.next_call(index, call, compute_with(block))
            if index < _TOGETHER:
                before.append(block)
                _check_order(skeleton, before, call)
    return tuple(surveys)


def _check_order(skeleton: Skeleton, blocks: Sequence[nn.Module], call: LayerCall) -> None:
    """Check that the layer after `blocks` gets the same arguments as in a run of the whole model.

    Raises:
        ModelError: the model calls the layer with different arguments.
    """
    hidden, arguments = skeleton.call_after([compute_with(block) for block in blocks], call.token_ids)
    stepwise = skeleton.arguments(len(blocks), call)
    if not _equal(call.hidden, hidden) or tensors_beside(arguments, stepwise, _alike):
        raise ModelError("the model calls a layer with inputs that quantkit cannot compute from the layers before it")


def _random_layer(skeleton: Skeleton, index: int, generator: torch.Generator) -> nn.Module:
    block = skeleton.blank_layer(index)
    fill_randomly(block, generator)
    return block


def _signature(layer: nn.Module) -> str:
    """Return a text that is equal for layers of the same kind. It lists modules, shapes and settings, but no layer
    numbers.
    """
    parts: list[str] = []
    for name, module in layer.named_modules():
        shapes = [f"{key}{tuple(p.shape)}" for key, p in module.named_parameters(recurse=False)]
        own = {key: value for key, value in sorted(vars(module).items()) if "layer" not in key}
        settings = [f"{key}={value}" for key, value in own.items() if isinstance(value, (bool, int, str))]
        parts.append(f"{name}:{type(module).__name__}:{shapes}:{settings}")
    return "\n".join(parts)


def _survey_layer(skeleton: Skeleton, index: int, block: nn.Module, batch: Batch, gates: Gates) -> Survey:
    def run() -> list[Tensor]:
        # A copy, since a layer may add to its input in place.
        output = block(states_of(batch).clone(), **skeleton.arguments(index, batch))
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        return [item for item in outputs if isinstance(item, Tensor)]

    plain = torch.empty(*batch.shape[:2], skeleton.hidden_size, device="meta")  # shape of one residual stream
    surveyed = survey(block, run, plain, head_dim=skeleton.head_dim(index), gates=gates)
    linears = [name for group in surveyed.sets for name in group.linears]
    return replace(surveyed, touches_weights=_touches_weights(block, run, linears))


def _touches_weights(block: nn.Module, run: Callable[[], list[Tensor]], linears: Sequence[str]) -> bool:
    """Whether a layer's own code reads the weight of a linear. Such a layer cannot run with codes in place of weights.

    Args:
        block: the layer; modified during the call and then restored.
        run: calls the layer.
        linears: linears that may be quantized.
    """
    # A linear whose class overrides `forward`, such as a grouped linear, computes something else, so it is not changed.
    modules = [block.get_submodule(name) for name in linears]
    modules = [module for module in modules if type(module).forward is nn.Linear.forward]
    weights = [module.get_parameter("weight") for module in modules]
    for module, weight in zip(modules, weights, strict=True):
        del module._parameters["weight"]
        bias = module._parameters.get("bias")
        module.__dict__["forward"] = functools.partial(nn.functional.linear, weight=weight, bias=bias)
    try:
        run()
    except Exception as error:  # the layer ran before, so any other error says nothing about weights
        return isinstance(error, AttributeError) and "has no attribute 'weight'" in str(error)
    finally:
        for module, weight in zip(modules, weights, strict=True):
            del module.__dict__["forward"]
            module._parameters["weight"] = weight
    return False


def _check_alone(skeleton: Skeleton, block: nn.Module, hidden: Tensor) -> None:
    """Check that the second layer's input is the first layer's output, and that the first layer does not affect the
    second one's other arguments. Otherwise layers cannot run one by one.

    Raises:
        ModelError: the second layer gets a different input or different arguments.
    """
    embeddings = hidden.flatten(2)[..., : skeleton.embedding_width]  # one residual stream
    expected = copy.deepcopy(skeleton.arguments(1, hidden))  # a layer may change shared arguments
    first, second = skeleton.record(embeddings, {0: compute_with(block)})
    assert first.hidden is not None and second.hidden is not None
    output = hidden_states(block(first.hidden.clone(), **skeleton.arguments(0, hidden)))
    if not (_equal(second.hidden, output) and _equal(second.arguments, expected)):
        raise ModelError("its layers pass on more than hidden states, or the model changes what they pass on")


def _is_empty(value: Any) -> bool:
    return isinstance(value, MutableMapping) and not value


def _equal(left: Any, right: Any) -> bool:
    """Whether two nested structures have the same form and, up to float precision, equal tensors. Other values are
    ignored.
    """
    (ours, form), (others, other_form) = tree_flatten(left), tree_flatten(right)
    return bool(form == other_form) and all(map(_alike, ours, others))


def _alike(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.shape == right.shape and torch.allclose(left, right, rtol=1e-4, atol=1e-5)
    return isinstance(left, Tensor) == isinstance(right, Tensor)


def _with_stored_names(reader: CheckpointReader, layout: Family, model: nn.Module) -> Family:
    """Return `layout` with facts about the files: the stored names of the model's parts, the linears that are stored
    transposed, and how experts are stored.
    """
    layers = model.get_submodule(layout.layers)
    modules = {(name, type(m).__name__) for layer in layers.children() for name, m in layer.named_modules()}
    transposed = tuple(sorted(name for name, kind in modules if kind == "Conv1D"))
    layout = replace(layout, linear_sets=(), transposed=transposed)
    own = f"{layout.backbone}." if layout.backbone else ""
    local = layout.layers.removeprefix(own)
    prefix = _stored_prefix(reader, own, local, layers)
    prefixed = replace(
        layout, stored_prefix=None if prefix == own else prefix, stored_head=_stored_head(reader, layout.head)
    )
    renaming = Renaming.of(model)
    loaded = renaming.expert_names if renaming else lambda name: []
    if renaming is not None:
        names = find_stored_names(renaming, reader, own)
        if names.conversions or not _has_all(ModelReader.of(reader, prefixed), layout, layers):
            renamed = replace(layout, stored_names=names)
            stored = ModelReader.of(reader, renamed).names
            return replace(renamed, experts=find_experts(stored, f"{layout.layers}.", layers, loaded))
    return replace(prefixed, experts=find_experts(reader.names, f"{prefix}{local}.", layers, loaded))


def _has_all(reader: ModelReader, layout: Family, layers: nn.Module) -> bool:
    """Whether a checkpoint has the embedding and all tensors of the layers; experts may be stacked or separate."""
    prefix = layout.layers
    expected = set(layers.state_dict())
    for name, module in layers.named_modules():
        if holds_stacked_experts(module) and any(key.startswith(f"{prefix}.{name}.0.") for key in reader.names):
            expected -= {f"{name}.{leaf}" for leaf in module.state_dict()}
    return all(name in reader for name in (f"{layout.embedding}.weight", *(f"{prefix}.{name}" for name in expected)))


def _stored_prefix(reader: CheckpointReader, own: str, local: str, layers: nn.Module) -> str:
    """Return the prefix of the backbone's tensors in the files: `own`, unless another prefix matches more tensors.

    transformers has renamed the language models inside multimodal wrappers more than once; files keep the old names.
    """
    expected = {f"{local}.0.{name}": tuple(p.shape) for name, p in layers.get_submodule("0").named_parameters()}
    votes: Counter[str] = Counter()
    for name in reader.names:
        start = name.rfind(f"{local}.0.")
        prefix, rest = name[: max(start, 0)], name[max(start, 0) :]
        if (not prefix or prefix.endswith(".")) and reader.info(name).shape == expected.get(rest):
            votes[prefix] += 1
    return own if not votes or votes[own] == max(votes.values()) else votes.most_common(1)[0][0]


def _stored_head(reader: CheckpointReader, head: str) -> str | None:
    """Return the name of the output head in the files if it differs from its name in the model; otherwise None. Also
    return None if the files hold no head, because it is tied to the embedding.
    """
    if f"{head}.weight" in reader:
        return None
    leaf = head.rpartition(".")[2]
    heads = [name for name in reader.names if name.endswith(f".{leaf}.weight")]
    return heads[0].removesuffix(".weight") if len(heads) == 1 else None
