"""What is found without a description: the same as the file where there is one, and never a pair that does not hold."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.compress.algorithms._smoothing import can_fold, fold
from quantkit.compress.calibration.layer import LayerContext
from quantkit.compress.calibration.stream import Stream
from quantkit.compress.discovery.discover import _touches_weights, discover
from quantkit.compress.discovery.input_sets import Gates
from quantkit.compress.discovery.layer_structure import survey
from quantkit.compress.pipeline import plan
from quantkit.errors import ModelError
from quantkit.huggingface.skeleton import Skeleton
from quantkit.models.config import NotNative
from quantkit.models.families import find
from tests.compress.pipeline.test_quantize import run
from tests.helpers import known_to_transformers, make_model
from tests.undescribed import MIXTURES, UNDESCRIBED, make_undescribed

DESCRIBED = ("llama", "qwen3", "gemma2", "olmo2", "granite", "phi3", "starcoder2")


def comparable(sets):
    """What `discover` can find of sets; it does not look for sources that add an offset to their weight."""
    plain = [replace(group, source=None) if group.source_offset else group for group in sets]
    return {(one.linears, one.source, one.parent, one.grouped_heads, tuple(sorted(one.beside))) for one in plain}


@pytest.mark.parametrize("family", DESCRIBED)
def test_what_is_found_is_what_the_file_says(tmp_path, family):
    reader = CheckpointReader(make_model(tmp_path, family))
    described, discovered = find(reader.config), discover(reader).family
    for part in ("backbone", "layers", "embedding", "final_norm", "head"):
        assert getattr(discovered, part) == getattr(described, part)
    skeleton = Skeleton(reader, described, torch.float32, torch.device("cpu"))
    for index in range(skeleton.num_layers):
        assert comparable(discovered.layer_sets[index]) == comparable(skeleton.linear_sets(index))


@pytest.fixture(scope="session", params=sorted(UNDESCRIBED))
def undescribed(request, tmp_path_factory):
    return make_undescribed(tmp_path_factory.mktemp(request.param), request.param)


def test_every_pair_that_was_found_holds(undescribed):
    """Folded by the code that AWQ folds with, by scales that are no powers of two, on the model's own weights."""
    family = discover(CheckpointReader(undescribed)).family
    reader = ModelReader(undescribed, family)
    skeleton = Skeleton(reader, family, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    pairs = 0
    for index in range(skeleton.num_layers):
        sets = skeleton.linear_sets(index)
        layer = LayerContext(
            name=skeleton.layer_name(index),
            stream=Stream(skeleton.layer(index), arguments=partial(skeleton.arguments, index)),
            sets=sets,
            schemes={},
            scale_dtype={},
            head_dim=skeleton.head_dim(index),
        )
        hidden = torch.randn(2, 16, skeleton.hidden_size, generator=generator)
        before = layer.forward(hidden)
        for group in sets:
            if group.source is None:
                continue
            assert can_fold(layer, group), group
            outputs = layer.block.get_parameter(f"{group.source}.weight").shape[0]
            scales = torch.exp(torch.randn(outputs, generator=generator))
            width = layer.weight(group.linears[0]).shape[1]
            if outputs != width:
                scales = scales.view(-1, 1, layer.head_dim).expand(-1, width // outputs, -1).reshape(-1)
            fold(layer, group, scales)
            torch.testing.assert_close(layer.forward(hidden), before, rtol=1e-4, atol=1e-4)
            pairs += 1
    assert pairs >= 2


@pytest.mark.parametrize("family", sorted(filter(known_to_transformers, MIXTURES)))
def test_experts_have_linears_of_their_own(tmp_path, family):
    """Also where transformers keeps them in one tensor: under the names of the files, the router beside them."""
    discovered = discover(CheckpointReader(make_undescribed(tmp_path, family)))
    names = {name for group in discovered.family.layer_sets[-1] for name in group.linears if ".experts." in name}
    assert len(names) == 3 * 4
    assert all(f"model.layers.1.{name}.weight" in CheckpointReader(tmp_path) for name in names)
    ups = next(group for group in discovered.family.layer_sets[-1] if len(group.linears) > 4)
    assert ups.beside in (("mlp.gate",), ("feed_forward.gate",))


@pytest.mark.skipif(not known_to_transformers("gemma4_text"), reason="transformers has no gemma4_text")
def test_heads_may_have_a_width_for_each_layer(tmp_path):
    """Before, transformers refused to say the width of all."""
    reader = CheckpointReader(make_undescribed(tmp_path / "model", "gemma4_text"))
    discovered = discover(reader)
    assert not discovered.obstacle
    family = discovered.family
    skeleton = Skeleton(ModelReader.of(reader, family), family, torch.float32, torch.device("cpu"))
    assert [skeleton.head_dim(index) for index in range(2)] == [16, 32]


class Grouped(nn.Linear):
    """Each half of the inputs has outputs of its own, so that they do not fit the weight as one."""

    def forward(self, hidden):
        halves = torch.einsum("...gk,gnk->...gn", hidden.unflatten(-1, (2, -1)), self.weight.unflatten(0, (2, -1)))
        return halves.flatten(-2)


class Reader(nn.Module):
    """Reads a weight itself where it is told to, beside a linear of a kind of its own."""

    def __init__(self, reads):
        super().__init__()
        self.reads, self.up, self.own = reads, nn.Linear(32, 64), Grouped(32, 64, bias=False)

    def forward(self, hidden):
        up = self.up(hidden)
        return self.own(up) + (self.up.weight.sum() if self.reads else 0)


@pytest.mark.parametrize("reads", [False, True])
def test_who_reads_a_weight_itself_is_known_beside_linears_of_their_own_kind(reads):
    block = Reader(reads)
    before = dict(block.named_parameters())
    assert _touches_weights(block, lambda: [block(torch.randn(3, 32))], ["up", "own"]) == reads
    assert all(value is before[name] for name, value in block.named_parameters())


def test_a_layer_that_fails_without_weights_says_nothing_of_them():
    block = Reader(False)

    def fail():
        raise RuntimeError("of another kind")

    assert not _touches_weights(block, fail, ["up"])
    assert "forward" not in vars(block.up)


def test_two_runs_find_the_same(undescribed):
    first, second = (discover(CheckpointReader(undescribed)) for _ in range(2))
    assert first.identity == second.identity
    assert first.record == second.record


def test_what_does_not_hold_is_dropped_and_said(tmp_path):
    discovered = discover(CheckpointReader(make_undescribed(tmp_path, "diffllama")))
    # Its heads are subtracted from each other in pairs after the values: no scale of a value head comes out whole.
    assert "self_attn.v_proj -> self_attn.o_proj would change the layer's output by" in discovered.summary
    assert "found 2 layers at model.layers, 7 linears each, 3 of 4 smoothing pairs verified" in discovered.summary
    assert all(group.source is None for group in discovered.family.linear_sets if "self_attn.o_proj" in group.linears)


class Norm(nn.Module):
    def __init__(self, offset=0.0):
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.ones(32)), offset

    def forward(self, hidden):
        return hidden * hidden.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * (self.offset + self.weight)


class Layer(nn.Module):
    """norm -> up -> act -> down, with a trap between two of them."""

    def __init__(self, trap):
        super().__init__()
        self.trap = trap
        self.norm = Norm(1.0 if trap == "offset" else 0.0)
        self.up, self.gate, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)
        self.mix = nn.Parameter(torch.randn(32, 32))

    def forward(self, hidden, **_):
        x = self.norm(hidden)
        up = self.up(x)
        if self.trap == "clamp":
            up = up.clamp(-30, 30)
        if self.trap == "square":
            up = up.square()
        middle = torch.sigmoid(self.gate(x)) * up
        if self.trap == "linear":
            middle = middle + self.gate.bias
        output = hidden + self.down(middle)
        if self.trap == "residual":
            output = output + 0.001 * x
        if self.trap == "parameter":
            output = output + 0.001 * x @ self.mix
        return (output, x) if self.trap == "second output" else output


