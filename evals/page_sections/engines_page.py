"""Make the tables of docs/formats.md about engines: what rules predict, what CPUs showed; for evals/pages.py."""

from __future__ import annotations

import functools
import itertools
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import provenance

from quantkit.compress.recipe import Recipe, load, shipped
from quantkit.compress.recipe.load import settled
from quantkit.engine_rules import StoredLinear, StoredModel, find_engine, judge
from quantkit.engine_rules.data_sheets import CAPABILITIES

RESULTS, OTHERS = (Path(__file__).resolve().parents[1] / "results" / name for name in ("vllm", "cpu_engines"))
NAMES = {"gemma3_text": "gemma3"}
EXPERTS = ("mixtral", "qwen3_moe")  # models whose layers have experts
WITHDRAWN = "awq-gptq-int4"  # a recipe that quantkit no longer ships, but shipped when the rows were measured
_QUOTED = 100  # maximum characters of an engine's message
ENGINES = ("vllm", "vllm:cpu", "sglang", "transformers", "tensorrt-llm", "llama.cpp")
SERVED = (
    *((f"`{name}`", name, {}) for name in shipped() if name not in ("kv-fp8", "awq-int4-kv4", "awq-int4-kv8")),
    ("`gptq-int4` as `gptq`", "gptq-int4", {"format": "gptq"}),
    ("`gptq-int4` with zero points as `gptq-v2`", "gptq-int4", {"format": "gptq-v2", "weights.symmetric": False}),
    ("`awq-int4` as `awq`", "awq-int4", {"format": "awq", "weights.symmetric": False}),
    ("`rtn-int4` in groups of 256", "rtn-int4", {"weights.group_size": 256}),
    ("int3", "rtn-int4", {"weights.dtype": "int3"}),
    ("`rtn-int4` as `gguf`", "rtn-int4", {"format": "gguf", "weights.group_size": 32}),
)


def rules() -> str:
    """Return the table of how each engine reads the output of recipes, according to our rules."""
    known = [(find_engine(name)[0], name.partition(":")[2]) for name in ENGINES]
    head = ["", *(f"{engine.title} {engine.release}{device and f', {device}'}" for engine, device in known)]
    rows = []
    for title, name, changes in SERVED:
        model = _stored(load(name, changes))
        rows.append([title, *(_on_gpus(engine, model) for engine in ENGINES)])
    return provenance.table(head, rows)


def _on_gpus(engine: str, model: StoredModel) -> str:
    """Say how an engine reads a model from compute capability 8.0 on, e.g. `fast` or `8.0 to 9.0: fast; ...`."""
    answers = [(device, judge(engine, model, device).reads) for device in CAPABILITIES[1:]]
    runs = [list(run) for _, run in itertools.groupby(answers, key=lambda pair: pair[1])]
    spans = []
    for run in runs:
        first, last = (f"{run[end][0] / 10:.1f}" for end in (0, -1))
        span = (
            f"from {first} on: "
            if run[-1] == answers[-1]
            else f"{first}: "
            if first == last
            else f"{first} to {last}: "
        )
        spans.append(f"{'' if len(runs) == 1 else span}{run[0][1]}")
    return "; ".join(spans)


def vllm() -> str:
    """Return what vLLM's CPU build did: versions, the table, what vLLM refuses and why, and the planted faults."""
    rows, breaches = (newest(kind) for kind in ("rows", "breaches"))
    made = rows["made"]
    noticed = sum(row["verdict"] == "noticed" for row in breaches["rows"])
    versions = f"Versions: vLLM {made['vllm']} and torch {made['torch']}, compared with {made['reference']}."
    found = f"We planted {len(breaches['rows'])} faults in checkpoints of the demo model, and {noticed} were noticed: "
    names = "; ".join(row["breach"] for row in breaches["rows"])
    return f"{versions}\n\n{_table(rows['rows'])}\n\n{_refusals(rows['rows'])}\n\n{found}{names}."


def verified() -> str:
    """Return the table of `verify` and `eval` with vLLM and with our engine: answers of each item, KL, gates."""
    head = ["", "items", "answered differently", "KL by our engine", "KL by vLLM", "KL by vLLM, with noise", "gates"]
    return provenance.table(head, [_compared(row) for row in newest("verify")])


