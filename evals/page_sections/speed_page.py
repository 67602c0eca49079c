"""Make the tables of docs/performance.md that compare our speed with llama.cpp and transformers; for evals/pages.py.

Standard library only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import provenance

RESULTS = Path(__file__).parents[1] / "results/runtime_speed"
HEAD = ("engine", "threads", "prefill tok/s", "decode tok/s", "MB", "bandwidth")
PEER = "llama.cpp Q4_0"
OURS = "quantkit W4A16, int8 head"


def tables() -> str:
    """Return the part of the page: one table per model and machine."""
    return "\n".join(map(_table, provenance.read_results(RESULTS).values())).rstrip("\n")


def readme_sentence() -> str:
    """Return what README says about the real models that were measured."""
    amx, avx512, avx2 = map(_speed, ("smollm2", "qwen2.5-coder_avx512", "qwen2.5-coder"))
    return (
        f"For a single request, quantkit with 4-bit weights reaches these multiples of the speed of {PEER} "
        "([tables](docs/performance.md#speed-on-a-cpu)):\n\n"
        f"- SmolLM2-135M on a CPU with AMX, compared with llama.cpp built for AVX-512: {amx}.\n"
        f"- Qwen2.5-Coder-0.5B on a CPU with AVX-512: {avx512}.\n"
        f"- Qwen2.5-Coder-0.5B on a CPU with AVX2 only: {avx2}."
    )


def _speed(name: str) -> str:
    result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    ours, peers = (
        {row["threads"]: row for row in result["rows"] if row["engine"] == engine} for engine in (OURS, PEER)
    )
    return "; ".join(
        f"prefill {own['prefill'] / peers[threads]['prefill']:.1f} and decode "
        f"{own['decode'] / peers[threads]['decode']:.1f} with {threads} thread{'s' * (threads > 1)}"
        for threads, own in sorted(ours.items())
    )


def _table(result: dict[str, Any]) -> str:
    taken, rows = result["taken"], result["rows"]
    peer = result.get("peer", PEER)
    peers = {row["threads"]: row for row in rows if row["engine"] == peer}
    about = next(row["about"] for row in rows if "about" in row)
    version = next(row["version"] for row in rows if "version" in row)
    used = [name for name in ("AVX512_BF16", "AMX_INT8") if f"{name} = 1" in about]
    narrow = "; quantkit with AVX2 only" if result["avx2"] else ""
    head = (*HEAD, f"prefill, decode / {peer}")
    return (
        f"**{result['model']}** on {taken['machine']}{narrow}\n\n"
        f"{provenance.table(head, [_cells(row, peers[row['threads']]) for row in rows])}\n\n"
        f"Medians of {result['rounds']} rounds; commit {taken['commit']}, torch {taken['versions']['torch']}, "
        f"llama-cpp-python {version} built with {' and '.join(used) or 'AVX2'}.\n"
    )


def _cells(row: dict[str, Any], peer: dict[str, Any]) -> tuple[str, ...]:
    size = f"{row['bytes'] / 1e6:.0f}" if "bytes" in row else ""
    share = f"{100 * row['bandwidth']:.0f} %" if "bandwidth" in row else ""
    ratios = ", ".join(f"{row[name] / peer[name]:.2f}" for name in ("prefill", "decode"))
    return row["engine"], row["threads"], f"{row['prefill']:.0f}", f"{row['decode']:.1f}", size, share, ratios
