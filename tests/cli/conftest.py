"""The command line as users call it."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version

import pytest
from click.testing import CliRunner

from quantkit.benchmark.options import BenchmarkOptions
from quantkit.cli import main, verify
from quantkit.compress import pipeline
from quantkit.evaluate.tasks import read_named_text

ONE_REQUEST = BenchmarkOptions(concurrencies=(1,), prompt_tokens=8, new_tokens=2, num_requests=1)


@pytest.fixture
def run(capsys):
    """Run `quantkit ...`; exit code, stdout, stderr."""

    def command(*args):
        with pytest.raises(SystemExit) as exit_:
            main(list(map(str, args)))
        captured = capsys.readouterr()
        return exit_.value.code, captured.out, captured.err

    return command


@pytest.fixture
def invoke():
    """Run `quantkit ...`; click's result of it."""
    # Before click 8.2 a runner mixes the two streams unless it is told not to.
    runner = CliRunner(**({"mix_stderr": False} if version("click") < "8.2" else {}))
    return lambda *args: runner.invoke(main, list(args))


@pytest.fixture
def three_items(monkeypatch, tmp_path_factory):
    """`quantize --verify` asks the quick suite; here three items, a page of text and one request stand for it."""
    options_of = verify.verify_options
    page = tmp_path_factory.mktemp("text") / "page.txt"
    page.write_text(read_named_text("demo", ())[:3000])

    def small(asked, engine, **options):
        few = {**asked, "suite": "none", "tasks": ("demo_facts",), "limit": 3}
        made = options_of(few, {**engine, "threads": 1}, **{**options, "text": str(page)})
        return replace(made, noise=False, bench=made.bench and ONE_REQUEST)

    monkeypatch.setattr(verify, "verify_options", small)


@pytest.fixture
def short_samples(monkeypatch):
    """Calibration on 8 sequences of 32 tokens, whatever is asked; the command and all that it runs are the same."""
    quantize = pipeline.quantize

    def quickly(model, recipe, *args, **options):
        if recipe.calibration is not None:
            short = recipe.calibration.model_copy(update={"samples": 8, "sequence_length": 32})
            recipe = replace(recipe, calibration=short)
        return quantize(model, recipe, *args, **options)

    monkeypatch.setattr(pipeline, "quantize", quickly)