def survey_of(layer, hidden=None, experts=frozenset()):
    torch.manual_seed(0)
    layer = layer.eval()
    for parameter in layer.parameters():
        parameter.data = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5 + (parameter.dim() == 1)
    hidden = torch.randn(2, 12, 32) if hidden is None else hidden

    def run():
        output = layer(hidden)
        return list(output) if isinstance(output, tuple) else [output]

    with torch.inference_mode():
        return survey(layer, run, hidden, head_dim=8, gates=Gates(most=4, experts=experts))


@pytest.mark.parametrize(
    ("trap", "norm_holds", "up_holds"),
    [
        ("none", True, True),
        ("offset", False, True),
        ("residual", False, True),
        ("parameter", False, True),
        ("second output", False, True),
        ("clamp", True, False),
        ("square", True, False),
        ("linear", True, False),
    ],
)
def test_planted_traps_are_found(trap, norm_holds, up_holds):
    discovered = survey_of(Layer(trap))
    sources = {group.linears: group.source for group in discovered.sets}
    assert sources == {("up", "gate"): "norm" if norm_holds else None, ("down",): "up" if up_holds else None}
    assert len(discovered.dropped) == 2 - norm_holds - up_holds
    assert discovered.pairs == 2


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 24), nn.Linear(32, 24), nn.Linear(24, 32)

    def forward(self, x):
        return self.down_proj(torch.sigmoid(self.gate_proj(x)) * self.up_proj(x))


class Mixture(nn.Module):
    """A router over experts of which the last is never chosen, and an expert that sees every token behind a gate."""

    def __init__(self, choose):
        super().__init__()
        self.norm, self.choose = Norm(), choose
        self.router, self.shared, self.shared_gate = nn.Linear(32, 16), Expert(), nn.Linear(32, 1)
        self.experts = nn.ModuleList(Expert() for _ in range(16))

    def forward(self, hidden):
        x = self.norm(hidden)
        flat = x.reshape(-1, 32)
        scores = self.choose(self.router(flat))
        scores[:, -1] = -9
        weights, chosen = scores.topk(2, dim=-1)
        output = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            tokens, slots = torch.where(chosen == number)
            if len(tokens):
                output.index_add_(0, tokens, expert(flat[tokens]) * weights[tokens, slots, None])
        output = output + self.shared(flat) * torch.sigmoid(self.shared_gate(flat))
        return hidden + output.view_as(hidden)


