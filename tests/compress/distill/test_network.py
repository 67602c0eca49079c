"""Both models, layer by layer, against plain transformers and autograd over the whole network."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.func import functional_call
from torch.nn.functional import kl_div, log_softmax
from transformers import AutoModelForCausalLM

import quantkit
from quantkit.compress.convert.source import open_source
from quantkit.compress.distill.network import Embedder, Head, Student, last_states
from quantkit.compress.distill.run import open_skeleton
from tests.helpers import make_model

CPU = torch.device("cpu")
IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))


# gemma2 caps logits and ties its head; granite multiplies and divides; nemotron_h has other names in its files.
@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma2", "granite", "nemotron_h"])
def pair(request, tmp_path_factory):
    """A model and a checkpoint of it whose linears have 3 bits."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(folder / "model", request.param)
    overrides = {"weights.dtype": "int3", "weights.group_size": 16}
    quantkit.quantize(model, "rtn-int4", folder / "out", overrides=overrides, device="cpu")
    return model, folder / "out"


def student_of(pair):
    """The original, its head, the student, and the hidden states before and after all layers."""
    original, own = (open_skeleton(path, CPU) for path in pair)
    original.dtype = own.dtype = torch.float32
    head = Head(original)
    return (
        head,
        Student(open_source(pair[1]), own, head.weight),
        Embedder(own, [IDS])(IDS),
        last_states(original, [IDS]),
    )


def test_kl_and_all_gradients_are_those_of_the_whole_network(pair):
    head, student, hidden, (target,) = student_of(pair)
    value = student.kl(hidden, target, head, train=True)

    model, copy = (AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32).eval() for _ in range(2))
    changes = {name: torch.zeros_like(change, requires_grad=True) for name, change in student.parameters().items()}
    values = {name: tensor.detach().clone() for name, tensor in copy.state_dict().items()}
    for name, change in changes.items():
        if name in student.linears:
            weight = student.linears[name].weight
            groups = weight.codes.float().view(*weight.scale.shape, -1)
            values[f"{name}.weight"] = (groups * (weight.scale.float() * (1 + change))[..., None]).view(weight.shape)
        else:
            unit = values[name].square().mean().sqrt().clamp_min(1e-3)
            values[name] = values[name] + unit * change
    with torch.no_grad():
        expected = log_softmax(model(input_ids=IDS).logits, -1)
    found = log_softmax(functional_call(copy, values, (), {"input_ids": IDS}).logits, -1)
    loss = kl_div(found, expected, reduction="sum", log_target=True)
    assert value == pytest.approx(loss.item(), rel=1e-4)
    gradients = torch.autograd.grad(loss, list(changes.values()))
    for (name, parameter), gradient in zip(student.parameters().items(), gradients, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max())), name


def test_logits_in_parts_give_the_same(pair, monkeypatch):
    results = []
    for size in (1 << 26, 4 * 64 * 5):  # all rows at once; some rows at a time
        monkeypatch.setattr("quantkit.compress.distill.network._LOGITS_BYTES", size)
        head, student, hidden, (target,) = student_of(pair)
        results.append((student.kl(hidden, target, head, train=True), student.parameters()))
    (whole, left), (parts, right) = results
    assert whole == pytest.approx(parts, rel=1e-4)
    for name, parameter in left.items():
        assert torch.allclose(
            parameter.grad, right[name].grad, rtol=1e-3, atol=1e-4 * float(parameter.grad.abs().max())
        )


def test_measuring_alone_leaves_no_gradients(pair):
    head, student, hidden, (target,) = student_of(pair)
    assert student.kl(hidden, target, head) > 0
    assert all(parameter.grad is None for parameter in student.parameters().values())


def test_gradients_of_batches_add_up(pair):
    head, student, hidden, (target,) = student_of(pair)
    for row in range(2):
        student.kl(hidden[row : row + 1], target[row : row + 1], head, train=True)
    apart = {name: parameter.grad.clone() for name, parameter in student.parameters().items()}
    head, student, hidden, (target,) = student_of(pair)
    student.kl(hidden, target, head, train=True)
    for name, parameter in student.parameters().items():
        assert torch.allclose(parameter.grad, apart[name], rtol=1e-3, atol=1e-6)


def test_equal_heads_are_in_memory_once(pair):
    head, student, *_ = student_of(pair)
    assert student.head.weight is head.weight


def test_quantized_inputs_are_seen_while_training(tmp_path):
    model = make_model(tmp_path / "model")
    overrides = {"steps": [], "calibration": None}
    quantkit.quantize(model, "w8a8-int8", tmp_path / "out", overrides=overrides, device="cpu")
    head, student, hidden, (target,) = student_of((model, tmp_path / "out"))
    rounded = student.kl(hidden, target, head, train=True)
    assert all(parameter.grad is not None for parameter in student.parameters().values())
    for linear in student.linears.values():
        linear.scheme = replace(linear.scheme, activation=None)
    assert student.kl(hidden, target, head) < rounded
