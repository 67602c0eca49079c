"""What each number type of the KV cache costs, for docs/runtime.md; for evals/pages.py.

Standard library only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import provenance

RESULTS = Path(__file__).parents[1] / "results/kv_types"
PEERS = "peers-"  # begins the names of files of transformers' own caches
KINDS = {
    "passkey": "one key",
    "multikey": "one of eight",
    "multivalue": "four of eight",
    "variables": "variables",
    "words": "frequent words",
}


def tables() -> str:
    """The part of the page: distances, then recall and speed, then transformers' own quantized caches."""
    known = provenance.read_results(RESULTS)
    ours = {name: rows for name, rows in known.items() if not name.startswith(PEERS)}
    theirs = {name.removeprefix(PEERS): rows for name, rows in known.items() if name.startswith(PEERS)}
    return "\n".join([*_distances(ours), "", *_uses(ours), "", *_peers(theirs), ""])


def _rows(known: dict[str, Any], field: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Model, type and figures of every row that has this measurement, the largest cache first."""
    return [
        (model, kind, row[field])
        for model, rows in known.items()
        for kind, row in sorted(rows.items(), key=lambda item: -item[1]["distance"]["size"])
        if field in row
    ]


def _shown(kind: str) -> str:
    return "16 bits" if kind == "auto" else f"`{kind}`"


def _distances(known: dict[str, Any]) -> list[str]:
    rows = _rows(known, "distance")
    head = ["model", "cache", "size of quantized layers / 16 bits", "tokens per window", "KL, prefill"]
    head += ["KL, decode", "perplexity, prefill", "perplexity, decode", "tokens per sampled text"]
    head += [f"KL, quarter {n}" for n in range(1, 5)]
    head.append("drift per 1,000 tokens")
    growing = [f"{model} with {_shown(kind)}" for model, kind, found in rows if found["drift"]["slope_low"] > 0]
    grows = (
        f"The 95 % interval of the drift is above 0, so the KL grows along the texts, for {', '.join(growing)}."
        if growing
        else "In every row, the 95 % interval of the drift includes 0 or lies below: no growth of the KL is certain."
    )
    ratio, model, kind = max(
        (found["kl"] / found["prefill_kl"], model, kind) for model, kind, found in rows if found.get("prefill_kl")
    )
    hidden = (
        f"Prefill hides most of the error of {_shown(kind)} on {model}: its KL is {ratio:.0f} times larger in decoding."
    )
    small = ", ".join(f"{ratio:.1f} on {model}" for model, ratio in _ratios(known))
    along = f"On the sampled texts, the mean KL of `k4v2`, divided by that of `int4`, is {small}."
    note = f"KL in nats, to the same model with an unquantized cache. {hidden} {along} {grows} {_said(rows)}"
    return [provenance.table(head, [_distance(*row) for row in rows]), "", note]


def _ratios(known: dict[str, Any]) -> list[tuple[str, float]]:
    """For each model, the mean KL of k4v2 along the texts, divided by that of int4."""
    means = {
        (model, kind): sum(found["drift"]["part_kl"]) / len(found["drift"]["part_kl"])
        for model, kind, found in _rows(known, "distance")
    }
    return [(model, means[model, "k4v2"] / means[model, "int4"]) for model in known]


def _distance(model: str, kind: str, found: dict[str, Any]) -> list[str]:
    drift = found["drift"]
    return [
        *(model, _shown(kind), f"1/{1 / found['size']:.2f}" if found["size"] < 1 else "1", str(found["window"])),
        *(f"{found[name]:.2g}" if name in found else "" for name in ("prefill_kl", "kl")),
        *(f"{found[name]:.2f}" if name in found else "" for name in ("prefill_perplexity", "perplexity")),
        *(f"{drift['num_tokens']:,}", *(f"{each:.2g}" for each in drift["part_kl"])),
        f"{drift['slope']:.4f} ({drift['slope_low']:.4f} to {drift['slope_high']:.4f})",
    ]


def _uses(known: dict[str, Any]) -> list[str]:
    """Tokens per GiB, the share of facts that are found, and the speed of decoding."""
    sizes = {(model, kind): found.get("tokens_per_gib") for model, kind, found in _rows(known, "distance")}
    speeds = {(model, kind): found for model, kind, found in _rows(known, "speed")}
    rows = _rows(known, "recall")
    lengths = {found["length"] for found in [*speeds.values(), *(found for _, _, found in rows)]}
    assert len(lengths) == 1, f"recall and speed were measured with prompts of {sorted(lengths)} tokens"
    length = lengths.pop()
    cells = [
        [
            *(model, _shown(kind), f"{sizes[model, kind]:,}"),
            *(f"{found['found'][each]:.2f}" for each in KINDS),
            f"{speeds[model, kind]['decode']:.1f}" if (model, kind) in speeds else "",
        ]
        for model, kind, found in rows
    ]
    counts = {kind: len(rows[0][2]["answers"][kind]) for kind in KINDS}
    first, *others = KINDS
    assert len({counts[kind] for kind in others}) == 1, f"numbers of texts differ: {counts}"
    note = (
        f"*{KINDS[first]}* to *{KINDS[others[-1]]}*: share of facts that the model finds in texts of {length:,} "
        f"tokens, {counts[first]} texts with one key and {counts[others[0]]} of each other "
        f"[kind](evaluate.md#long-contexts). "
        f"*decode tok/s*: tokens per second of one request after a prompt of {length:,} tokens. "
        f"{_said([*rows, *_rows(known, 'speed')])}"
    )
    return [provenance.table(("model", "cache", "tokens per GiB", *KINDS.values(), "decode tok/s"), cells), "", note]


def _peers(theirs: dict[str, Any]) -> list[str]:
    """The same windows in transformers."""
    head = ("model", "cache of transformers", "KL, decode", "perplexity, decode", "with an unquantized cache")
    cells = [
        (model, kind, f"{row['kl']:.2g}", f"{row['perplexity']:.2f}", f"{row['original_perplexity']:.2f}")
        for model, rows in theirs.items()
        for kind, row in rows.items()
    ]
    versions = next(iter(next(iter(theirs.values())).values()))["versions"]
    used = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [
        provenance.table(head, cells),
        "",
        f"The caches of transformers on the same windows of 512 tokens, in float32: {used}.",
    ]


def _said(rows: list[tuple[str, str, dict[str, Any]]]) -> str:
    """Where the figures come from."""
    sources: dict[str, list[str]] = {}
    for model, _, found in rows:
        about = found["about"]
        dtype = about["dtype"].replace("the model's", "the model's dtype")
        source = f"{dtype}, commit {about['commit']}, {about['machine']}"
        if model not in sources.setdefault(source, []):
            sources[source].append(model)
    return "; ".join(f"{', '.join(models)}: {source}" for source, models in sources.items()) + "."
