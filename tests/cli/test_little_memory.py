"""Under a limit on memory (`ulimit -v`) every command ends with exit code 5 and one line, whatever its libraries do."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys

import pytest

from quantkit.demo import DEMO_MODEL
from quantkit.machine import memory


@pytest.mark.parametrize("kib", [300_000, 500_000, 570_000])
def test_an_import_that_does_not_fit_is_one_line(kib):
    limit = kib << 10
    done = subprocess.run(
        [sys.executable, "-m", "quantkit", "inspect", str(DEMO_MODEL)],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.returncode == 5, done.stderr
    assert done.stderr.startswith("error: out of memory: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("installed", [pytest.param(True, marks=pytest.mark.slow), False])
def test_what_is_never_called_is_not_imported(installed):
    """By transformers and compressed-tensors, where those are there; it can be, later."""
    code = (
        f"import sys, importlib; sys.modules |= {{}} if {installed} else {{'compressed_tensors': None}};"
        "from quantkit.machine import memory; memory.spare_memory();"
        "import quantkit.compress.pipeline;"
        "unused = {*memory._OPTIONAL, 'gguf', 'datasets', 'pandas', 'sklearn', 'torchvision', 'vllm', 'ray'};"
        "print(unused & sys.modules.keys() or [], 'transformers.loss' in sys.modules);"
        "[importlib.import_module(name) for name in memory._OPTIONAL if importlib.util.find_spec(name)]"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.stdout, run.returncode) == (f"[] {installed}\n", 0), run.stderr


def test_what_a_large_import_makes_is_never_searched_for_garbage(monkeypatch):
    monkeypatch.delitem(sys.modules, "json.tool", raising=False)
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    with pytest.raises(ImportError), memory.importing("json.tool"):
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() and frozen == [False]
    with memory.importing("json"):  # is there already: others have made garbage since, which freezing would keep
        assert gc.isenabled()
    assert frozen == [False]
