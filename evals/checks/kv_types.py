"""What each number type of the KV cache costs: the distance from a 16-bit cache, on windows and along long texts.

    python evals/checks/kv_types.py MODEL TEXT [--types fp8,int8,int4] [--tokens 2000] [--windows 8] [--threads 1]
        [-o evals/results/kv_types/NAME.json]

A type `mix=FOLDER` is the cache of a checkpoint of MODEL, whose recipe has only `kv_cache:` (refused otherwise). The
weights are the model's own, so all that is measured comes from the cache. Every token is computed as in decoding.
FILE is written after each type, and types that it has are not measured again, so a killed run goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from provenance import plain, stamp

from quantkit.evaluate.drift import measure_drift
from quantkit.evaluate.fidelity import fidelity, fixed_windows
from quantkit.evaluate.loading import load_llm
from quantkit.kernels.layouts import page_bytes
from quantkit.models.kv_sizes import KV_TYPES
from quantkit.runtime.llm import LLM


def main() -> None:
    """Measure, keep, and print one line per type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--types", default="fp8,int8,int4")
    parser.add_argument("--tokens", type=int, default=2000, help="along which drift is measured")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    output = given.output or Path(__file__).parents[1] / f"results/kv_types/{given.model.name}.json"
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"] if output.exists() else []
    original = load_llm(str(given.model), threads=given.threads)
    windows = fixed_windows(original, given.text.read_text(encoding="utf-8"))[: given.windows]
    for kind, _, folder in (each.partition("=") for each in given.types.split(",")):
        if any(row["type"] == kind for row in rows):
            continue
        if folder and (kind in KV_TYPES or "weights" in read_manifest(folder)["recipe"]):
            parser.error(f"{kind}={folder}: needs a name of its own, and a checkpoint that changes only the cache")
        llm = load_llm(folder or str(given.model), threads=given.threads, kv_cache=None if folder else kind)
        drift = measure_drift(llm, original, windows, tokens=given.tokens, say=print)
        near = fidelity(llm, original, windows, greedy_tokens=0)
        row = {
            "type": kind,
            "kl": near.mean_kl,
            "p99": near.p99_kl,
            "drift": drift.to_dict(),
            "size": _size(llm, original),
        }
        rows.append(row)
        print(f"{kind}: KL {near.mean_kl:.3g}; along texts {', '.join(f'{kl:.3g}' for kl in drift.part_kl)}")
        about = {**plain(stamp()), "dtype": str(original.model.dtype), "text": given.text.name}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: str) -> dict[str, Any]:
    """What the checkpoint says about itself."""
    return dict(json.loads((Path(folder) / "quantkit.json").read_text(encoding="utf-8")))


def _size(llm: LLM, original: LLM) -> float:
    """Return the bytes per token in pages of the layers that are quantized, divided by those in the model's dtype."""
    ours, theirs = (each.engine.runner.cache for each in (llm, original))
    layers = [index for index, layout in enumerate(ours.layouts) if layout.scheme.is_quantized]
    sizes = (page_bytes([cache.layouts[index] for index in layers]) / cache.page_size for cache in (ours, theirs))
    return next(sizes) / next(sizes)


if __name__ == "__main__":
    main()
