"""The cost table: its works are recipes, its arithmetic is that of the method, and its page says what was measured."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import click
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "evals"), str(ROOT / "evals" / "cost")]

import arithmetic  # noqa: E402
import cost_page  # noqa: E402
import measure_cost  # noqa: E402
import provenance  # noqa: E402
import works  # noqa: E402

from quantkit.cli import REGISTRY, main  # noqa: E402
from quantkit.compress.recipe.load import build  # noqa: E402

GPTQ, PLAIN = works.WORKS[:2]


@pytest.mark.parametrize("work", works.WORKS, ids=lambda work: work.name)
def test_every_work_is_a_recipe(work):
    data = measure_cost.recipe_of(work)
    data.pop("search", None)
    assert build(data, work.name).steps


@pytest.mark.parametrize("work", works.WORKS, ids=lambda work: work.name)
def test_every_work_is_a_command_line(work, tmp_path, monkeypatch):
    monkeypatch.setattr(measure_cost.Bed, "model", lambda bed, work: Path("model"))
    command, *words = measure_cost.Bed(tmp_path, {}).arguments(work)
    # As a part of the program: a command keeps the help options that it was first asked for.
    program = click.Context(main, **main.context_settings)
    given = REGISTRY.load(command).make_context(command, words, program).params
    assert given["output"] is not None
    assert given["resume"] is False


def test_processes_run_where_no_other_quantkit_is(tmp_path):
    bed = measure_cost.Bed(tmp_path, {})
    assert bed.run([sys.executable, "-c", "import os; print(os.getcwd())"], "where").said == str(tmp_path)


def test_operations_are_counted_by_number_type():
    left, weight = torch.zeros(2, 3, 5), torch.zeros(7, 5)
    counted = arithmetic.Operations()
    with torch.inference_mode(), counted:
        torch.nn.functional.linear(left, weight)
        torch.zeros(4, 4, dtype=torch.float64).addmm_(*[torch.zeros(4, 4, dtype=torch.float64)] * 2)
        torch.bmm(left.bfloat16(), left.bfloat16().transpose(1, 2))
        torch.linalg.cholesky_ex(torch.eye(6))
        torch.cholesky_solve(torch.zeros(6, 2), torch.eye(6))
    float32 = 2 * 6 * 5 * 7 + 6**3 // 3 + 2 * 6 * 2 * 6
    assert counted.counts == {"float32": float32, "float64": 2 * 4**3, "bfloat16": 2 * 2 * 3 * 5 * 3}


def test_operations_of_our_own_c_are_counted():
    counted = arithmetic.Operations()
    declare = counted.wrapped(lambda name, *types, **named: lambda *values: 0)
    declare("qk_pack")(0, 16, 8, 16, 0, 128, 2)
    # 10 tokens, 60 rows and 100 columns from row 40 of a square on: the strip from 48 on needs rows from its eighth on,
    # that from 96 on, 4 columns wide, those from the 56th on.
    declare("qk_add_products")(0, 0, 160, 160, 10, 0, 60, 100, 40, 2)
    declare("qk_add_products")(0, 0, 160, 160, 10, 0, 60, 100, -1, 2)
    lower, whole = 2 * 10 * (60 * 100 - 48 * 8 - 4 * 56), 2 * 10 * 60 * 100
    # Groups 1 and 2 of 4, each of 16 inputs and 30 outputs: with 3 and with 2 groups.
    declare("qk_normal_equations")(0, 0, 0, 0, 1, 2, 4, 16, 30, 32, 2)
    assert +counted.counts == {"bfloat16": lower + whole + 2 * 30 * 16**2 * 5}


def test_what_gptq_cannot_do_without():
    """Of one layer and 16,384 tokens: forward, half Grams, cross Grams, corrections of 1.48, 0.73, 1.17, 0.31 TFLOP."""
    plain, shipped = (cost_page.needed(work) / cost_page.NUM_LAYERS / 1e12 for work in (PLAIN, GPTQ))
    solve = sum(width**3 / 3 for _, width in cost_page.SETS) / 1e12
    solve += sum(2 * rows * width**2 for rows, width in cost_page.LINEARS) / 1e12
    assert plain == pytest.approx(1.48 + 0.73 + solve, abs=0.02)
    assert shipped - plain == pytest.approx(1.48 + 1.17 + 0.31, abs=0.02)


def entry(tool, **figures):
    taken = provenance.stamp(measure_cost.recipe_of(GPTQ)) if tool == "quantkit" else provenance.stamp(versions={})
    known = {"wall_s": 10.0, "cpu_s": 20.0, "peak_mb": 100, "others_cpu_s": 0.1}
    return {"work": "gptq", "tool": tool, **known, **figures, "taken": provenance.plain(taken)}


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "cost.json"
    ours = {"rates": {"float32": 1e12}, "layers_s": 8.0, "operations": {"float32": int(4e12)}}
    measure_cost.save_entry(path, "gptq quantkit", entry("quantkit", **ours))
    measure_cost.save_entry(path, "gptq llm-compressor", entry("llm-compressor 1", cpu_s=40.0, peak_mb=200))
    measure_cost.save_entry(path, "gptq GPTQModel", entry("GPTQModel 1", cpu_s=50.0))
    return path


def test_the_page_compares_with_the_best_peer(results):
    text = cost_page.table(results.parent)
    assert "| `gptq-int4` as shipped | **quantkit** | 10.0 | 20.0 | 100 | 1.00 / 0.50 / 0.50 |" in text
    assert "| 50 % |" in text, "4 TFLOP in 8 seconds at 1 TFLOP/s"
    assert provenance.MARK not in text
    assert "`gptq-int4` needs 100 % of the time and 50 % of the memory" in cost_page.readme_sentence(results.parent)


def test_each_machine_has_a_table_and_the_readme_says_the_range(results):
    other = results.with_name("other.json")
    measure_cost.save_entry(other, "gptq quantkit", entry("quantkit", rates={"float32": 2e12}, peak_mb=150))
    measure_cost.save_entry(other, "gptq llm-compressor", entry("llm-compressor 1", cpu_s=40.0, peak_mb=200))
    text = cost_page.table(results.parent)
    assert "large products: 1000 GFLOP/s" in text
    assert "large products: 2000 GFLOP/s" in text
    assert "needs 100 % of the time and 50 to 75 % of the memory" in cost_page.readme_sentence(results.parent)


def test_nothing_is_said_without_figures(tmp_path):
    assert cost_page.table(tmp_path / "none") == cost_page.NOTHING
    assert cost_page.readme_sentence(tmp_path / "none") == ""


def test_a_stale_figure_is_marked_and_not_in_the_readme(results, monkeypatch):
    now = {**provenance.code_digests(measure_cost.recipe_of(GPTQ)), "compress.algorithms.gptq": "another"}
    monkeypatch.setattr(provenance, "code_digests", lambda recipe: now)
    assert f"**quantkit** {provenance.MARK}" in cost_page.table(results.parent)
    assert "of `compress.algorithms.gptq`" in cost_page.table(results.parent)
    assert cost_page.readme_sentence(results.parent) == ""


def test_a_figure_of_a_busy_machine_is_marked_and_not_in_the_readme(results):
    measure_cost.save_entry(results, "gptq llm-compressor", entry("llm-compressor 1", others_cpu_s=9.0))
    assert "llm-compressor 1 ‡" in cost_page.table(results.parent)
    assert cost_page.readme_sentence(results.parent) == ""


def test_rows_that_are_done_are_kept_and_stale_ones_measured_again(results, monkeypatch, tmp_path):
    done = []

    def measure(bed, work, tool):
        done.append(works.key(work, tool))
        return entry(tool)

    monkeypatch.setattr(measure_cost.Bed, "measure", measure)
    pythons = {"quantkit": "python", "llm-compressor": "python"}
    given = {"work": tmp_path, "results": results, "only": ["gptq *"], "redo": False, "before": "", "limit": 1.0}
    args = argparse.Namespace(**given, rehearse="", samples=0, pythons=pythons)
    monkeypatch.setattr(measure_cost, "arguments", lambda: args)
    measure_cost.main()
    assert done == []
    kept = json.loads(results.read_text())
    kept["gptq quantkit"]["taken"]["code"]["numerics.affine"] = "another"
    results.write_text(json.dumps(kept))
    assert measure_cost.main() == 0
    assert done == ["gptq quantkit"]


def test_a_row_that_fails_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure_cost.Bed, "model", lambda bed, work: tmp_path)
    words = ["--work", str(tmp_path), "--results", str(tmp_path / "cost.json"), "--only", "gptq *"]
    words += ["--gptqmodel", "false", "--llm-compressor", "false"]
    monkeypatch.setattr(sys, "argv", ["measure_cost.py", *words])
    monkeypatch.setattr(measure_cost.sys, "executable", "false")
    assert measure_cost.main() == 1
    assert capsys.readouterr().err.count("exit code 1") == 3
