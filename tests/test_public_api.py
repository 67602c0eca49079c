"""The public surface: exactly these names, each documented, and importing it costs nothing."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import quantkit
from quantkit.compress import pipeline
from quantkit.distribution import DISTRIBUTION
from quantkit.errors import RecipeError

ROOT = Path(__file__).parents[1]

FUNCTIONS = {"quantize", "convert", "distill", "inspect", "verify", "search", "plan", "list_recipes", "load_recipe"}


def test_type_checkers_see_the_names_that_are_fetched():
    tree = ast.parse(Path(quantkit.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.names[0].asname]
    seen = {name.asname: node.module for node in imports for name in node.names if name.asname == name.name}
    assert seen == quantkit._HOME_OF
    assert {*seen, "__version__"} == set(quantkit.__all__) <= set(dir(quantkit))


def test_what_users_do_and_what_they_read_of_is_public():
    assert {name for name in quantkit.__all__ if inspect.isfunction(getattr(quantkit, name))} == FUNCTIONS
    pages = "\n".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    imported = ",".join(re.findall(r"^ *from quantkit import (.+)$", pages, flags=re.MULTILINE))
    named = {*re.findall(r"\bquantkit\.([A-Za-z_]+)\(", pages), *re.findall(r"\w+", imported)}
    assert len(named) > 5
    assert named <= set(quantkit.__all__)


@pytest.mark.parametrize("name", [name for name in quantkit.__all__ if name != "__version__"])
def test_every_name_is_there_and_documented(name):
    thing = getattr(quantkit, name)
    assert thing.__name__ == name
    assert thing.__module__.startswith("quantkit.")
    text = inspect.getdoc(thing)
    assert re.match(r"^[A-Z`].*\.", text)
    if inspect.isfunction(thing):
        for parameter in inspect.signature(thing).parameters:
            assert re.search(rf"\b{parameter}: ", text), f"{name} does not document {parameter}"


def test_an_unknown_name_is_an_attribute_error_that_helps():
    with pytest.raises(AttributeError, match=r"no attribute 'quantise'; public names: CheckpointSummary, .*LLM"):
        _ = quantkit.quantise
    assert not hasattr(quantkit, "LLMs")


def test_the_version_is_that_of_the_distribution_or_says_unknown(monkeypatch):

    monkeypatch.setattr(importlib.metadata, "version", lambda name: {DISTRIBUTION: "1.2.3"}[name])
    assert quantkit.__version__ == "1.2.3"

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert quantkit.__version__ == "0+unknown"


def modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_quantkit_imports_nothing_heavy():
    heavy = {"torch", "transformers", "pydantic", "yaml", "rich", "click", "safetensors"}
    assert not heavy & modules_after("import quantkit")


def test_records_errors_and_architectures_are_torch_free():
    code = "from quantkit import CheckpointSummary, CompressionResult, QuantkitError\nimport quantkit.models.families"
    assert "torch" not in modules_after(f"{code}\nquantkit.models.families.supported()")


@pytest.mark.slow
def test_that_the_check_above_can_fail():
    assert "torch" in modules_after("import quantkit\nquantkit.Recipe")


def test_recipes_are_listed_with_their_descriptions():
    recipes = quantkit.list_recipes()
    assert list(recipes) == sorted(recipes)
    assert recipes["awq-int4"] == quantkit.load_recipe("awq-int4").description


def test_a_recipe_object_can_be_changed_like_a_file():
    recipe = quantkit.load_recipe("gptq-int4")
    assert quantkit.load_recipe(recipe) is recipe
    changes = {"weights.group_size": 32, "steps.gptq.damping": 0.05}
    changed = quantkit.load_recipe(recipe, changes)
    assert changed == quantkit.load_recipe("gptq-int4", changes)
    assert changed.description == recipe.description
    assert recipe.scheme.default.weight.group_size == 128
    with pytest.raises(RecipeError, match=r"gptq-int4: weights\.dtype: unknown number type 'int7'"):
        quantkit.load_recipe(recipe, ["weights.dtype=int7"])


def test_quantize_passes_on_what_it_is_given(monkeypatch, tmp_path):
    import quantkit.api

    calls = []
    monkeypatch.setattr(quantkit.api, "_run", lambda *args, **options: calls.append((args, options)))
    quantkit.quantize()
    quantkit.quantize(tmp_path, "rtn-int4", "out", overrides=["weights.group_size=32"], device="cpu", resume=False)
    (model, recipe, output), options = calls[0]
    assert (model, recipe, output) == (None, quantkit.load_recipe("awq-int4"), None)
    defaults = inspect.signature(pipeline.quantize).parameters
    assert all(defaults[name].default == value for name, value in options.items())
    (model, recipe, output), options = calls[1]
    assert (model, output, options["device"], options["resume"]) == (str(tmp_path), "out", "cpu", False)
    assert recipe == quantkit.load_recipe("rtn-int4", {"weights.group_size": 32})


def test_the_wrapper_and_the_pipeline_agree_on_their_options():
    ours = inspect.signature(quantkit.quantize).parameters
    theirs = inspect.signature(pipeline.quantize).parameters
    assert set(ours) - {"overrides"} == set(theirs)


def test_verify_passes_on_what_it_is_given_and_writes_only_where_told(monkeypatch, tmp_path):
    from quantkit.evaluate.verify import pair_checks, run
    from tests.report.synthetic import make_report

    calls = []
    report, early = make_report(), make_report(name="early")

    def verify_pair(given, options, progress, keep):
        assert given is calls[-1]
        keep(early)
        folder = tmp_path / "new"
        assert not folder.exists() or "early" in (folder / "report.json").read_text()
        return report

    monkeypatch.setattr(
        pair_checks, "check_pair", lambda *given, adapters: calls.append((*given, adapters)) or calls[-1]
    )
    monkeypatch.setattr(run, "verify_pair", verify_pair)
    assert quantkit.verify("out") is report
    assert not list(tmp_path.iterdir())
    options = run.VerifyOptions(engine={"adapters": ("x=folder",)})
    quantkit.verify("out", "model", gates=["kl<=0.1"], output=tmp_path / "new", options=options)
    assert calls == [("out", None, None, ()), ("out", "model", ["kl<=0.1"], ("x=folder",))]
    assert "early" not in (tmp_path / "new" / "report.json").read_text()


def test_importing_torch_does_not_import_quantkit():
    assert not any(name.partition(".")[0] == "quantkit" for name in modules_after("import torch"))
