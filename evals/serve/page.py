# ruff: noqa: RUF001 - the sign of times is meant
"""The measured part of docs/serve.md, made of evals/results/serve/*.json, for evals/pages.py; standard library only.

What has not been measured is said in a sentence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from provenance import table_line

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
    "cost": """**What the door costs** (`evals/checks/server_cost.py`): the same requests three ways. *In process*:
the next request of a stream is part of the next step. *Behind a step*: in process too, but it comes once that step has
begun, as any client's does. *HTTP*: through the server. One thread computes; event loop and client have the
other core.""",
    "clients": """**Three load generators** against one server of the demo model (`evals/serve/clients.py`), medians of
rounds in turns.""",
    "peers": """**Side by side** (`evals/serve/peers.py`): the same bfloat16 weights, 8 layers of a TinyLlama-1.1B,
one server after the other on a CPU, measured by `quantkit bench --url`.""",
    "soak": """**Soak** (`evals/checks/server_soak.py`): requests of which a third go away at random moments, two slow
readers, three lengths of prompt, too few pages for all, integrity checked after every step.""",
}
SPEED = ("tokens/s in process", "behind a step", "HTTP", "HTTP to in process")
SPEED += ("TTFT ms behind a step", "HTTP", "the door's")
CPU = ("CPU µs/token in process", "server", "of it its event loop", "client")
CPU_OF = ("cpu", "loop", "client")  # of the server, its event loop, and whoever asks it


def render(results: Path = RESULTS) -> str:
    """The part of the page."""
    lines = list[str]()
    for name, text in TEXTS.items():
        path = results / f"{name}.json"
        lines += ["", text, ""]
        if path.exists():
            lines += PARTS[name](json.loads(path.read_text(encoding="utf-8")))
        else:
            lines.append("Not measured yet.")
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
        yield from map(table_line, (["model", "streams", *columns], ["---"] * (len(columns) + 2), *rows))
        yield ""
    yield f"The door's part of TTFT is the client's less the server's own, means. {_origin(data)}"


def _figure(figures: dict[str, float], key: str) -> str:
    value = figures.get(key)
    return "–" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _clients(data: dict[str, Any]) -> Iterator[str]:
    rows = []
    for row in data["rows"]:
        medians = {key: median(each[key] for each in row["rounds"]) for key in row["rounds"][0]}
        rows.append({"streams": row["streams"], "client": row["client"], **medians})
    yield from _table(rows, "client")
    yield ""
    yield f"{_origin(data)} {_versions(data['about']['clients'])}."


def _peers(data: dict[str, Any]) -> Iterator[str]:
    yield from _table(data["rows"], "server")
    yield ""
    yield f"{_origin(data)} {data['about']['threads']} threads each. {_versions(data['about']['servers'])}."


def _soak(data: dict[str, Any]) -> Iterator[str]:
    about, outcomes = data["about"], data["outcomes"]
    asked = f"{about['requests']} requests, {data['pages']:.0f} pages"
    yield f"{asked}: {outcomes['answered']} answered, {outcomes['left']} left before their answer,"
    others = sum(outcomes.values()) - outcomes["answered"] - outcomes["left"]
    yield f"{others} otherwise; {data['preemptions']:.0f} preemptions; {data['pages_used']:.0f} pages held at the end;"
    yield f"resident memory of the last quarter {data['resident_last_over_first']:.4f}× that of the first."
    verdict = "All that is asked of it held." if all(data["held"].values()) else "NOT all that is asked of it held."
    yield f"{verdict} Commit {about['commit']}, {about['date']}."


PARTS = {"cost": _cost, "clients": _clients, "peers": _peers, "soak": _soak}


def _table(rows: list[dict[str, Any]], who: str) -> Iterator[str]:
    """A line per row; only the columns that rows have."""
    shown = {key: name for key, name in COLUMNS.items() if key in rows[0]}
    yield table_line(["streams", who, *shown.values()])
    yield "|" + "---|" * (len(shown) + 2)
    for row in rows:
        yield table_line([row["streams"], row[who], *(f"{row[key]:.3g}" for key in shown)])


def _versions(several: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in several.items()) or "No peers"


def _origin(data: dict[str, Any]) -> str:
    about = data["about"]
    machine = f"{about['processor']}, {about['cores']} cores"
    busy = f"; others kept {about['busy_before']:.0%} of it busy" if about["busy_before"] > 0.1 else ""
    tokens = f"prompts of {about['prompt_tokens']} tokens, {about['new_tokens']} new ones"
    return f"Commit {about['commit']}, {about['date']}, {machine}{busy}; {tokens}."
