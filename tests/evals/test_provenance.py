"""What makes a figure stale, and what does not."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "evals"))

import carry
import processes
import provenance

CODE = '''"""About."""
def double(x: int) -> int:
    """Twice."""
    return 2 * x
'''
GPTQ = {"weights": {"dtype": "int4"}, "steps": [{"gptq": {"damping": 0.01}}]}


def digest(text: str) -> str:
    return provenance.code_digest(ast.parse(text))


@pytest.mark.parametrize(
    ("text", "is_same"),
    [
        (CODE.replace("Twice", "Two times").replace("About", "On"), True),
        (CODE.replace("return 2 * x", "# a comment\n\n    return (2\n        * x)"), True),
        (CODE.replace('    """Twice."""\n', ""), True),
        (CODE.replace("2 * x", "x * 2"), False),
        (CODE.replace("x", "y"), False),
        (CODE.replace("return 2", 'print("""Twice.""")\n    return 2'), False),
    ],
)
def test_code_counts_and_words_about_it_do_not(text, is_same):
    assert (digest(text) == digest(CODE)) == is_same


def test_the_code_behind_a_recipe_is_what_its_steps_import():
    modules = provenance.code_digests(GPTQ)
    assert {"compress.algorithms.gptq", "compress.calibration.layer", "numerics.affine"} <= modules.keys()
    assert not {"compress.algorithms.awq", "compress.pipeline.run", "errors"} & modules.keys()
    assert "compress.algorithms.awq" in provenance.code_digests({"steps": ["awq", "gptq"]})
    assert "compress.algorithms.gptq" not in provenance.code_digests({})


def test_c_files_are_a_part_of_their_package(monkeypatch, tmp_path):
    assert "numerics.native" in provenance.code_digests(GPTQ)
    package = tmp_path / "quantkit" / "numerics" / "native"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(CODE)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)

    def now(in_c):
        (package / "one.c").write_text(in_c)
        return provenance._parsed.__wrapped__("quantkit.numerics.native")[0]

    assert now("int f(void) { return 1; }") == now("/* One. */\nint f(void) {\n    return 1;\n}")
    assert now("int f(void) { return 1; }") != now("int f(void) { return 2; }")


def test_a_figure_is_stale_when_its_recipe_or_code_is_another(monkeypatch):
    taken = provenance.stamp(GPTQ)
    assert provenance.read_stamp(provenance.plain(taken)) == taken
    assert taken.changed({**GPTQ, "gates": ["kl<=1"], "description": "other words"}) == []
    assert taken.changed({**GPTQ, "weights": {"dtype": "int3"}}) == ["the recipe"]
    now = {**taken.code, "numerics.affine": "another"}
    monkeypatch.setattr(provenance, "code_digests", lambda recipe: now)
    assert taken.changed(GPTQ) == ["`numerics.affine`"]
    now["compress.algorithms.gptq"] = "another"
    assert taken.changed(GPTQ)[0] == "`compress.algorithms.gptq`"
    assert provenance.Stamp(commit="0123abc").changed(GPTQ)


def test_a_calibration_file_counts_by_its_name():
    data = [{"calibration": {"data": path}} for path in ("/a/ids.jsonl", "/b/ids.jsonl", "/a/other.jsonl")]
    first, second, other = map(provenance.recipe_digest, data)
    assert first == second != other


def test_a_process_is_measured_as_a_whole(tmp_path):
    usage = processes.run_measured(["sh", "-c", "echo one; echo two; exit 3"], tmp_path / "log.txt")
    assert (usage.code, usage.said) == (3, "two")
    assert usage.peak_mb > 0
    assert usage.wall_s < 30


def test_a_process_is_ended_at_its_limit(tmp_path):
    usage = processes.run_measured(["sh", "-c", "sleep 60 & wait"], tmp_path / "log.txt", limit_s=0.05)
    assert usage.code < 0


def test_a_commit_is_marked_where_code_or_scripts_differ_but_not_results(tmp_path):
    def git(*words: str) -> None:
        settings = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *settings, *words], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "evals/results").mkdir(parents=True)
    git("init")
    git("commit", "--allow-empty", "-m", "first")
    (tmp_path / "evals/results/a.json").write_text("{}")
    clean = provenance.commit(tmp_path)
    assert len(clean) == 7
    (tmp_path / "evals/a.py").write_text("")
    assert provenance.commit(tmp_path) == f"{clean}+"


def test_a_row_without_a_commit_has_that_of_its_file(tmp_path):
    file = tmp_path / "rows.json"
    assert provenance.known_rows(file) == []
    file.write_text('{"about": {"commit": "a"}, "rows": [{"value": 1}, {"value": 2, "commit": "b"}]}')
    assert [row["commit"] for row in provenance.known_rows(file)] == ["a", "b"]


def test_only_digests_that_were_right_are_carried(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text('{"code": {"numerics.affine": "aa", "numerics.matmul": "bb"}, "other": {"numerics.affine": "cc"}}')
    assert carry.replace_in(file, {"numerics.affine": ("aa", "dd"), "numerics.x": ("bb", "ee")})
    carried = '{"code": {"numerics.affine": "dd", "numerics.matmul": "bb"}, "other": {"numerics.affine": "cc"}}'
    assert file.read_text() == carried
    assert not carry.replace_in(file, {"numerics.affine": ("aa", "dd")})


def test_the_digests_of_a_checkout_are_those_of_its_stamps():
    now = carry.digests(provenance.ROOT)
    named = provenance.code_digests(GPTQ)
    assert len(named) > 10
    assert named == {name: now[name] for name in named}
