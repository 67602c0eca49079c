"""Every causal language model of transformers, tiny: written by recipes, loaded, run, and compared with the truth.

    python evals/checks/every_model.py [--classes llama,mamba] [--recipes rtn-int4,fp8-dynamic] [--jobs 2]

Rows go to evals/results/models/<version of transformers>.json as they come; a row that the same code and versions made
already is not made again (--again makes it). One child per model, forked after the imports, with limits of time and
memory: what crashes, hangs or grows costs its own row. Verdicts of a recipe:

    right     equal to the truth in transformers and in quantkit (bounds: model_row.py)
    refused   an error of quantkit with its reason, before anything is written or when it is run
    quantkit only  written, with the warning that transformers does not load it; right in quantkit
    wrong     written, but it does not load, loads with other keys, or computes something else
    crash     any other exception, a signal, out of time or memory
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from processes import run_forked
from provenance import write_whole

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).parents[2]
RECIPES = ("rtn-int4", "gptq-int4", "fp8-dynamic", "w8a8-int8")
VERDICTS = ("right", "quantkit only", "refused", "wrong", "crash", "not built", "no decoder")
LIMIT_BYTES = 8 << 30


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", default="", help="names of rows, with commas; default all")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="shipped recipes, with commas")
    parser.add_argument("--jobs", type=int, default=1, help="models at once")
    parser.add_argument("--limit", type=float, default=180, help="seconds for a model")
    parser.add_argument("--again", action="store_true", help="make rows again that are there")
    parser.add_argument("--output", type=Path, default=None, help="file of rows")
    options = parser.parse_args(arguments)
    import_all()
    import tiny_models

    file = options.output or ROOT / "evals/results/models" / f"{versions()['transformers']}.json"
    names = options.classes.split(",") if options.classes else list(tiny_models.rows())
    if unknown := sorted(set(names) - set(tiny_models.rows())):
        parser.error(f"there is no row {', '.join(unknown)}")
    rows = read(file)
    recipes = options.recipes.split(",")
    wanted = [name for name in names if options.again or _missing(rows.get(name), recipes)]
    made = dict.fromkeys(VERDICTS, 0)
    with ThreadPoolExecutor(options.jobs) as pool:
        work = partial(row, recipes=recipes, limit=options.limit)
        for name, done in zip(wanted, pool.map(work, wanted), strict=True):
            rows[name] = _joined(rows.get(name), done)
            write(file, rows)
            made[verdict(done)] += 1
            print(json.dumps({"name": name, "verdict": verdict(done), **done}), flush=True)
    print(json.dumps(made))


def import_all() -> None:
    """What every child needs, so that none takes the time."""
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    import compressed_tensors  # noqa: F401
    import model_row  # noqa: F401
    import transformers
    import transformers.models.llama.modeling_llama
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import quantkit.compress.convert.source
    import quantkit.compress.pipeline.run
    import quantkit.runtime.llm  # noqa: F401
    from quantkit.compress.algorithms import REGISTRY as STEPS
    from quantkit.formats import REGISTRY as FORMATS
    from quantkit.models.families import known

    for registry in (STEPS, FORMATS):
        registry.all()
    known()
    get_checkpoint_conversion_mapping("llama")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@cache
def versions() -> dict[str, str]:
    """What a row depends on: the libraries, and every line of the package and of this check."""
    from importlib.metadata import version

    digest = hashlib.sha256()
    files = [*(ROOT / "quantkit").rglob("*.py"), *(ROOT / "recipes").glob("*.yaml")]
    files += [ROOT / "evals/checks" / name for name in ("likeness.py", "model_row.py", "tiny_models.py")]
    for path in sorted(files):
        digest.update(path.read_bytes())
    names = ("transformers", "torch", "compressed-tensors")
    return {"code": digest.hexdigest()[:12], **{name: version(name) for name in names}}


def read(file: Path) -> dict[str, Any]:
    """Rows by name."""
    return {row.pop("name"): row for row in json.loads(file.read_text())} if file.exists() else {}


def write(file: Path, rows: dict[str, Any]) -> None:
    """One line per row, in order of their names; the file is there or it is not."""
    lines = [json.dumps({"name": name, **rows[name]}) for name in sorted(rows)]
    write_whole(file, "[\n" + ",\n".join(lines) + "\n]\n")


def _missing(known: dict[str, Any] | None, recipes: list[str]) -> bool:
    return known is None or known["versions"] != versions() or not (set(recipes) <= set(known["asked"]))


def _joined(known: dict[str, Any] | None, done: dict[str, Any]) -> dict[str, Any]:
    """Recipes that the same code has tried before stay beside those that were tried now."""
    if known is None or known["versions"] != done["versions"]:
        return done
    asked = sorted({*known["asked"], *done["asked"]})
    return {**done, "asked": asked, "recipes": {**known["recipes"], **done["recipes"]}}


def verdict(row: dict[str, Any]) -> str:
    """Of a whole row: the worst of what was seen; refused only where every recipe was.

    Args:
        row: as kept.
    Returns:
        one of `VERDICTS`.
    """
    if "crashed" in row:
        return "crash"
    if row["built"] != "yes":
        return "not built"
    if row["decoder"] != "yes":
        return "no decoder"
    seen = [entry["verdict"] for entry in row["recipes"].values()]
    everything = [*seen, *([row["source"]["verdict"]] if row["source"]["verdict"] != "refused" else [])]
    return next((verdict for verdict in ("crash", "wrong") if verdict in everything), None) or next(
        (verdict for verdict in ("right", "quantkit only") if verdict in seen), "refused"
    )


def row(name: str, *, recipes: list[str], limit: float) -> dict[str, Any]:
    """One row, made in a child."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result, stdout, stderr = (Path(folder) / part for part in ("row.json", "stdout", "stderr"))
        work = partial(_make, name, Path(folder) / "work", recipes, result)
        code, _ = run_forked(work, stdout=stdout, stderr=stderr, limit_s=limit, limit_bytes=LIMIT_BYTES)
        if result.exists():
            done = json.loads(result.read_text())
        else:
            last = stderr.read_text(errors="replace").strip().splitlines()[-1:]
            how = f"more than {limit:g} s" if code is None else f"ended with {code}"
            done = {"built": "yes", "decoder": "yes", "recipes": {}, "crashed": " ".join([how, *last])[:300]}
    seconds = round(time.monotonic() - began, 1)
    return {**done, "asked": sorted(recipes), "seconds": seconds, "versions": versions()}


def _make(name: str, work: Path, recipes: list[str], result: Path) -> None:
    import model_row

    work.mkdir()
    write_whole(result, json.dumps(model_row.make_row(name, work, recipes)))


if __name__ == "__main__":
    main()
