"""`verify --adapter`: original and checkpoint both compute with the adapter."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from quantkit.errors import RequestError
from quantkit.evaluate.options import EvaluationOptions
from quantkit.evaluate.verify.options import VerifyOptions
from quantkit.evaluate.verify.pair_checks import check_pair
from quantkit.evaluate.verify.run import verify_pair
from quantkit.report.files import render_junit, render_markdown
from tests.checkpoints.adapters import make_adapter


def test_both_models_have_the_adapter_and_the_report_names_it(models, tmp_path):
    adapter = make_adapter(tmp_path / "sql", models / "llama", lora_alpha=400)
    engine = {"device": "cpu", "threads": 1, "dtype": "float32"}
    evaluation = EvaluationOptions(texts=(str(models / "text.txt"),), window=64)

    def verify(**further):
        options = VerifyOptions(evaluation=evaluation, bench=None, noise=False, engine={**engine, **further})
        return verify_pair(check_pair(models / "out", None, ["kl<=0"]), options)

    plain, adapted = verify(), verify(adapters=(f"sql={adapter}",), adapter="sql")
    for side in (adapted.evaluation, adapted.baseline):
        assert side.settings["adapter"].startswith("sql (SHA-256 ")
    assert adapted.evaluation.perplexity != plain.evaluation.perplexity
    assert adapted.baseline.perplexity != plain.baseline.perplexity
    # What quantization changes is of one size; an adapter in one model only would change far more.
    assert adapted.fidelity.mean_kl < 5 * plain.fidelity.mean_kl
    assert any(note.startswith("adapter sql: rank 4, 6 linears, SHA-256 ") for note in adapted.notes)
    assert any(note.startswith("No sensitivity map: a sensitivity map swaps parts") for note in adapted.notes)
    assert plain.sensitivity is not None
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(RequestError, match="leave out --adapter or --sensitivity"),
    ):
        patch.setattr("quantkit.evaluate.verify.run.load_llm", None)  # refused before a model is loaded
        options = VerifyOptions(sensitivity=True, engine={"adapters": (f"sql={adapter}",), "adapter": "sql"})
        verify_pair(check_pair(models / "out", None, []), options)
    for report in (adapted, replace(adapted, evaluation=None)):
        assert re.search(r"\| adapter \| sql.*SHA-256 .*, applied to both models \|", render_markdown(report))
        assert re.search(r'<property name="adapter" value="sql.*, applied to both models" ?/>', render_junit(report))
    assert "| adapter |" not in render_markdown(plain)
    assert "<property" not in render_junit(plain)
