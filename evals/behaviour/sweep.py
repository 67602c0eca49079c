"""How a chat model acts as its weights lose bits: margins, flips, rates, KL and task accuracy of one sweep.

    python evals/behaviour/sweep.py MODEL -o evals/results/behaviour/NAME.json [--about WORDS] [--rows gptq-4,rtn-2]
        [--data FOLDER ...] [--prompts 96] [--items 100] [--samples 32]

Each row is a shipped recipe (rtn-int4, gptq-int4, awq-int4) with other bits and groups of at most 64. The original
answers once; each checkpoint is compared with it as `quantkit verify` does. FOLDER has the tasks' items and
`wikitext2/test.raw.txt`. Rows that FILE has are kept. One row of a model of 135 million parameters takes minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from evals import provenance
from quantkit.evaluate.behaviour import Trace
from quantkit.evaluate.decision_margins import compare_behaviour
from quantkit.evaluate.fidelity import fidelity, fixed_windows
from quantkit.evaluate.loading import load_llm
from quantkit.evaluate.options import EvaluationOptions
from quantkit.evaluate.run import answer_prompts, behaviour_plan, evaluate
from quantkit.evaluate.tasks import read_named_text
from quantkit.results import EvaluationResult
from quantkit.results.statistics.comparison import compare_evaluations
from quantkit.runtime.llm import LLM

ROWS = tuple(f"{method}-{bits}" for bits in (8, 4, 3, 2) for method in ("rtn", "gptq", "awq"))
TEXT, TEXT_TOKENS, WINDOW = "wikitext2/test.raw.txt", 4096, 512
TASKS = ("arc_easy", "piqa", "winogrande")


def recipe_of(row: str, samples: int) -> dict[str, Any]:
    """The shipped recipe of a row's method, with the row's bits."""
    method, bits = row.split("-")
    file = provenance.ROOT / "recipes" / f"{method}-int4.yaml"
    recipe: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    recipe["weights"] |= {"dtype": f"int{bits}", "group_size": 64}
    if "calibration" in recipe:
        recipe["calibration"]["samples"] = samples
    return recipe


def suite(args: argparse.Namespace) -> dict[str, Any]:
    """The suite that every model of the sweep is asked."""
    text = {"text": TEXT, "window": WINDOW, "max_windows": TEXT_TOKENS // WINDOW}
    behaviour = {"prompts": args.prompts, "seeds": 1, "max_tokens": 128}
    asked = {"tasks": list(TASKS), "limit": args.items, "perplexity": [text], "behaviour": behaviour}
    return {"description": "A sweep over bits.", "demo": asked, "others": asked}


class Original:
    """The original: its answers, and what each checkpoint is compared with."""

    def __init__(self, model: Path, options: EvaluationOptions) -> None:
        self.llm, self.options = load_llm(str(model)), options
        self.plan = behaviour_plan(self.llm, options)
        assert self.plan is not None, f"{model} has no chat template"
        self.traces, self.result = self._answers(self.llm)
        text = read_named_text(TEXT, options.data)
        self.windows = fixed_windows(self.llm, text, window=WINDOW, max_tokens=TEXT_TOKENS)

    def _answers(self, llm: LLM) -> tuple[list[Trace], EvaluationResult]:
        assert self.plan is not None
        traces = answer_prompts(llm, self.plan, _say)
        return traces, evaluate(llm, self.options, progress=_say, traces=traces)

    def compared(self, checkpoint: Path) -> dict[str, Any]:
        """Figures of a checkpoint beside the original's."""
        assert self.plan is not None
        llm = load_llm(str(checkpoint))
        distance = fidelity(llm, self.llm, self.windows, greedy_tokens=0, say=_say)
        traces, result = self._answers(llm)
        acts = compare_behaviour(llm, self.llm, self.plan, (self.traces, traces), _say)
        compared = compare_evaluations(result, self.result, None)
        return {
            "kl": distance.mean_kl,
            "kl_of_answers": acts.mean_kl,
            "kl_by_position": acts.quarter_kl,
            "perplexity_ratio": result.perplexity[0].perplexity / self.result.perplexity[0].perplexity,
            "margins": [asdict(record) for record in acts.margins],
            "flips": acts.flips,
            **rates(result),
            "compared": [asdict(each) for each in compared],
        }


def rates(result: EvaluationResult) -> dict[str, Any]:
    """Task means, rates and the mean length of answers of one model."""
    lengths = [each.answer_tokens for rate in result.behaviour for each in rate.samples if rate.task == "unended"]
    return {
        "tasks": {task.task: task.value for task in result.tasks},
        "rates": {rate.task: rate.value for rate in result.behaviour},
        "tokens": sum(filter(None, lengths)) / len(lengths),
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def main() -> None:
    """Measure what FILE lacks; it is written after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("-o", type=Path, required=True)
    parser.add_argument("--about", default="")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--data", type=Path, action="append", default=[])
    for name, count in (("--prompts", 96), ("--items", 100), ("--samples", 32)):
        parser.add_argument(name, type=int, default=count)
    args = parser.parse_args()
    counts = {name: getattr(args, name) for name in ("prompts", "items", "samples")}
    known = json.loads(args.o.read_text(encoding="utf-8")) if args.o.is_file() else {"rows": []}
    asked = {"model": args.model.name, "counts": counts, "about": args.about or known.get("about", "")}
    if known["rows"] and {name: known[name] for name in asked} != asked:
        raise SystemExit(f"{args.o} was measured otherwise than with {asked}; give another file")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "suite.yaml").write_text(json.dumps(suite(args)), encoding="utf-8")
        original = Original(args.model, EvaluationOptions(suite=str(work / "suite.yaml"), data=tuple(args.data)))
        known |= {**asked, "original": rates(original.result)}
        for row in [row for row in args.rows.split(",") if row not in {each["row"] for each in known["rows"]}]:
            recipe, out = recipe_of(row, args.samples), work / row
            stamp = provenance.plain(provenance.stamp(recipe))
            (work / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
            command = [sys.executable, "-m", "quantkit", "quantize", args.model, "--recipe", work / "recipe.yaml"]
            subprocess.run([*map(str, command), "-o", str(out)], check=True, stdout=subprocess.DEVNULL)
            known["rows"].append({"row": row, **original.compared(out), "stamp": stamp})
            provenance.write_json(args.o, known)


if __name__ == "__main__":
    main()
