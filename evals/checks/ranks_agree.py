"""Whether a compression by several ranks writes the bytes that one writes, also when a rank is killed on the way.

    python evals/checks/ranks_agree.py WORK [--models demo,tiny-moe,DIR] [--recipes gptq-int4,...] [--ranks 1,2,3,4]

Little data in small batches, and matrices cut that are small, so that every rank has some of everything. Compared is
the SHA-256 of all files but the run log. Then a random rank is killed once a random number of layers is done, and
another number of ranks ends the run. Ranks are forked from this process and have one thread each. Each digest is
written to evals/results/scale/bytes.json as it is taken; those that are there of today's code are not taken again.
Ends with exit code 1 if any bytes differ.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scale"))

import transformers.models.llama.modeling_llama
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401
from provenance import commit
from scale_page import KILLED, RESULTS, code, is_same
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import quantkit.compress.pipeline.run
from quantkit.api import list_recipes
from quantkit.cli import main as quantkit
from quantkit.compress.algorithms import _gptq_jobs, gptq
from quantkit.compress.calibration import observers
from quantkit.compress.pipeline import inputs
from quantkit.compress.recipe import load

EVALS = Path(__file__).resolve().parents[1]
FILE = RESULTS / "bytes.json"
MODELS = f"demo,tiny-moe,{EVALS.parents[1] / 'shared/models/babyllama-361'}"
BATCH, PANEL, SHORTEST = 128, 64, 32  # tokens, columns and rows: of the smallest pieces that ranks share
FEW = ["calibration.samples=10", "calibration.sequence_length=64"]
Row = dict[str, Any]


def main() -> int:
    """Every recipe on every model with every number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 3, 4])
    parser.add_argument("--recipes", type=lambda text: text.split(","), default=list(list_recipes()))
    parser.add_argument("--models", type=lambda text: text.split(","), default=MODELS.split(","))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    get_checkpoint_conversion_mapping("llama")  # takes a second, which each rank need not
    inputs._BATCH_TOKENS_ON_CPU, observers._PANEL, _gptq_jobs._SHORTEST = BATCH, PANEL, SHORTEST
    gptq._DIVIDED_ROWS = PANEL
    rows: dict[str, Row] = json.loads(FILE.read_text()) if FILE.exists() else {}

    def save() -> None:
        FILE.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")

    # Digests of all first: a run that is cut short has some of each recipe.
    for pairs, recipe in itertools.product(((), KILLED), options.recipes):
        for model in options.models:
            key, changes = f"{Path(model).name} {recipe}", changed(recipe, Path(model).name)
            if rows.get(key, {}).get("code") != code(load(recipe, changes).source):
                taken = {"code": code(load(recipe, changes).source), "commit": commit()}
                rows[key] = {**taken, "changes": changes, "ranks": {}, "killed": {}}
            words = ["quantize", *location(model, options.work), "--recipe", recipe, "--quiet"]
            words += [word for change in changes for word in ("--set", change)]
            fill(rows[key], words, options.work / "out", options.ranks, pairs, save)
            print(key, "same" if is_same(rows[key]) else f"DIFFERENT {rows[key]}", flush=True)
    return 0 if all(map(is_same, rows.values())) else 1


def changed(recipe: str, model: str) -> list[str]:
    """What is another than the recipe says, so that it takes seconds, and so that groups fit the model."""
    source = load(recipe).source
    changes = FEW if "calibration" in source else []
    if recipe == "autoround-int4":
        changes = [*changes, "steps.autoround.iterations=12"]
    if model == "babyllama-361" and source.get("weights", {}).get("group_size") == 128:
        changes = [*changes, "weights.group_size=32"]
    if (model, recipe) == ("babyllama-361", "fp8-block"):  # 128 do not divide the others
        changes = ['ignore=["*.q_proj", "*.k_proj", "*.v_proj", "*.mlp.*"]']
    return changes


def location(model: str, work: Path) -> list[str]:
    """Of a model, as an argument."""
    if model == "tiny-moe" and not (work / model).exists():  # by another process: what forks has computed nothing
        subprocess.run([sys.executable, str(EVALS / "scale/mixtures.py"), "tiny", str(work / model)], check=True)
    return [] if model == "demo" else [str(work / model if model == "tiny-moe" else model)]


def fill(
    row: Row,
    words: list[str],
    output: Path,
    counts: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    save: Callable[[], None],
) -> None:
    """Take the digests that a row does not have."""
    for count in counts:
        if str(count) not in row["ranks"]:
            clean(output)
            row["ranks"][str(count)] = finished(words, output, count)
            save()
    for first, then in pairs:
        if f"{first} {then}" not in row["killed"]:
            row["killed"][f"{first} {then}"] = killed(words, output, first, then)
            save()


def clean(output: Path) -> None:
    """Of what runs leave."""
    for folder in (output, output.with_name(f"{output.name}.partial")):
        shutil.rmtree(folder, ignore_errors=True)


def finished(words: list[str], output: Path, count: int) -> str:
    """Digest of what a run or its rest writes, or how it failed."""
    codes = finish(start([*words, "-o", str(output)], count))
    if any(codes):
        return f"exit codes {codes}"
    files = sorted(path for path in output.iterdir() if path.name != "quantkit-run.json")
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()[:16]


def killed(words: list[str], output: Path, first: int, then: int) -> Row:
    """Who was killed with how many layers done, and the digest of what another number of ranks then writes."""
    while True:
        clean(output)
        ranks, layers, number = start([*words, "-o", str(output)], first), random.randrange(4), random.randrange(first)
        while ranks[0].is_alive() and layers_done(output) < layers:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.2))
        ranks[number].kill()
        began = time.monotonic()
        codes, seconds = finish(ranks), time.monotonic() - began
        if not output.exists():  # else it was too late
            break
    row = {"rank": number, "layers": layers_done(output), "ended_s": round(seconds, 1)}
    others = [code for other, code in enumerate(codes) if other != number]
    if seconds > 5 or codes[number] != -signal.SIGKILL or any(code != 5 for code in others):
        return {**row, "bytes": f"exit codes {codes}"}
    return {**row, "bytes": finished(words, output, then)}


def layers_done(output: Path) -> int:
    """Of an unfinished run; -1 before it has begun."""
    try:
        return len(json.loads((output.with_name(f"{output.name}.partial") / "progress.json").read_text())["records"])
    except (OSError, ValueError):
        return -1


def start(words: list[str], count: int) -> list[multiprocessing.context.ForkProcess]:
    """Ranks at work."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=work, args=(words, number, count, port)) for number in range(count)]
    for rank in ranks:
        rank.start()
    return ranks


def finish(ranks: list[multiprocessing.context.ForkProcess]) -> list[int | None]:
    """Exit codes."""
    for rank in ranks:
        rank.join()
    return [rank.exitcode for rank in ranks]


def work(words: list[str], number: int, count: int, port: int) -> None:
    """One rank."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - for as long as the process
    quantkit(words)


if __name__ == "__main__":
    sys.exit(main())
