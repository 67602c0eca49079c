"""Whether quantkit still writes the bytes, the greedy text and the numbers that it wrote before a change.

    python evals/checks/same_bytes.py --write before.json [--only demo,dense] [--model NAME=DIR]
    python evals/checks/same_bytes.py --check before.json [--only demo,dense] [--model NAME=DIR] [--without autoround]

Runs the command line of the quantkit that this Python has installed: every shipped recipe on the bundled demo model, on
four tiny random models (dense, moe, mla, gpt2) and on each DIR given; GGUF of the models themselves; one 4-bit
checkpoint of demo and of dense in every other format; greedy text, more of it and an evaluation for demo. Kept are the
SHA-256 of each file of weights, the text, and the numbers that are not times; of a refusal the exit code, and its
message to read.

`--write` adds each case to the file as it ends and skips those it holds, so that a killed run goes on. `--check` prints
each difference and ends with exit code 1 if there is one. Everything runs on one CPU thread, since sums depend on the
number of threads; they also depend on the processor and on torch, and the file says which it was written with.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from processes import run_forked

Record = dict[str, Any]

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", **ONE_THREAD}

# Fields of recipes; few samples and steps, since the bytes are compared and not how good they are.
CALIBRATION = ("calibration.samples=4", "calibration.sequence_length=128")
AUTOROUND = ("steps.autoround.iterations=40",)
CONVERTED = {"demo": "awq-int4", "dense": "gptq-int4"}  # with zero points, without
FORMATS = ("gptq", "gptq-v2", "awq", "gguf", "dense")
K_QUANTS = ("q4_k", "q6_k")  # of demo alone: the others are narrower than their blocks of 256
# Whose text is compared beside the original's: of demo for each prompt, of others for the first.
SPOKEN = {"demo": ("awq-int4", "awq-int4-kv4", "w8a8-int8", "fp8-dynamic"), "gpt2": ("gptq-int4 as dense",)}
PROMPTS = ("Once upon a time", "The people of Belstad", "Sums:42+37=")

SIZES = {
    "vocab_size": 260,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,  # 0.02 leaves the attention of so narrow a model uniform
    "bos_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128, "num_key_value_heads": 4}
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
# Name → family of transformers, number type, what its config has beside the sizes.
TINY: dict[str, tuple[str, str, Record]] = {
    "dense": ("qwen3", "bfloat16", {"head_dim": 64}),
    "moe": ("qwen2_moe", "bfloat16", {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 256}),
    "mla": ("deepseek_v3", "bfloat16", {**EXPERTS, **LATENT, **ROUTED}),
    "gpt2": ("gpt2", "float32", {}),
}


@dataclass(frozen=True)
class Case:
    """One command of quantkit and what is kept of it."""

    name: str  # model/what
    arguments: tuple[str, ...]
    output: Path | None = None  # directory or file whose weights are hashed; None = stdout is kept
    needs: Case | None = None  # its output is this one's input


def main() -> int:
    """Write or check, as asked."""
    options = parse_options()
    os.environ |= ENVIRONMENT
    repository = preload()
    with tempfile.TemporaryDirectory() as work:
        folders = prepare_models(options, repository, Path(work) / "models")
        models = {name: digests(folder) for name, folder in folders.items()}
        cases = list(list_cases(repository, folders, Path(work)))
        if options.write:
            return write(options.write, describe(repository), models, cases)
        return check(options.check, describe(repository), models, cases, options.without)


def parse_options() -> argparse.Namespace:
    """The command line; `model` is a list of pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE.json")
    action.add_argument("--check", type=Path, metavar="FILE.json")
    parser.add_argument("--only", type=lambda text: text.split(","), help="names of models; default: all")
    parser.add_argument("--without", metavar="PART", help="leave out cases whose names hold this; default: none")
    parser.add_argument("--model", type=named, action="append", metavar="NAME=DIR", default=[])
    return parser.parse_args()


def named(text: str) -> list[str]:
    """`NAME=DIR`, apart; argparse refuses any other text."""
    name, directory = text.split("=", 1)
    return [name, directory]


# ---- the models


def prepare_models(options: argparse.Namespace, repository: Path, tiny: Path) -> dict[str, Path]:
    """Directories of the chosen models; the tiny ones are written below `tiny`."""
    folders = {"demo": repository / "quantkit/demo/model"} | {name: tiny / name for name in TINY}
    folders |= {name: Path(directory).resolve() for name, directory in options.model}
    unknown = set(options.only or ()) - set(folders)
    if unknown:
        sys.exit(f"--only: no model {', '.join(sorted(unknown))}; there are {', '.join(folders)}")
    chosen = {name: folder for name, folder in folders.items() if name in (options.only or folders)}
    for name, folder in chosen.items():
        if folder == tiny / name:
            code, _, error = fork(write_tiny, folder, *TINY[name])
            if code:
                sys.exit(f"{name}: not written\n{error}")
    return chosen


