"""Serves our checkpoints with vLLM's CPU build and compares what it computes with transformers.

    python evals/checks/vllm_cpu.py WORK [--python PYTHON] [--models demo,qwen3] [--recipes gptq-int4] [--breaches]

WORK: folder to work in; what is there is not made again: checkpoints by the digest of recipe and code, what vLLM said
by that of the checkpoint's files. PYTHON: of an environment with vLLM; without it one is made in WORK from
vllm_cpu.lock. Every recipe of every model and its exports become rows in evals/results/vllm; --breaches plants faults
in checkpoints of the demo model instead, each of which must be noticed. Exit code 1 if a row is wrong.

Both sides compute in bfloat16, on 10 texts of 60 tokens that the model wrote itself. Of weights alone: the mean
difference of log-probabilities of the texts' tokens is at most twice that of the unquantized model (`NOISE`). With
rounded activations or cache: mean log-likelihoods are within `NLL`. Where greedy texts part, transformers prefers its
token by no more than two engines can differ in that: the writer holds its own token for no less likely than the
other, so transformers' preference is at most twice the largest difference of a log-probability, which is taken from
the texts (of weights alone: of the unquantized model; with rounded activations or cache, of the checkpoint itself),
and is never asked to be less than `GAP`; with experts, which noise may choose, the unquantized model's own gap counts
too. What the CPU build has no kernel for must be refused, as `quantkit.engine_rules` says beforehand, with the error
that stands there. Scales of an FP8 cache are used if other scales give another text.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm_cpu_models as models
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import provenance

HERE = Path(__file__).resolve().parent
LOCK, SERVE = HERE / "vllm_cpu.lock", HERE / "engine_serve.py"
RESULTS = HERE.parent / "results" / "vllm"
Row = dict[str, Any]
TEXTS, LENGTH, PROMPT = 10, 60, 20
NOISE, NLL, GAP = 2.0, 0.02, 0.2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One checkpoint that is served.

    Args:
        model: of `models.MODELS`.
        name: of the recipe, `NAME as FORMAT` of an export, "" of the model itself.
        checkpoint: its folder.
        intact: what the reference is computed of; another one where `checkpoint` is broken on purpose.
        code: digest of the recipe and of the code behind it.
    """

    model: str
    name: str
    checkpoint: Path
    intact: Path
    code: str = ""

    @property
    def key(self) -> str:
        """Name of its files."""
        return re.sub(r"\W+", "-", f"{self.model} {self.name or 'source'}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--python", type=Path)
    parser.add_argument("--models", default=",".join(models.MODELS))
    parser.add_argument("--recipes", default="")
    parser.add_argument("--breaches", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    python = options.python or make_environment(work / "environment")
    if options.breaches:
        rows = _breaches(work, python)
    else:
        recipes = [name for name in options.recipes.split(",") if name]
        rows = [row for name in options.models.split(",") for row in _model_rows(name, work, python, recipes)]
    for row in rows:
        print(json.dumps(row))
    write(rows, python, "breaches" if options.breaches else "rows")
    sys.exit(any(row["verdict"] == "wrong" for row in rows))


def make_environment(folder: Path) -> Path:
    """An interpreter with the packages of the lock file, and no others."""
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True)
        # Without their requirements: the list is complete, and resolving it anew takes long.
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "-r", LOCK], check=True)
        (folder / "complete").touch()
    return python


def _model_rows(name: str, work: Path, python: Path, recipes: list[str]) -> list[Row]:
    from quantkit import api

    folder = work / name
    folder.mkdir(exist_ok=True)
    source = models.write_source(name, folder / "source")
    cases, rows = [Case(model=name, name="", checkpoint=source, intact=source)], []
    for recipe in recipes or api.list_recipes():
        code = provenance.digest(api.load_recipe(recipe).source)
        target = folder / f"{recipe}-{code}"
        for case, checkpoint, why in models.checkpoints(source, recipe, target):
            if why:
                reason = why.replace(f"{work}/", "")
                rows.append({"model": name, "case": case, "verdict": "refused by us", "reason": reason, "code": code})
            else:
                cases.append(Case(model=name, name=case, checkpoint=checkpoint, intact=target, code=code))
    answers = serve(cases, source, work, python)
    base = References(source, folder)
    served = [judge(case, answer, base) for case, answer in zip(cases, answers, strict=True)]
    return sorted([*served, *rows], key=lambda row: row["case"]) + _probe(name, cases, answers, work, python)


def serve(cases: list[Case], source: Path, work: Path, python: Path) -> list[Row]:
    """What vLLM says of each."""
    texts = write_texts(source, work / f"{cases[0].model}.json")
    files = {work / f"{case.key}-{models.digest(case.checkpoint, texts)}.json": case.checkpoint for case in cases}
    return ask("vllm", python, source, texts, files)


