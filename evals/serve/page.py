# ruff: noqa: RUF001 - the sign of times is meant
"""Make the measured part of docs/serve.md from evals/results/serve/*.json, for evals/pages.py; standard library only.

A sentence marks each part that has not been measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from provenance import table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "evals/results/serve"
COLUMNS = {
    "requests_per_s": "requests/s",
    "tokens_per_s": "tokens/s",
    "ttft_ms": "TTFT ms",
    "tpot_ms": "TPOT ms",
    "itl_ms": "ITL ms",
}


TEXTS = {
    "cost": """**Overhead of HTTP** (`evals/checks/server_cost.py`). The same requests are sent in three ways:

- *in process*: the next request of a stream joins the next step;
- *behind a step*: in process too, but the next request arrives after that step has begun, like a request of any client;
- *HTTP*: through the server.

One thread computes. The event loop and the client share the other core.""",
    "clients": """**Three load generators** measure one server of the demo model (`evals/serve/clients.py`). They take
turns in several rounds; the table shows medians.""",
    "peers": """**Three servers** (`evals/serve/peers.py`). They serve the same bfloat16 weights, 8 layers of a
TinyLlama-1.1B, one server after the other on a CPU. `quantkit bench --url` measures each.""",
    "soak": """**Soak test** (`evals/checks/server_soak.py`). A third of the requests are cancelled at random moments,
two clients read slowly, prompts have three lengths, and the cache has too few pages for all requests. The test checks
the integrity of the cache after every step.""",
}
SPEED = ("tokens/s, in process", "tokens/s, behind a step", "tokens/s, HTTP", "HTTP / in process")
SPEED += ("TTFT ms, behind a step", "TTFT ms, HTTP", "TTFT ms, overhead of HTTP")
CPU = ("CPU µs/token, in process", "CPU µs/token, server", "of which event loop", "CPU µs/token, client")
CPU_OF = ("cpu", "loop", "client")  # of the server, its event loop, and the client


def render(results: Path = RESULTS) -> str:
    """Return the part of the page."""
    lines = list[str]()
    for name, text in TEXTS.items():
        lines += ["", text, ""]
        # The soak test has a file for each number type of the cache.
        measured = [
            "\n".join(PARTS[name](json.loads(path.read_text(encoding="utf-8"))))
            for path in sorted(results.glob(f"{name}*.json"))
        ]
        lines.append("\n\n".join(measured) or "Not measured yet.")
    return "\n".join([*lines[1:], ""])


def _cost(data: dict[str, Any]) -> Iterator[str]:
    speed, cpu = [], []
    for row in data["rows"]:
        name = [row["model"], row["streams"]]
        inside, behind, ours = row["in process"], row.get("behind a step", {}), row["server"]
        rates = [_figure(figures, "tokens_per_s") for figures in (inside, behind, ours)]
        share = f"{ours['tokens_per_s'] / inside['tokens_per_s']:.2f}×"
        times = [_figure(behind, "ttft_ms"), _figure(ours, "ttft_ms"), _figure(ours, "door_ttft_ms")]
        speed.append([*name, *rates, share, *times])
        spent = (_figure(ours, f"{who}_us_per_token") for who in CPU_OF)
        cpu.append([*name, _figure(inside, "cpu_us_per_token"), *spent])
    for columns, rows in ((SPEED, speed), (CPU, cpu)):
        yield table(("model", "streams", *columns), rows)
        yield ""
    yield "The overhead of HTTP in TTFT is the mean that the client measures minus the mean that the server measures."
    yield _origin(data)


def _figure(figures: dict[str, float], key: str) -> str:
    value = figures.get(key)
    return "–" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _clients(data: dict[str, Any]) -> Iterator[str]:
    rows = []
    for row in data["rows"]:
        medians = {key: median(each[key] for each in row["rounds"]) for key in row["rounds"][0]}
        rows.append({"streams": row["streams"], "client": row["client"], **medians})
    yield _table(rows, "client")
    yield ""
    yield f"{_origin(data)} {_versions(data['about']['clients'])}."


def _peers(data: dict[str, Any]) -> Iterator[str]:
    yield _table(data["rows"], "server")
    yield ""
    yield f"{_origin(data)} Each server has {data['about']['threads']} threads. {_versions(data['about']['servers'])}."


def _soak(data: dict[str, Any]) -> Iterator[str]:
    about, outcomes = data["about"], data["outcomes"]
    kind = about.get("kv_cache", "auto")
    cache = "" if kind == "auto" else f"`--kv-cache {kind}`: "
    asked = f"{cache}{about['requests']} requests, {data['pages']:.0f} pages"
    others = sum(outcomes.values()) - outcomes["answered"] - outcomes["left"]
    yield f"{asked}: {outcomes['answered']} answered, {outcomes['left']} cancelled, {others} with a different outcome."
    yield f"{data['preemptions']:.0f} preemptions; {data['pages_used']:.0f} pages in use at the end."
    ratio = f"{data['resident_last_over_first']:.4f}×"
    yield f"Resident memory in the last quarter of the run was {ratio} that in the first quarter."
    verdict = "All checks passed." if all(data["held"].values()) else "**Some checks failed.**"
    yield f"{verdict} Commit {about['commit']}, {about['date']}."


PARTS = {"cost": _cost, "clients": _clients, "peers": _peers, "soak": _soak}


def _table(rows: list[dict[str, Any]], who: str) -> str:
    """Return a table with only the columns that the rows have."""
    shown = {key: name for key, name in COLUMNS.items() if key in rows[0]}
    cells = [(row["streams"], row[who], *(f"{row[key]:.3g}" for key in shown)) for row in rows]
    return table(("streams", who, *shown.values()), cells)


def _versions(several: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in several.items()) or "No peers"


def _origin(data: dict[str, Any]) -> str:
    about = data["about"]
    machine = f"{about['processor']}, {about['cores']} cores"
    busy = f"; other processes kept {about['busy_before']:.0%} of it busy" if about["busy_before"] > 0.1 else ""
    tokens = f"prompts of {about['prompt_tokens']} tokens, {about['new_tokens']} generated tokens"
    return f"Commit {about['commit']}, {about['date']}, {machine}{busy}; {tokens}."
