"""Acceptance of drafts of two models: compared by position, limited by a gate, and refused without heads."""

from __future__ import annotations

import pytest
import torch

from quantkit.api import quantize
from quantkit.errors import RequestError
from quantkit.evaluate.acceptance import compare_acceptance
from quantkit.evaluate.options import EvaluationOptions
from quantkit.evaluate.verify.options import VerifyOptions
from quantkit.evaluate.verify.pair_checks import check_pair
from quantkit.evaluate.verify.run import verify_pair
from quantkit.results import ModelFacts, Report
from quantkit.results.gates import evaluate_gates
from tests.helpers import edit_tensors, make_model, save_tokenizer
from tests.runtime.mtp_models import make_predictable

ENGINE = {"threads": 1, "num_pages": 64, "device": "cpu", "dtype": "float32"}
TEXT = "a text of some length, with more letters than one prompt has tokens " * 20
GATE = "acceptance_ratio>=0.95"


@pytest.fixture
def original(tmp_path):
    save_tokenizer(make_predictable(tmp_path / "original"))
    return tmp_path / "original"


def compared(path, source):
    comparisons = compare_acceptance(((path, ENGINE), (source, ENGINE)), TEXT, lambda line: None)
    report = Report(model=ModelFacts(name="model"), comparisons=comparisons)
    return {c.subject: c for c in comparisons}, evaluate_gates(report, [GATE, "acceptance_ratio[position 2]>=0.95"])


def test_a_broken_head_fails_the_gate(original, tmp_path):
    same, gates = compared(original, original)
    assert list(same) == ["accepted drafts: all", *(f"accepted drafts: position {n}" for n in range(1, 5))]
    assert {(c.baseline, c.value, c.verdict) for c in same.values()} == {(1, 1, "no difference seen")}
    assert all(gate.held and gate.value == 1 for gate in gates)
    broken = make_predictable(tmp_path / "broken")
    save_tokenizer(broken)
    edit_tensors(broken, mtp__fc__weight=-torch.eye(64, 128))
    worse, gates = compared(broken, original)
    assert worse["accepted drafts: all"].verdict == "worse"
    assert worse["accepted drafts: all"].value < 0.5
    assert not any(gate.held for gate in gates)
    assert "leave the MTP head unquantized" in gates[0].remedy


def test_a_verification_with_mtp_compares_both_heads(original, tmp_path):
    quantize(original, "rtn-int8", tmp_path / "out")
    options = VerifyOptions(
        evaluation=EvaluationOptions(suite=None), noise=False, bench=None, engine={**ENGINE, "speculate": "mtp"}
    )
    report = verify_pair(check_pair(tmp_path / "out", None, (GATE,)), options)
    assert "accepted drafts: all" in {c.subject for c in report.comparisons}
    assert report.gates[0].held
    plain = make_model(tmp_path / "plain")
    quantize(plain, "rtn-int8", tmp_path / "without")
    with pytest.raises(RequestError, match="the model has no MTP head"):
        verify_pair(check_pair(tmp_path / "without", None, ()), options)
