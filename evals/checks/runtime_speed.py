"""Prefill and decode of the bundled runtime beside transformers and llama.cpp, in one run on a CPU.

    python evals/checks/runtime_speed.py WORK [--model FOLDER | --gguf FILE] [--llama-cpp PYTHON] [--threads 1,2]
        [--avx2] [--rounds 3] [--engines NAME ...] [-o evals/results/runtime_speed/NAME.json]

Without --model, the model is TinyLlama-1.1B's shape cut to 8 layers, with random weights. WORK keeps what is made of
it: checkpoints, and GGUF files that llama.cpp itself quantizes. Each engine runs in a process of its own; the engines
take turns, and medians over the rounds are kept. Batch 1: a prompt of 128 tokens, then 64 new tokens, by wall time, so
nothing else may run. PYTHON has llama-cpp-python. --avx2: our kernels use no wider instructions; PYTHON's llama.cpp
must be built that way too (its own line about the processor is kept in the results). --gguf: only this file, in
quantkit and in llama.cpp.

`bandwidth`: the share of the memory bandwidth, measured in the same process, that reading the weights once per token
would take.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT, NEW, REPEATS = 128, 64, 4
W8A8 = """\
name: w8a8-rounded
weights: {dtype: int8, group_size: channel}
activations: {dtype: int8}
steps: []
format: compressed-tensors
"""
# engine -> (folder of the model, number type of the head)
OURS = {
    "quantkit bf16": ("dense", None),
    "quantkit W8A8, int8 head": ("w8a8", "int8"),
    "quantkit W4A16, int8 head": ("w4a16", "int8"),
    "quantkit W4A16, int4 head": ("w4a16", "int4"),
}
TRANSFORMERS = "transformers bf16"
# The types are llama.cpp's names of file types; of Q4_0 it keeps the embedding and the head in 6 or 8 bits.
LLAMA_CPP = {"llama.cpp F16": "MOSTLY_F16", "llama.cpp Q8_0": "MOSTLY_Q8_0", "llama.cpp Q4_0": "MOSTLY_Q4_0"}
PEER = "llama.cpp Q4_0"  # that the page compares with
ON_FILES = {"quantkit on the Q4_0 file": "MOSTLY_Q4_0.gguf"}  # which llama.cpp has written when its own turn is over
LLAMA_CPP_ON_GIVEN, ON_GIVEN = {"llama.cpp": "given"}, {"quantkit": "given.gguf"}


def main() -> None:
    """Make the models that are not there, measure in turns, print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for the models, about 2 GB")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--llama-cpp", metavar="PYTHON")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--avx2", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="*", choices=[*OURS, TRANSFORMERS, *LLAMA_CPP, *ON_FILES], help="only these")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("ENGINE", "THREADS"), help="measure here, and print the figures")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.work, options.one[0], int(options.one[1]))))
        return
    if options.output and not (options.llama_cpp and PEER in (options.engines or [PEER])):
        parser.error(f"-o needs --llama-cpp, and {PEER} among the engines: the page compares with it")
    if options.gguf:
        engines = [*ON_GIVEN, *LLAMA_CPP_ON_GIVEN]
        options.work.mkdir(parents=True, exist_ok=True)
        given = options.work / ON_GIVEN["quantkit"]
        given.unlink(missing_ok=True)
        given.symlink_to(options.gguf.resolve())
    else:
        make_models(options.work, options.model)
        peers = [*LLAMA_CPP, *ON_FILES] if options.llama_cpp else []
        engines = [*OURS, *([] if options.avx2 else [TRANSFORMERS]), *peers]
        engines = [engine for engine in engines if engine in (options.engines or engines)]
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for number in range(options.rounds):
        for threads in map(int, options.threads.split(",")):
            for engine in engines:
                found.setdefault((engine, threads), []).append(ask(options, engine, threads))
        print(f"round {number + 1} of {options.rounds} done", file=sys.stderr)
    rows = [{"engine": engine, "threads": threads, **medians(each)} for (engine, threads), each in found.items()]
    for row in rows:
        print(json.dumps(row))
    if options.output:
        given = options.gguf or options.model
        name = given.resolve().name if given else "TinyLlama-1.1B's shape, 8 layers"
        write(
            options,
            {
                "model": name,
                "peer": "llama.cpp" if options.gguf else PEER,
                "avx2": options.avx2,
                "rounds": options.rounds,
                "rows": rows,
            },
        )


