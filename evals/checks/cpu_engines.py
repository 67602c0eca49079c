"""Which of our checkpoints other engines load on a CPU, and whether they compute what is stored.

    python evals/checks/cpu_engines.py WORK --engine openvino|onnxruntime|gptqmodel|llama.cpp --python PYTHON

PYTHON: of an environment with `optimum-intel` and `openvino-genai`, with `onnxruntime-genai`, with `gptqmodel` or with
`llama-cpp-python`. Checkpoints of the demo model are loaded the way each engine's documentation says
(`engine_serve.py`), in float32 (GPTQModel: float16), and continue 10 beginnings greedily; rows are kept in
evals/results/cpu_engines. *agrees*: texts part only where transformers, of the
values that are stored and in float32, prefers its token by at most `GAP`, and log-probabilities, where the engine
tells them, differ by at most `NEAR` on average. *other numbers*: they do not. *refused*: with what the engine said.
Both must be what `quantkit.engine_rules` says beforehand, which stands beside them; otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import provenance
import vllm_cpu
import vllm_cpu_models as models

from quantkit.results import EngineReading

RESULTS = Path(__file__).resolve().parents[1] / "results" / "cpu_engines"
CASES = (
    *("", " as gguf", "gptq-int4", "gptq-int4 as gptq", "gptq-int4 as gptq-v2", "gptq-int4 as dense"),
    *("awq-int4 as awq", "rtn-int4 as gguf", "w8a8-int8", "fp8-dynamic", "nvfp4", "mxfp4"),
)
# Engines that read only some formats, as other cases would not be asked of them.
FORMATS = {
    "gptqmodel": ("gptq-int4 as gptq", "gptq-int4 as gptq-v2", "awq-int4 as awq"),
    "llama.cpp": (" as gguf", "rtn-int4 as gguf"),
}
# Whose rules foretell what an engine does, if they are not called like it.
RULES = {"gptqmodel": "transformers"}
PACKAGES = {
    "openvino": ("openvino", "optimum-intel"),
    "onnxruntime": ("onnxruntime-genai",),
    "gptqmodel": ("gptqmodel",),
    "llama.cpp": ("llama-cpp-python",),
}
GAP, NEAR = 0.2, 0.02


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--engine", required=True, choices=PACKAGES)
    parser.add_argument("--python", required=True, type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.work.resolve() / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    source = models.write_source("demo", folder / "source")
    texts = vllm_cpu.write_texts(source, folder.with_name("demo.json"))
    rows, rules = [], RULES.get(options.engine, options.engine)
    for case in FORMATS.get(options.engine, CASES):
        checkpoint, dense = _checkpoint(case, source, folder)
        file = folder / f"{options.engine}-{checkpoint.name}.answer.json"
        (answer,) = vllm_cpu.ask(options.engine, options.python, source, texts, {file: checkpoint})
        name = case if case.partition(" as ")[0] else f"unquantized{case}"
        said = models.foretold(None, case, rules)
        row = {"case": name, **judge(answer, dense, json.loads(texts.read_text()))}
        rows.append({**row, "ours": f"{said.reads}: {said.reason}", "foretold": is_foretold(row, said)})
        print(json.dumps(rows[-1]), flush=True)
        made = {"commit": provenance.commit(), "engine": _version(options), "rules": rules}
        vllm_cpu.write_rows(RESULTS / f"{options.engine}.json", made, rows)
    sys.exit(not all(row["foretold"] for row in rows))


def _checkpoint(case: str, source: Path, folder: Path) -> tuple[Path, Path]:
    """What is loaded, and its values as an ordinary model."""
    from quantkit import api

    recipe, _, export = case.partition(" as ")
    if not recipe:
        return (_gguf_file(source, folder / "source", "f16") if export else source), source
    target = folder / f"{recipe}-{provenance.digest(api.load_recipe(recipe).source)}"
    dense = target.with_name(f"{target.name}-as-dense")
    why = models.make_checkpoint(source, recipe, target)
    assert not why, why
    if models.convert_to(target, "dense", dense):
        dense = target  # transformers decodes it with compressed-tensors
    if export == "gguf":
        return _gguf_file(target, target), dense
    exported = target.with_name(f"{target.name}-as-{export}") if export else target
    if export:
        models.convert_to(target, export, exported)
    return exported, dense


def _gguf_file(checkpoint: Path, name: Path, type_name: str | None = None) -> Path:
    from quantkit.compress.convert import convert

    file = name.with_suffix(".gguf")
    if not file.exists():
        convert(checkpoint, "gguf", file, type_name=type_name)
    return file


def judge(answer: dict[str, Any], dense: Path, texts: list[list[int]]) -> dict[str, Any]:
    """Verdict and figures of a row."""
    if "error" in answer:
        return {"verdict": "refused", "reason": answer["error"]}
    greedy = [text[: vllm_cpu.PROMPT] + written for text, written in zip(texts, answer["greedy"], strict=True)]
    reference = vllm_cpu.load(dense, torch.float32)
    row: dict[str, Any] = {"gap": round(vllm_cpu.worst_gap(vllm_cpu.logprobs(reference, greedy), greedy), 4)}
    if "logprobs" in answer:
        known = vllm_cpu.logprobs(reference, texts)[:, :-1].gather(-1, torch.tensor(texts)[:, 1:, None])[..., 0]
        row["difference"] = round(float((known - torch.tensor(answer["logprobs"])).abs().mean()), 4)
    is_right = row["gap"] <= GAP and row.get("difference", 0) <= NEAR
    return {"verdict": "agrees" if is_right else "other numbers", **row}


def is_foretold(row: dict[str, Any], said: EngineReading) -> bool:
    """Whether the rules say beforehand what was seen, of a refusal with the engine's own words."""
    if row["verdict"] == "refused":
        return said.reads == "no" and bool(said.error) and said.error in row["reason"]
    return said.is_right if row["verdict"] == "agrees" else said.reads == "wrong"


def _version(options: argparse.Namespace) -> str:
    names = PACKAGES[options.engine]
    said = f"from importlib.metadata import version; print(*(f'{{n}} {{version(n)}}' for n in {names}), sep=', ')"
    return subprocess.check_output([options.python, "-c", said], text=True).strip()


if __name__ == "__main__":
    main()