@pytest.mark.parametrize("choose", [lambda x: x.softmax(-1), torch.sigmoid], ids=["softmax", "sigmoid"])
def test_experts_are_one_set_and_their_router_is_ignored(choose):
    discovered = survey_of(Mixture(choose), torch.randn(4, 24, 32), experts=frozenset({16}))
    ups, *downs = discovered.sets
    assert {name.partition(".")[0] for name in ups.linears} == {"experts", "shared"}
    assert len(ups.linears) == 2 * 16 + 2
    assert set(ups.beside) == {"router", "shared_gate"}
    assert ups.source == "norm"
    assert {group.linears: group.source for group in downs} == {
        **{(f"experts.{e}.down_proj",): f"experts.{e}.up_proj" for e in range(16)},
        ("shared.down_proj",): "shared.up_proj",
    }
    assert discovered.ignored == {
        "router": "a router: its outputs go into a softmax, top-k or sigmoid",
        "shared_gate": "a gate (number of outputs: 1)",
    }
    assert discovered.dropped == ()


def save(config, folder, name=None):
    config.architectures = [name] if name else config.architectures
    config.save_pretrained(folder)
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, folder / "model.safetensors", {"format": "pt"})
    return CheckpointReader(folder)


@pytest.mark.parametrize(
    ("family", "name", "message"),
    [
        ("t5", "T5ForConditionalGeneration", "T5ForConditionalGeneration is an encoder-decoder model"),
        ("bert", "BertForMaskedLM", "BertForMaskedLM is not a causal language model"),
        ("clip", "CLIPModel", "CLIPModel is not a causal language model"),
    ],
)
def test_models_that_are_no_decoders_are_refused(tmp_path, family, name, message):
    reader = save(AutoConfig.for_model(family), tmp_path, name)
    with pytest.raises(ModelError, match=message):
        discover(reader)


def test_a_model_whose_layers_see_token_ids_is_run_in_its_own_order(tmp_path):
    reader = CheckpointReader(make_model(tmp_path))
    from transformers import LlamaModel

    original = LlamaModel.forward

    def forward(self, input_ids=None, inputs_embeds=None, **others):
        if input_ids is not None:
            inputs_embeds = self.embed_tokens(input_ids) + 0.001 * input_ids[..., None]
        return original(self, inputs_embeds=inputs_embeds, **others)

    assert not discover(reader).family.hands_on
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaModel, "forward", forward)
        discovered = discover(reader)
    assert discovered.family.hands_on
    assert not discovered.obstacle
    assert comparable(discovered.family.linear_sets) == comparable(discover(reader).family.linear_sets)


def test_layers_that_do_not_run_one_after_another_are_found_by_their_modules(tmp_path, text_file):
    model = make_model(tmp_path / "model", "glm")
    config = json.loads((model / "config.json").read_text())
    from transformers.models.glm.modeling_glm import GlmAttention

    def forward(self, *args, **others):
        raise RuntimeError("a kernel is not there")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "find", partial(refuse, config))
        patch.setattr(GlmAttention, "forward", forward)
        discovered = discover(CheckpointReader(model))
        assert discovered.obstacle == "RuntimeError: a kernel is not there"
        assert "the layers cannot run one after another (RuntimeError" in discovered.summary
        linears = {name for group in discovered.family.linear_sets for name in group.linears}
        assert {"self_attn.q_proj", "mlp.gate_up_proj", "mlp.down_proj"} < linears
        run(model, "rtn-int8", tmp_path / "out")
        with pytest.raises(ModelError, match=r"cannot be calibrated layer by layer: .* such as rtn-int4"):
            run(model, "gptq-int4", tmp_path / "other", text_file)


def refuse(config, _):
    raise NotNative(str(config["architectures"]))


def test_layers_that_change_what_all_are_given_are_noticed(tmp_path):
    reader = CheckpointReader(make_model(tmp_path))
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    original = LlamaDecoderLayer.forward

    def forward(self, hidden_states, position_embeddings=None, **others):
        output = original(self, hidden_states, position_embeddings=position_embeddings, **others)
        position_embeddings[0].mul_(1 + hidden_states[..., :1].mean())  # the next layer is given the same tensor
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaDecoderLayer, "forward", forward)
        discovered = discover(reader)
    assert discovered.obstacle.startswith("the model calls a layer with inputs that quantkit cannot compute")


def test_no_weight_is_read(tmp_path):
    """Only names and shapes are used: a model of zeros is found like any other."""
    folder = make_undescribed(tmp_path, "persimmon")
    before = discover(CheckpointReader(folder)).identity
    from safetensors.torch import load_file, save_file

    tensors = {name: torch.zeros_like(value) for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert discover(CheckpointReader(folder)).identity == before