def ask(options: argparse.Namespace, engine: str, threads: int) -> dict[str, Any]:
    """The figures of one engine, measured in a process of its own."""
    python = options.llama_cpp if engine in {**LLAMA_CPP, **LLAMA_CPP_ON_GIVEN} else sys.executable
    command = [python, __file__, str(options.work), "--one", engine, str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    if options.avx2:
        environment["QUANTKIT_NATIVE"] = "avx2"
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def medians(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each number of the rounds; of other values the first."""
    return {
        name: round(statistics.median(each[name] for each in found), 4) if isinstance(value, float) else value
        for name, value in found[0].items()
    }


def make_models(work: Path, model: Path | None) -> None:
    """The dense model, two compressed from it by rounding, and a GGUF file of its values."""
    from make_random_llama import make

    import quantkit

    work.mkdir(parents=True, exist_ok=True)
    if model and (work / "dense").exists() and (work / "dense").resolve() != model.resolve():
        sys.exit(f"{work} holds files of another model, {(work / 'dense').resolve()}; give another folder")
    if not (work / "dense").exists():
        if model:
            (work / "dense").symlink_to(model.resolve())
        else:
            make(work / "dense", "1b-8layers")
    (work / "w8a8.yaml").write_text(W8A8)
    for name, recipe in (("w4a16", "rtn-int4"), ("w8a8", work / "w8a8.yaml")):
        if not (work / name).exists():
            quantkit.quantize(work / "dense", recipe, work / name)
    if not (work / "original.gguf").exists():
        command = [sys.executable, "-m", "quantkit", "convert", work / "dense", "--to", "gguf", "--type", "f16"]
        subprocess.run([*command, "-o", work / "original.gguf"], check=True)


def measure(work: Path, engine: str, threads: int) -> dict[str, Any]:
    """The figures of an engine in this process."""
    if engine in {**LLAMA_CPP, **LLAMA_CPP_ON_GIVEN}:
        return measure_llama_cpp(work, engine, threads)
    return measure_transformers(work, threads) if engine == TRANSFORMERS else measure_ours(work, engine, threads)


def measure_ours(work: Path, engine: str, threads: int) -> dict[str, Any]:
    """The bundled runtime."""
    import torch

    from quantkit import LLM, SamplingParams
    from quantkit.benchmark.ceilings import memory_bandwidth, model_cost

    folder, head = OURS.get(engine) or ({**ON_FILES, **ON_GIVEN}[engine], None)
    llm = LLM(work / folder, threads=threads, max_sequences=1, max_length=512, prefix_cache=False, head_dtype=head)
    found = rates(lambda count: llm.generate([prompt()], SamplingParams(max_tokens=count, ignore_eos=True)))
    bytes_read = model_cost(llm.model, llm.engine.runner.cache.layouts).decode_bytes(1, PROMPT + NEW // 2)
    bandwidth = memory_bandwidth(torch.device("cpu"))
    return {**found, "bytes": bytes_read, "bandwidth": bytes_read * found["decode"] / bandwidth}


def measure_transformers(work: Path, threads: int) -> dict[str, Any]:
    """The same through transformers' own generate, in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(work / "dense", dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ids = torch.tensor([prompt()])

    def run(count: int) -> None:
        with torch.no_grad():
            model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)

    return rates(run)


def measure_llama_cpp(work: Path, engine: str, threads: int) -> dict[str, Any]:
    """llama.cpp through its C interface, with a file that it quantizes itself."""
    import llama_cpp

    kind = {**LLAMA_CPP, **LLAMA_CPP_ON_GIVEN}[engine]
    file = work / f"{kind}.gguf"
    if not file.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{kind}")
        names = str(work / "original.gguf").encode(), str(file).encode()
        assert not llama_cpp.llama_model_quantize(*names, params), f"llama.cpp did not write {file}"
    llm = llama_cpp.Llama(str(file), n_ctx=512, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)

    def step(ids: list[int]) -> None:
        tokens = (llama_cpp.llama_token * len(ids))(*ids)
        assert not llama_cpp.llama_decode(llm.ctx, llama_cpp.llama_batch_get_one(tokens, len(ids)))
        llama_cpp.llama_get_logits(llm.ctx)  # waits for the result

    def run(count: int) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), True)
        step(prompt())
        for index in range(count - 1):
            step([3 + 7 * index % 250])

    about = llama_cpp.llama_print_system_info().decode().strip(" |\n")
    return {**rates(run), "bytes": file.stat().st_size, "version": llama_cpp.__version__, "about": about}


def prompt() -> list[int]:
    """The token ids of the prompt."""
    return [3 + 7 * index % 250 for index in range(PROMPT)]


def rates(run: Callable[[int], object]) -> dict[str, float]:
    """Tokens/s of prefill and decode, from the seconds of 1 and of NEW new tokens; the first run warms up."""

    def clocked(count: int) -> float:
        start = time.perf_counter()
        run(count)
        return time.perf_counter() - start

    clocked(2)
    first = statistics.median(clocked(1) for _ in range(REPEATS))
    whole = statistics.median(clocked(NEW) for _ in range(REPEATS))
    return {"prefill": PROMPT / first, "decode": (NEW - 1) / (whole - first)}


def write(options: argparse.Namespace, data: dict[str, Any]) -> None:
    """Keep the figures with what they rest on."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from provenance import plain, stamp, write_json

    write_json(options.output, {**data, "taken": plain(stamp())})


if __name__ == "__main__":
    main()