def _compared(row: dict[str, Any]) -> list[str]:
    by_side = row["answered otherwise"]
    # `verify` lists items of the checkpoint and of the original; `eval` gives the difference of each item.
    ties = [f"{item}: {gap:.1e} nats" for item, gap in by_side.items() if not isinstance(gap, list)]
    differ = len(ties) or sum(len(items) for items in by_side.values())
    cells = [f"`{row['what']}`", str(row["items"]), f"{differ}{' (' + '; '.join(ties) + ')' if ties else ''}"]
    if "gates" not in row:
        return [*cells, "", "", "", ""]
    spans = [" to ".join(f"{end:.6f}" for end in row[name]) for name in ("ends", "in an arithmetic as close")]
    alike = "equal" if row["gates alike"] else "different"
    gates = f"{alike} verdicts, {sum(row['gates'].values())} of {len(row['gates'])} pass"
    return [*cells, f"{row['ours']:.6f}", *spans, gates]


def newest(kind: str) -> Any:
    """Return rows, breaches or results of `verify` for the newest vLLM, without the rows of a withdrawn recipe."""
    found = json.loads(max(RESULTS.glob(f"*-cpu-{kind}.json")).read_text())
    return {**found, "rows": [row for row in found["rows"] if row["case"] != WITHDRAWN]} if kind == "rows" else found


def _table(rows: list[dict[str, Any]]) -> str:
    models = list(dict.fromkeys(row["model"] for row in rows))
    cases = sorted({row["case"] for row in rows}, key=lambda case: (case != "unquantized", case))
    known = {(row["model"], row["case"]): row for row in rows}
    head = ["", *(NAMES.get(model, model) for model in models)]
    return provenance.table(
        head, [[f"`{case}`", *(_cell(known.get((model, case))) for model in models)] for case in cases]
    )


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["verdict"] != "agrees" or "difference" not in row:
        return {"agrees": "used"}.get(row["verdict"], row["verdict"].removesuffix(" by vLLM"))
    recipe = row["case"].partition(" as ")[0]
    is_old = recipe != "unquantized" and row.get("code") != _code(recipe)
    return f"{row['difference']:.3f}{provenance.MARK if is_old else ''}"


@functools.cache
def _code(recipe: str) -> str:
    return provenance.digest(load(recipe).source)


def _refusals(rows: list[dict[str, Any]]) -> str:
    """Say why vLLM refuses, according to our rules; the rows hold vLLM's own messages."""
    said: dict[str, dict[str, None]] = {}
    for row in rows:
        if row["verdict"] == "refused by vLLM":
            said.setdefault(_reason("vllm:cpu", row), {})[f"`{row['case']}`"] = None
    return "\n".join(f"- {', '.join(cases)}: {reason}" for reason, cases in said.items())


def others() -> str:
    """Return what other CPU engines did with exports of the demo model."""
    results = [{"name": name, **result} for name, result in provenance.read_results(OTHERS).items()]
    cases = list(dict.fromkeys(row["case"] for result in results for row in result["rows"]))
    known = [{row["case"]: row for row in result["rows"]} for result in results]
    head = ["", *(result["made"]["engine"] for result in results)]
    table = provenance.table(head, [[f"`{case}`", *(_seen(rows.get(case)) for rows in known)] for case in cases])
    return "\n".join([table, "", *_others_refusals(results)])


def _others_refusals(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield each failure with the reason that our rules give and the message of the engine."""
    for result in results:
        said: dict[tuple[str, str], list[str]] = {}
        for row in result["rows"]:
            if row["verdict"] != "agrees":
                key = _reason(result["made"].get("rules", result["name"]), row), row.get("reason", "")
                said.setdefault(key, []).append(f"`{row['case']}`")
        for (rule, words), cases in said.items():
            quoted = f' Its message: "{textwrap.shorten(words, _QUOTED, placeholder="...")}"' if words else ""
            yield f"- {result['made']['engine'].split()[0]}, {', '.join(cases)}. Our rule: {rule}.{quoted}"


def _reason(engine: str, row: dict[str, Any]) -> str:
    """Return the reason that our rules give today for a case that an engine did not compute correctly."""
    name, _, export = row["case"].partition(" as ")
    kinds = (False, True) if row.get("model") in EXPERTS else (False,)
    return judge(engine, _stored(load(name), export, kinds)).reason


def _stored(recipe: Recipe, export: str = "", kinds: tuple[bool, ...] = (False,)) -> StoredModel:
    """Return what a recipe stores for a model with sizes that suit all kernels.

    There is one linear for each value in `kinds`; True = a linear of an expert.
    """
    if recipe.source.get("weights", {}).get("symmetric") == "auto":
        recipe = settled(recipe, symmetric=any(kinds))  # as planning settles `auto` for these rows
    linears = tuple(StoredLinear(scheme=recipe.scheme.default, shape=(4096, 4096), expert=kind) for kind in kinds)
    return StoredModel(format=export or recipe.format, linears=linears, hidden_size=4096)


def _seen(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    difference = f", {row['difference']:.3f}" if "difference" in row and row["verdict"] == "agrees" else ""
    return f"{row['verdict']}{difference}"
