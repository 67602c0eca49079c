# ruff: noqa: RUF001 - the sign of times is meant
"""The GPU section of docs/performance.md, made of evals/results/<gpu>/*.json; standard library only.

    python evals/gpu/page.py [--write docs/performance.md] [--results FOLDER]

Without `--results` every folder of evals/results with figures of a GPU is shown; with none, what predictions.json says.
A table per bench. Figures of a rehearsal on the CPU are only shown where their folder is named, under a heading that
says so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "evals/results"
BEGIN, END = "<!-- gpu: made by evals/pages.py -->", "<!-- gpu: end -->"
PARTS = (
    "smoke",
    "main_job",
    "tests",
    "linears",
    "attention",
    "end_to_end",
    "peer",
    "quantization",
    "sanitizer",
)
LABELS = ("family", "case", "test", "model", "recipe", "stage", "kind", "weights", "kv", "shape", "m")
NOT_YET = "not yet run on a GPU"
NOTHING = (
    "No figure here comes from a GPU, because no run on a GPU has been recorded yet. The kernels for CUDA devices are\n"
    "compiled ahead of time and compared with their references in Triton's interpreter. `evals/gpu/run.sh` measures\n"
    "the figures and generates this section ([evals/gpu/README.md](../evals/gpu/README.md))."
)
PREDICTIONS = Path(__file__).with_name("predictions.json")
# The figure of a row that a prediction is about, most telling first.
FIGURES = {"graph_ms": "ms", "us": "µs", "step_ms": "ms", "layer_seconds": "s per layer", "seconds": "s"}


@dataclass(frozen=True)
class Run:
    """The files of one folder by part.

    Args:
        parts: by name of the file.
        ended: what became of the parts of run.sh that are not done.
    """

    parts: dict[str, dict[str, Any]]
    ended: dict[str, str] = field(default_factory=dict)

    def rows(self, name: str) -> list[Row]:
        """Measured rows of a part."""
        rows = self.parts.get(name, {}).get("rows", [])
        return [row for row in rows if "error" not in row and "absent" not in row]

    def meta(self, part: str) -> dict[str, Any]:
        """Machine, versions and commit of a part."""
        return dict(self.parts.get(part, {}).get("meta", {}))

    @property
    def has_device(self) -> bool:
        """Whether some part says what it was measured on."""
        return any(part.get("meta", {}).get("device") for part in self.parts.values())

    @property
    def is_rehearsal(self) -> bool:
        """Whether these are no figures of a GPU."""
        return any(part.get("meta", {}).get("rehearsal") for part in self.parts.values())


def read_run(folder: Path) -> Run:
    """What a folder holds."""
    state = folder / "state"
    lines = state.read_text().splitlines() if state.exists() else []
    last = dict(line.split(maxsplit=1) for line in lines)
    parts = {name: json.loads(path.read_text()) for name in PARTS if (path := folder / f"{name}.json").exists()}
    return Run(parts, {name: said for name, said in last.items() if said != "done"})


def _table(title: str, rows: list[Row], columns: dict[str, str]) -> Iterator[str]:
    """One line per row; nothing without rows."""
    if not rows:
        return
    shown = {key: name for key, name in columns.items() if any(row.get(key) is not None for row in rows)}
    yield ""
    yield f"**{title}**"
    yield ""
    yield "| " + " | ".join(shown.values()) + " |"
    yield "|" + "---|" * len(shown)
    for row in rows:
        yield "| " + " | ".join(_cell(key, row.get(key)) for key in shown) + " |"


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.startswith("share"):
        return f"{value:.0%}".replace("%", " %")
    if key.startswith("speedup"):
        return f"{value:.2f}×"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def bench_lines(run: Run) -> Iterator[str]:
    """A table per bench."""
    job = {"model": "model", "recipe": "recipe", "stage": "stage", "seconds": "s", "predicted_seconds": "predicted"}
    job |= {"prompts": "texts", "same": "same", "ties": "ties", "mean_kl": "KL", "top1_agreement": "same token"}
    yield from _table("The main job", run.rows("main_job"), job)
    times = {"us": "µs", "p10": "p10", "p90": "p90", "predicted_us": "predicted"}
    shares = {"share_of_copy": "share of copy rate", "share_of_gemm": "share of GEMM rate"}
    linears = {"shape": "shape", "m": "M", "kind": "", **times, "speedup": "speedup over bf16", **shares}
    yield from _table("Linears", run.rows("linears"), linears)
    attention = {"batch": "batch", "context": "context", "kind": "", **times}
    attention |= {"speedup_to_own_bf16": "speedup over own bf16", "share_of_copy": "share of copy rate"}
    yield from _table("Paged decode attention", run.rows("attention"), attention)
    model = {"weights": "weights", "kv": "KV", "batch": "batch", "context": "context"}
    steps = {"eager_ms": "eager ms", "predicted_eager_ms": "predicted", "graph_ms": "graph ms"}
    steps |= {"predicted_graph_ms": "predicted", "tokens_per_s": "tokens/s", "share_of_copy": "share of copy rate"}
    steps |= {"predicted_launches_per_layer": "predicted launches per layer"}
    yield from _table("Decode steps, 8B shape", run.rows("end_to_end"), {**model, **steps})
    yield from _table(
        "transformers",
        run.rows("peer"),
        {"kind": "", **model, "step_ms": "ms", "predicted_step_ms": "predicted", "tokens_per_s": "tokens/s"},
    )
    gptq = {"kind": "", "samples": "samples", "sequence_length": "tokens", "layer_seconds": "s per layer"}
    gptq |= {"predicted_layer_seconds": "predicted"}
    yield from _table("Quantization", run.rows("quantization"), {**gptq, "model_minutes": "min, 32 layers"})
    columns = {"kind": "", "errors": "errors", "tests_passed": "tests"}
    yield from _table("compute-sanitizer", run.rows("sanitizer"), columns)


def _left_out(run: Run) -> Iterator[str]:
    """What was not there, and what failed."""
    for name, part in run.parts.items():
        for row in part.get("rows", []):
            said = row.get("absent") or row.get("error")
            if said:
                labels = ", ".join(str(row[key]) for key in LABELS if row.get(key))
                yield f"- {name}: {labels}: {said}"
    for part, said in run.ended.items():
        yield f"- {part}: {said}"


def run_lines(name: str, run: Run) -> Iterator[str]:
    """All of one folder."""
    meta = next((run.meta(part) for part in PARTS if run.meta(part)), {})
    yield f"### {'Rehearsal on a CPU, no figures of a GPU' if run.is_rehearsal else meta.get('device', name)}"
    yield ""
    rate = run.meta("linears").get("gemm_rate")
    ceilings = f"copy {meta.get('copy_bandwidth', 0) / 1e12:.2f} TB/s"
    ceilings += f", large bf16 product {rate / 1e12:.0f} TFLOP/s" if rate else ""
    versions = ", ".join(f"{name} {meta.get(name)}" for name in ("torch", "triton", "cuda", "python"))
    yield f"{versions}; {ceilings}, measured in the same run by `evals/gpu/run.sh`. Figures: `evals/results/{name}/`."
    yield ""
    for part, what in (("smoke", "kernels, each run once:"), ("tests", "tests:")):
        if rows := run.parts.get(part, {}).get("rows"):
            wrong = sum("error" in row for row in rows)
            yield f"{len(rows)} {what} {wrong} failed."
            yield ""
    yield from bench_lines(run)
    missing = list(_left_out(run))
    if missing:
        yield ""
        yield "These rows are missing or failed:"
        yield ""
        yield from missing


def predicted() -> Iterator[str]:
    """What a first run should show, and what that assumes."""
    said = json.loads(PREDICTIONS.read_text(encoding="utf-8"))
    yield f"Rooflines predict these figures for an {said['device']} ([data](../evals/gpu/predictions.json)). We assume:"
    yield ""
    yield from (f"- {line}" for line in said["assumptions"])
    rows = []
    for row in said["rows"]:
        key = next(key for key in FIGURES if key in row["figures"])
        shown = {name: value for name, value in row["labels"].items() if name not in ("n", "k")}
        what = (f"{name} {value}" if name in ("batch", "context", "m") else str(value) for name, value in shown.items())
        rows.append(
            {
                "file": row["file"],
                "what": ", ".join(what),
                "predicted": f"{row['figures'][key]:g} {FIGURES[key]}",
                "measured": NOT_YET,
            }
        )
    yield from _table(
        "Predictions before the first run",
        rows,
        {"file": "part", "what": "case", "predicted": "predicted", "measured": "measured"},
    )


def standing(folders: Sequence[Path] | None = None) -> str:
    """Return one sentence for pages that name the kernels: whether they have run on a GPU.

    Args:
        folders: of figures; None = all of evals/results that are of a GPU.
    """
    folders = gpu_folders() if folders is None else folders
    named = {run.meta(part).get("device") for run in map(read_run, folders) for part in run.parts}
    devices = sorted(filter(None, named))
    if not devices:
        return f"These kernels have {NOT_YET}. [Performance](performance.md#on-a-gpu) will show the first figures."
    return f"These kernels have run on {' and '.join(devices)}: [performance](performance.md#on-a-gpu)."


def section(folders: Sequence[Path] | None = None) -> str:
    """The section of these folders, see `standing`."""
    folders = gpu_folders() if folders is None else folders
    lines: list[str] = []
    for folder in folders:
        lines += [*([""] if lines else []), *run_lines(folder.name, read_run(folder))]
    return "\n".join(lines or [NOTHING, "", *predicted()])


def gpu_folders(results: Path = RESULTS) -> list[Path]:
    """Folders with figures of a GPU."""
    folders = sorted({path.parent for part in PARTS for path in results.glob(f"*/{part}.json")})
    return [folder for folder in folders if (run := read_run(folder)).has_device and not run.is_rehearsal]


def replaced(page: str, text: str) -> str:
    """The page with its section replaced; the section alone where the page has none."""
    if BEGIN not in page:
        return f"{BEGIN}\n{text}\n{END}\n"
    before, rest = page.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}"


def main() -> None:
    """Print or write the section."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, help="one folder; default: all of evals/results that are of a GPU")
    parser.add_argument("--write", type=Path, help="the page")
    arguments = parser.parse_args()
    text = section([arguments.results] if arguments.results else None)
    if arguments.write is None:
        print(text)
        return
    page = arguments.write.read_text(encoding="utf-8") if arguments.write.exists() else ""
    arguments.write.write_text(replaced(page, text), encoding="utf-8")


if __name__ == "__main__":
    main()
