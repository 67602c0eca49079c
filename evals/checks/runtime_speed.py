"""Prefill and decode tokens/s of the bundled runtime against transformers (and llama.cpp) on one CPU thread.

    python evals/checks/runtime_speed.py WORK [--rounds 3] [--llama-cpp PYTHON SCRIPT] [--json FILE]

The model is TinyLlama-1.1B's shape cut to 8 layers, random weights, bfloat16: a 128-token prompt, 64 new tokens, batch
1. Every engine runs in a process of its own, pinned to one core, and is clocked in process CPU time, which a busy
neighbour disturbs less than wall time; the engines take turns, and medians over the rounds are shown. llama.cpp is
measured by a script of one's own that prints lines like "llama.cpp q4_0 ... prefill 195 ... decode 71.0 ...", run with
PYTHON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

PROMPT, NEW, REPEATS = 128, 64, 4
CLOCK = time.process_time
W8A8 = """\
name: w8a8-rounded
weights: {dtype: int8, group_size: channel}
activations: {dtype: int8}
steps: []
format: compressed-tensors
"""
# engine -> (folder of the model, keywords of LLM); 4 and 8 bits include the output head, as llama.cpp's files do.
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "quantkit bf16": ("dense", {}),
    "quantkit W8A8": ("w8a8", {"head_dtype": "int8"}),
    "quantkit W4A16": ("w4a16", {"head_dtype": "int4"}),
    "quantkit W4A16, bf16 head": ("w4a16", {}),
}
PEER = "transformers bf16"


def main() -> None:
    """Make the models that are not there, measure in turns, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for the models, about 2 GB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-cpp", nargs=2, metavar=("PYTHON", "SCRIPT"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=[*OURS, PEER], help="measure one engine in this process and print it")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure_transformers(options.work) if options.one == PEER else measure(options)))
        return
    make_models(options.work)
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(options.rounds):
        for name in (PEER, *OURS):
            command = [sys.executable, __file__, str(options.work), "--one", name]
            found.setdefault(name, []).append(tuple(json.loads(run_pinned(command).splitlines()[-1])))
        if options.llama_cpp:
            for name, rates in llama_cpp(options.llama_cpp, options.work).items():
                found.setdefault(name, []).append(rates)
        print(f"round {number + 1} of {options.rounds} done", file=sys.stderr)
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
    show(medians)
    if options.json:
        options.json.write_text(json.dumps({"medians": medians, "rounds": found}, indent=2))


def run_pinned(command: list[str]) -> str:
    """Standard output of a command on one core with one thread."""
    core = max(os.sched_getaffinity(0))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CPUCLK": "1"}
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    return done.stdout


def make_models(work: Path) -> None:
    """The dense model, and two compressed from it by rounding."""
    from make_random_llama import make

    import quantkit

    if not (work / "dense").exists():
        make(work / "dense", "1b-8layers")
    (work / "w8a8.yaml").write_text(W8A8)
    for name, recipe in (("w4a16", "rtn-int4"), ("w8a8", work / "w8a8.yaml")):
        if not (work / name).exists():
            quantkit.quantize(work / "dense", recipe, work / name)


def measure(options: argparse.Namespace) -> tuple[float, float]:
    """Tokens/s of prefill and decode in the bundled runtime."""
    from quantkit.runtime.llm import LLM
    from quantkit.runtime.types import SamplingParams

    folder, settings = OURS[options.one]
    llm = LLM(options.work / folder, threads=1, max_sequences=1, max_length=512, prefix_cache=False, **settings)
    prompt = [3 + 7 * index % 250 for index in range(PROMPT)]
    return rates(lambda count: llm.generate([prompt], SamplingParams(max_tokens=count, ignore_eos=True)))


def measure_transformers(work: Path) -> tuple[float, float]:
    """The same through transformers' own generate, in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(work / "dense", dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    prompt = torch.tensor([[3 + 7 * index % 250 for index in range(PROMPT)]])

    def run(count: int) -> None:
        with torch.no_grad():
            model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False)

    return rates(run)


def rates(run: Any) -> tuple[float, float]:
    """Prefill and decode tokens/s from the CPU seconds of 1 and of NEW new tokens; the first run warms up."""

    def clocked(count: int) -> float:
        start = CLOCK()
        run(count)
        return CLOCK() - start

    clocked(2)
    first = statistics.median(clocked(1) for _ in range(REPEATS))
    whole = statistics.median(clocked(NEW) for _ in range(REPEATS))
    return PROMPT / first, (NEW - 1) / (whole - first)


def llama_cpp(command: list[str], work: Path) -> dict[str, tuple[float, float]]:
    """What the script of the user prints about llama.cpp."""
    here = Path.cwd()
    os.chdir(work)
    try:
        text = run_pinned([command[0], str(Path(command[1])), "1"])
    finally:
        os.chdir(here)
    lines = re.findall(r"llama\.cpp (\w+) .*?prefill ([\d.]+).*?decode ([\d.]+)", text)
    return {f"llama.cpp {kind}": (float(prefill), float(decode)) for kind, prefill, decode in lines}


def show(medians: dict[str, list[float]]) -> None:
    """The table, with ratios to transformers and to llama.cpp's best."""
    base = medians[PEER]
    print(f"{'engine':28} {'prefill tok/s':>14} {'x peer':>7} {'decode tok/s':>13} {'x peer':>7}")
    for name, (prefill, decode) in medians.items():
        print(f"{name:28} {prefill:14.0f} {prefill / base[0]:7.2f} {decode:13.1f} {decode / base[1]:7.2f}")
    if "llama.cpp q4_0" not in medians:
        return
    best = max(rates[0] for name, rates in medians.items() if name.startswith("llama"))
    w4, w8 = medians["quantkit W4A16"], medians["quantkit W8A8"]
    print(f"W4A16 decode / llama.cpp q4_0 decode: {w4[1] / medians['llama.cpp q4_0'][1]:.2f}")
    print(f"W8A8 decode / llama.cpp q8_0 decode:  {w8[1] / medians['llama.cpp q8_0'][1]:.2f}")
    print(f"W8A8 prefill / llama.cpp best prefill: {w8[0] / best:.2f}")


if __name__ == "__main__":
    main()