def write_tiny(folder: Path, family: str, dtype: str, settings: Record) -> None:
    """A seeded random model with a tokenizer of bytes; norms and biases differ by channel, so that folding shows."""
    import torch
    from make_random_llama import write_tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **settings}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    write_tokenizer(folder)


def digests(output: Path) -> dict[str, str]:
    """SHA-256 of a file, or of each file of weights in a directory."""
    files = [output] if output.is_file() else sorted(output.glob("*.safetensors"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# ---- the cases


def list_cases(repository: Path, models: dict[str, Path], work: Path) -> Iterator[Case]:
    """All cases of the chosen models."""
    recipes = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(repository.glob("recipes/*.yaml"))}
    for model, folder in models.items():
        original = Case(f"{model}/original", (), folder)
        # GPT-2 is stored transposed, which the recipes' own format has no word for.
        formats = (None, "gptq", "dense") if model == "gpt2" else (None,)
        cases = [quantization(model, folder, name, recipes[name], work, to) for to in formats for name in recipes]
        quantized = {case.name.partition("/")[2]: case for case in cases}
        yield from cases
        yield conversion(original, work, "gguf")
        if model in CONVERTED:
            yield from (conversion(quantized[CONVERTED[model]], work, to) for to in FORMATS)
        if model == "demo":
            yield from (conversion(original, work, "gguf", "--type", kind) for kind in K_QUANTS)
            yield evaluation(quantized["awq-int4"], folder)
        spoken = [quantized[name] for name in SPOKEN.get(model, ("gptq-int4",))]
        prompts = PROMPTS if model == "demo" else PROMPTS[:1]
        yield from (generation(source, prompt) for source in (original, *spoken) for prompt in prompts)


def quantization(model: str, folder: Path, name: str, recipe: Record, work: Path, to: str | None = None) -> Case:
    """`quantize`, made short, and possible where groups of 128 do not divide the model's widths."""
    fields: tuple[str, ...] = CALIBRATION if "calibration" in recipe else ()
    if any("autoround" in step for step in recipe.get("steps", ())):
        fields += AUTOROUND
    config = json.loads((folder / "config.json").read_text())
    widths = (config.get("hidden_size", 0), config.get("intermediate_size", 0))
    if recipe.get("weights", {}).get("group_size") == 128 and any(width % 128 for width in widths):
        fields += ("weights.group_size=32",)
    changes = [text for field in fields for text in ("--set", field)] + (["--format", to] if to else [])
    output = work / model / (f"{name}-{to}" if to else name)
    arguments = ("quantize", str(folder), "--recipe", name, *changes, "-o", str(output), "--device", "cpu")
    return Case(f"{model}/{name} as {to}" if to else f"{model}/{name}", arguments, output)


def conversion(source: Case, work: Path, to: str, *others: str) -> Case:
    """`convert` of a checkpoint or of an original."""
    name = f"{source.name} to {' '.join((to, *others[1:]))}"
    output = work / (name.replace(" ", "-") + (".gguf" if to == "gguf" else ""))
    return Case(name, ("convert", str(source.output), "--to", to, *others, "-o", str(output)), output, source)


def generation(source: Case, prompt: str) -> Case:
    """`generate`, greedily."""
    arguments = ("generate", str(source.output), "--prompt", prompt, "--max-tokens", "48", "--device", "cpu")
    return Case(f"{source.name} text of {prompt!r}", arguments, needs=source)


def evaluation(source: Case, original: Path) -> Case:
    """`eval` of a few items against the original."""
    arguments = ("eval", str(source.output), "--baseline", str(original), "--limit", "20", "--device", "cpu")
    return Case(f"{source.name} evaluation", arguments, needs=source)


# ---- running


def preload() -> Path:
    """Import what takes seconds and is not quantkit's, once for all cases; the repository of the installed quantkit."""
    import compressed_tensors  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401

    spec = importlib.util.find_spec("quantkit")
    if spec is None or spec.origin is None:
        sys.exit("quantkit is not installed for this Python; in the repository: pip install -e .")
    return Path(spec.origin).parents[1]


def run(case: Case) -> Record:
    """What is kept of a case; what it needs is run first unless its output is there."""
    if case.needs and case.needs.output and not case.needs.output.exists():
        run(case.needs)
    started = time.perf_counter()
    code, out, err = fork(command_line, *case.arguments, "--json", "--quiet")
    if code < 0:
        sys.exit(f"{case.name}: killed by signal {-code}; nothing is kept of it")
    record: Record = {"exit": code, "seconds": round(time.perf_counter() - started, 1)}
    if code:
        record["message"] = re.sub(r"/\S*/", "", err.partition("\n")[0])  # without folders of this machine
    elif case.output:
        record["files"] = digests(case.output)
    else:
        record |= said(json.loads(out))
    print(f"{record['seconds']:6.1f} s  exit {code}  {case.name}", file=sys.stderr)
    return record


def command_line(*arguments: str) -> None:
    """`python -m quantkit` with these arguments."""
    sys.argv = ["quantkit", *arguments]
    runpy.run_module("quantkit", run_name="__main__")


def fork(function: Callable[..., None], *arguments: Any) -> tuple[int, str, str]:
    """Call in a process that has the imports of this one and nothing else; exit code, stdout, stderr."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder) / name for name in ("stdout", "stderr"))
        code, _ = run_forked(partial(function, *arguments), stdout=out, stderr=err)
        return code or 0, out.read_text(), err.read_text()


def said(result: Record) -> Record:
    """Text of a generation; of an evaluation every fractional number that is not a time, whatever it is called."""
    return {"text": result["text"]} if "text" in result else {"numbers": sorted(set(numbers(result)))}


def numbers(value: Any) -> Iterator[float]:
    """Floats below a JSON value, without those whose key speaks of seconds."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if "second" not in key and not key.endswith("_s"):
                yield from numbers(item)


# ---- writing and checking


def describe(repository: Path) -> Record:
    """Commit, versions and processor: what the bytes may depend on."""
    import torch
    import transformers

    from quantkit.machine.devices import processor_name

    command = ["git", "-C", str(repository), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return {
        "commit": subprocess.run(command, capture_output=True, text=True).stdout.strip(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": processor_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def write(path: Path, about: Record, models: Record, cases: list[Case]) -> int:
    """Run what the file does not hold."""
    kept: Record = json.loads(path.read_text()) if path.exists() else {"about": about, "models": {}, "cases": {}}
    if kept["about"] != about:
        sys.exit(f"{path}: was written by {kept['about']}, this is {about}; choose another file or remove it")
    kept["models"] |= models
    for case in cases:
        if case.name not in kept["cases"]:
            kept["cases"][case.name] = run(case)
            path.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


def check(path: Path, about: Record, models: Record, cases: list[Case], without: str | None) -> int:
    """Run all; print each difference."""
    kept = json.loads(path.read_text())
    for key in about:
        if key != "commit" and about[key] != kept["about"][key]:
            print(f"note: {key} is {about[key]}, the file was written with {kept['about'][key]}", file=sys.stderr)
    differences = [f"{name}: the model itself differs" for name in models if models[name] != kept["models"].get(name)]
    mine = {name for name in kept["cases"] if name.split("/")[0] in models}
    differences += [f"{name}: cannot be run any more" for name in sorted(mine - {case.name for case in cases})]
    cases = [case for case in cases if without is None or without not in case.name]
    for line in differences:
        print(line)
    for case in cases:
        for line in compare(kept["cases"].get(case.name), run(case)):
            print(f"{case.name}: {line}\n    quantkit {' '.join(case.arguments)}", flush=True)
            differences.append(line)
    print(f"{len(cases)} cases, {len(differences)} differences")
    return 1 if differences else 0


def compare(before: Record | None, after: Record) -> Iterator[str]:
    """What differs; messages and seconds may."""
    if before is None:
        yield "not in the file"
    elif before["exit"] != after["exit"]:
        yield f"exit code {after['exit']} instead of {before['exit']}; {after.get('message', '')}"
    elif "files" in before:
        yield from compare_files(before["files"], after["files"])
    elif before.get("text") != after.get("text"):
        yield f"{after['text']!r} instead of {before['text']!r}"
    elif lost := sorted(set(before.get("numbers", ())) - set(after.get("numbers", ()))):
        yield f"{len(lost)} of {len(before['numbers'])} numbers are gone: {lost[:5]}"


def compare_files(before: dict[str, str], after: dict[str, str]) -> Iterator[str]:
    """Files that are missing, new or of other bytes."""
    for name in sorted(before | after):
        if name not in after or name not in before:
            yield f"{name} is {'new' if name in after else 'missing'}"
        elif before[name] != after[name]:
            yield f"{name} has other bytes"


if __name__ == "__main__":
    sys.exit(main())
