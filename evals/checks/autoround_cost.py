"""CPU seconds and peak memory of AutoRound on one layer of a 1.1B model: ours, and auto-round's own beside it.

python autoround_cost.py FOLDER [--peer PYTHON] [--iterations 10] [--batch-size 8] [--samples 8] [--length 256]

FOLDER gets the model (random weights, the shape of TinyLlama) if it is not there. PYTHON is an interpreter that has
auto-round; without one only our own numbers are printed. Both run with one thread on the same token ids, W4 in groups
of 128, with equal iterations and sequences per step. Seconds are those of the quantization call, imports excluded;
memory is the process's highest, and what it was before the call. The last line says whether ours are lower.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import make_random_llama
import torch

_USAGE = """
def usage():
    import resource
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
def told(before):
    after = usage()
    print("RESULT", json.dumps({"cpu_s": round(after[0] - before[0], 1), "rss_before_mb": round(before[1]),
                                "peak_rss_mb": round(after[1])}))
"""

OURS = f"""
import json, sys, torch
torch.set_num_threads(1)
folder, options = sys.argv[1], json.loads(sys.argv[2])
import transformers, quantkit, quantkit.compress.algorithms.autoround
{_USAGE}
recipe = folder + "/recipe.yaml"
open(recipe, "w").write(json.dumps(dict(weights=dict(dtype="int4", group_size=128), calibration=dict(
    data=folder + "/ids.jsonl", samples=options["samples"], sequence_length=options["length"]),
    steps=[dict(autoround=dict(iterations=options["iterations"], batch_size=options["batch_size"]))])))
before = usage()
quantkit.quantize(folder, recipe, folder + "/../autoround-ours", resume=False, overwrite=True)
told(before)
"""

PEER = f"""
import json, sys, torch
torch.set_num_threads(1)
folder, options = sys.argv[1], json.loads(sys.argv[2])
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer
{_USAGE}
ids = [json.loads(line)["input_ids"] for line in open(folder + "/ids.jsonl")]
data = [dict(input_ids=torch.tensor(row), attention_mask=torch.ones(len(row), dtype=torch.long)) for row in ids]
before = usage()
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map="cpu")
AutoRound(model, tokenizer=AutoTokenizer.from_pretrained(folder), scheme="W4A16", bits=4, group_size=128, sym=True,
          dataset=torch.utils.data.DataLoader(data, batch_size=1), seqlen=options["length"],
          nsamples=options["samples"],
          iters=options["iterations"], batch_size=options["batch_size"], device_map="cpu",
          ).quantize_and_save(folder + "/../autoround-peer", format="auto_round")
told(before)
"""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer", type=Path)
    for name, value in (("iterations", 10), ("batch-size", 8), ("samples", 8), ("length", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    model = options.folder / "model"
    if not (model / "config.json").exists():
        make_random_llama.make(model, "1b-1layer")
    chosen = {name: getattr(options, name) for name in ("iterations", "batch_size", "samples", "length")}
    ids = torch.randint(300, generator=torch.Generator().manual_seed(0), size=(options.samples, options.length))
    (model / "ids.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids.tolist()))
    ours = run(sys.executable, OURS, model, chosen)
    print("ours", json.dumps(ours | chosen), flush=True)
    if options.peer is None or not options.peer.exists():
        print("peer not present: give the Python of an environment with auto-round as --peer")
        return
    peer = run(str(options.peer), PEER, model, chosen)
    print("auto-round", json.dumps(peer | chosen))
    held = ours["cpu_s"] <= peer["cpu_s"] and ours["peak_rss_mb"] <= peer["peak_rss_mb"]
    print("no dearer than auto-round" if held else "DEARER than auto-round")
    raise SystemExit(0 if held else 1)


def run(python: str, code: str, model: Path, chosen: dict[str, int]) -> dict[str, Any]:
    """The RESULT line of one process with one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if python != sys.executable:
        environment.pop("PYTHONPATH", None)
    command = [python, "-W", "ignore", "-c", code, str(model.resolve()), json.dumps(chosen)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{python} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


if __name__ == "__main__":
    main()