def ask(engine: str, python: Path, source: Path, texts: Path, files: dict[Path, Path]) -> list[Row]:
    """What an engine in another environment says of checkpoints, by the file of its answer; those there are kept."""
    shared = {"source": str(source), "texts": str(texts)}
    asked = [
        {"checkpoint": str(checkpoint), "output": str(file), **shared}
        for file, checkpoint in files.items()
        if not file.exists()
    ]
    if asked:
        listed = texts.with_suffix(f".{engine}-cases.json")
        listed.write_text(json.dumps(asked))
        subprocess.run([python, SERVE, engine, listed], check=True)
    return [json.loads(file.read_text()) for file in files]


@torch.no_grad()
def write_texts(source: Path, file: Path) -> Path:
    """Texts that the model writes, drawn by its own probabilities."""
    if not file.exists():
        model = load(source)
        torch.manual_seed(0)
        first = torch.full((TEXTS, 1), model.config.bos_token_id or 0)
        settings = {"max_new_tokens": LENGTH - 1, "min_new_tokens": LENGTH - 1, "do_sample": True, "top_k": 0}
        texts = model.generate(first, attention_mask=torch.ones_like(first), **settings)
        file.write_text(json.dumps(texts.tolist()))
    return file


def load(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """An ordinary model in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


class References:
    """What transformers computes of a model's checkpoints.

    Args:
        source: the model.
        folder: where values of checkpoints are written that transformers does not read.
    """

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.folder = source, folder
        self.noise = self.largest = 0.0  # known when the model itself has been compared

    def logprobs(self, case: Case, texts: list[list[int]]) -> tuple[Tensor, str]:
        """(B, T, V) log-probabilities of the next token, and by what they were computed."""
        if case.intact == self.source or case.name == "kv-fp8":
            return logprobs(load(self.source), texts), "transformers"
        dense = self.folder / f"{case.intact.name}-as-dense"
        if not models.convert_to(case.intact, "dense", dense):
            return logprobs(load(dense), texts), "transformers, dense values"
        try:
            return logprobs(load(case.intact), texts), "transformers with compressed-tensors"
        except Exception:  # of experts that it does not read
            from quantkit import LLM

            llm = LLM(case.intact, dtype="bfloat16", max_length=128)
            return torch.stack([rows.log_softmax(-1) for rows in llm.score(texts)]), "quantkit"


@torch.no_grad()
def logprobs(model: Any, texts: list[list[int]]) -> Tensor:
    """(B, T, V) log-probabilities of the next token."""
    ids = torch.tensor(texts)
    result: Tensor = model(ids, attention_mask=torch.ones_like(ids)).logits.float().log_softmax(-1)
    del model
    gc.collect()
    return result


def judge(case: Case, answer: Row, base: References) -> Row:
    """The row of one checkpoint; its model itself must have been judged before."""
    row: Row = {"model": case.model, "case": case.name or "unquantized", "code": case.code}
    faults = models.file_faults(case.checkpoint)
    if faults:
        return {**row, "verdict": "wrong", "reason": "; ".join(faults[:3])}
    said = models.foretold(None if case.model == "demo" else base.source / "config.json", case.name)
    if "error" in answer:
        known = said.reads == "no" and bool(said.error) and said.error in answer["error"]
        verdict = "refused by vLLM" if known else "wrong"
        return {**row, "verdict": verdict, "reason": answer["error"], "ours": f"{said.reads}: {said.reason}"}
    texts = json.loads((base.folder.parent / f"{case.model}.json").read_text())
    expected, by = base.logprobs(case, texts)
    chosen = expected[:, :-1].gather(-1, torch.tensor(texts)[:, 1:, None])[..., 0]
    served = torch.tensor(answer["logprobs"])
    differences = (chosen - served).abs()
    difference, largest = float(differences.mean()), float(differences.max())
    nll = float(chosen.mean() - served.mean())
    greedy = [text[:PROMPT] + written for text, written in zip(texts, answer["greedy"], strict=True)]
    gap = worst_gap(base.logprobs(case, greedy)[0], greedy)
    if not case.name:
        # Where a router holds two experts for nearly alike, noise chooses: the gap itself says how far that goes.
        has_experts = "num_experts_per_tok" in models.MODELS[case.model]
        base.noise, base.largest = difference, max(largest, gap / 2 if has_experts else 0)
    rounds = "dense" not in by and bool(case.name)
    row |= {
        "reference": by,
        "difference": round(difference, 4),
        "noise": round(base.noise, 4),
        "largest": round(largest, 3),
        "nll": round(-float(served.mean()), 4),
        "nll difference": round(nll, 4),
        "gap": round(gap, 3),
        "cache": answer["cache"],
    }
    wrong = [] if said.is_right else [f"the rules say {said.reads}: {said.reason}"]
    if not rounds and difference > NOISE * base.noise:
        wrong.append(f"log-probabilities differ by {difference:.4f}, of the model itself by {base.noise:.4f}")
    if rounds and abs(nll) > NLL:
        wrong.append(f"mean log-likelihoods differ by {nll:.4f}")
    allowed = max(GAP, 2 * (max(largest, base.largest) if rounds else base.largest))
    if gap > allowed:
        wrong.append(f"a greedy text parts where transformers prefers the other token by {gap:.2f}, over {allowed:.2f}")
    return {**row, "verdict": "wrong" if wrong else "agrees", **({"reason": "; ".join(wrong)} if wrong else {})}


def worst_gap(logprobs: Tensor, texts: list[list[int]]) -> float:
    """Where a text first leaves what the reference would write: how much more likely that was; the largest of all."""
    worst = 0.0
    for rows, text in zip(logprobs, texts, strict=True):
        for position in range(PROMPT, len(text)):
            row = rows[position - 1]
            if int(row.argmax()) != text[position]:
                worst = max(worst, float(row.max() - row[text[position]]))
                break
    return worst


def _probe(name: str, cases: list[Case], answers: list[Row], work: Path, python: Path) -> list[Row]:
    """Whether the scales of an FP8 cache count: 50 times smaller they must change the text."""
    known = next((pair for pair in zip(cases, answers, strict=True) if pair[0].name == "kv-fp8"), None)
    if known is None or "error" in known[1]:
        return []
    case, answer = known
    broken = models.break_copy(case.checkpoint, work / name / "kv-fp8-probe", models.shrink_kv_scales)
    again = serve(
        [Case(model=name, name="kv-fp8", checkpoint=broken, intact=case.intact)], work / name / "source", work, python
    )[0]
    row = {"model": name, "case": "kv-fp8, scales x 0.02", "cache": answer["cache"]}
    if again.get("greedy", answer["greedy"]) != answer["greedy"]:
        return [{**row, "verdict": "agrees"}]
    return [{**row, "verdict": "wrong", "reason": again.get("error", "the same text: the scales are not used")}]


def _breaches(work: Path, python: Path) -> list[Row]:
    """Each planted fault, and whether the rows show it."""
    from quantkit import api

    folder = work / "demo"
    folder.mkdir(exist_ok=True)
    source = models.write_source("demo", folder / "source")
    cases = [Case(model="demo", name="", checkpoint=source, intact=source)]
    for number, (name, change) in enumerate(models.BREACHES.values()):
        recipe = name.partition(" as ")[0]
        code = provenance.digest(api.load_recipe(recipe).source)
        intact = folder / f"{recipe}-{code}"
        checkpoint = {case: path for case, path, _ in models.checkpoints(source, recipe, intact)}[name]
        broken = models.break_copy(checkpoint, folder / f"broken-{number}", change)
        cases.append(Case(model="demo", name=name, checkpoint=broken, intact=intact, code=code))
    base = References(source, folder)
    judged = [judge(case, answer, base) for case, answer in zip(cases, serve(cases, source, work, python), strict=True)]
    rows = [{**row, "breach": breach} for row, breach in zip(judged[1:], models.BREACHES, strict=True)]
    # A fault counts as noticed if its own checkpoint is judged wrong; the verdict of the row is whether it was.
    return [{**row, "verdict": "noticed" if row["verdict"] == "wrong" else "wrong"} for row in rows]


def write(rows: list[Row], python: Path, name: str) -> None:
    """Rows beside those of other models that are there, with the versions that made them."""
    said = "from importlib.metadata import version; print(version('vllm-cpu'), version('torch'))"
    vllm, torch_version = subprocess.check_output([python, "-c", said], text=True).split()
    import compressed_tensors
    import transformers

    commit = provenance.commit()
    made = {
        "commit": commit,
        "vllm": f"{vllm} (vllm-cpu)",
        "torch": torch_version,
        "reference": f"transformers {transformers.__version__}, compressed-tensors {compressed_tensors.__version__}",
    }
    file = RESULTS / f"{vllm}-cpu-{name}.json"
    old = json.loads(file.read_text())["rows"] if file.exists() else []
    new = {
        (row["model"], row.get("breach", row["case"])): row
        for row in [*old, *({**row, "commit": commit} for row in rows)]
    }
    write_rows(file, made, [new[key] for key in sorted(new)])


def write_rows(file: Path, made: dict[str, str], rows: list[Row]) -> None:
    """What an engine did, a row in a line, and what it was made with."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(map(json.dumps, rows))
    file.write_text(f'{{"made": {json.dumps(made)},\n"rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
