"""Memory that a command does without."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from quantkit.machine import memory


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
