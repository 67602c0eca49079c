"""Whether a compression by several ranks writes the bytes that one writes, also when a rank is killed on the way.

    python evals/checks/ranks_agree.py [--ranks 1,2,3,4] [--recipes gptq-int4,...] [--model DIR|tiny-moe] [--kill]

Every shipped recipe, on the bundled demo model unless another is given; little data in small batches, so that each rank
has some. With `--kill` a rank dies at a random moment and another number of ranks ends the run. Ranks are forked from
this process and have one thread each. Prints a line per recipe and ends with exit code 1 if bytes differ.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import transformers.models.llama.modeling_llama  # noqa: F401

import quantkit.compress.pipeline.run
from quantkit.api import list_recipes
from quantkit.cli import main as quantkit
from quantkit.compress.pipeline import inputs
from quantkit.compress.recipe import load

MOE = {
    "vocab_size": 260,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}


def main() -> int:
    """Every recipe with every number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 3, 4])
    parser.add_argument("--recipes", type=lambda text: text.split(","), default=list(list_recipes()))
    parser.add_argument("--model")
    parser.add_argument("--kill", action="store_true")
    options = parser.parse_args()
    inputs._BATCH_TOKENS = 256
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        model = write_moe(Path(folder) / "moe") if options.model == "tiny-moe" else options.model
        for recipe in options.recipes:
            digests = [compress(Path(folder), model, recipe, count, options.kill) for count in options.ranks]
            same = len(set(digests)) == 1
            bad += not same
            print(recipe, "same" if same else "DIFFERENT", digests[0] if same else digests, flush=True)
    return 1 if bad else 0


def compress(folder: Path, model: str | Path | None, recipe: str, count: int, kill: bool) -> str:
    """SHA-256 over all files but the run log, or what went wrong."""
    output = folder / f"{recipe}-{count}"
    arguments = ["quantize", *([str(model)] if model else []), "--recipe", recipe, "--quiet", "-o", str(output)]
    if load(recipe).calibration is not None:
        arguments += ["--samples", "10", "--sequence-length", "128"]
    if recipe == "autoround-int4":
        arguments += ["--set", "steps.autoround.iterations=12"]
    if kill and count > 1:
        ranks = start(arguments, count)
        time.sleep(random.uniform(1, 8))
        victim = random.choice(ranks)
        os.kill(victim.pid or 0, signal.SIGKILL)
        began = time.monotonic()
        codes = finish(ranks)
        if time.monotonic() - began > 5:
            return f"the others took {time.monotonic() - began:.1f} s to end"
        if not output.exists() and codes[ranks.index(victim)] != -signal.SIGKILL:
            return f"exit codes {codes}"
        others = {code for rank, code in zip(ranks, codes, strict=True) if rank is not victim}
        if not output.exists() and others != {5}:
            return f"exit codes {codes}"
        count = 1 + count % 3
    codes = [0] if output.exists() else finish(start(arguments, count))
    if any(codes):
        return f"exit codes {codes}"
    files = sorted(path for path in output.iterdir() if path.name != "quantkit-run.json")
    digest = hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()
    shutil.rmtree(output)
    return digest


def start(arguments: list[str], count: int) -> list[multiprocessing.context.ForkProcess]:
    """Ranks at work."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=work, args=(arguments, number, count, port)) for number in range(count)]
    for rank in ranks:
        rank.start()
    return ranks


def finish(ranks: list[multiprocessing.context.ForkProcess]) -> list[int | None]:
    """Exit codes."""
    for rank in ranks:
        rank.join()
    return [rank.exitcode for rank in ranks]


def work(arguments: list[str], number: int, count: int, port: int) -> None:
    """One rank."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - for as long as the process
    quantkit(arguments)


def write_moe(folder: Path) -> Path:
    """A seeded random mixture of experts, by a process of its own: what forks has computed nothing."""

    def write() -> None:
        import torch
        from make_random_llama import write_tokenizer
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **MOE))
        model.save_pretrained(folder)
        write_tokenizer(folder)

    child = multiprocessing.get_context("fork").Process(target=write)
    child.start()
    child.join()
    return folder


if __name__ == "__main__":
    sys.exit(main())
