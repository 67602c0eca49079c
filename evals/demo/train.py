"""Train the demo model from nothing and export it: about an hour on one or two CPU cores, less on a GPU.

    python evals/demo/train.py --work demo-run

The same command resumes after an interruption: weights, optimizers and the step (which is also the data position)
are saved every --save-every steps. The compute copy is bfloat16 on a float32 master; matrices are trained with
Muon, embedding and norms with AdamW; warm-up, constant rate, linear decay.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from channels import spread_channels
from language import TASKS
from network import build_model, use_training_attention
from packing import PADDING, Batch, draw_batch
from tokenizer import train_tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

MODEL_DIR = Path(__file__).resolve().parents[2] / "quantkit" / "demo" / "model"
TOKENS_PER_STEP = 4096
ANSWER_WEIGHT = 4.0
OTHER_WEIGHT = 0.5
WARMUP_STEPS = 60
DECAY_FRACTION = 0.4


@dataclass
class Run:
    """Everything that a checkpoint holds, and the device it computes on."""

    master: LlamaForCausalLM
    worker: LlamaForCausalLM
    optimizers: list[torch.optim.Optimizer]
    device: torch.device
    step: int = 0
    seconds: float = 0.0
    hits: Tensor = field(default_factory=lambda: torch.zeros(len(TASKS), 2))

    def state(self) -> dict[str, object]:
        """What to save; the data position is the step, and nothing else is random."""
        return {
            "master": self.master.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "rng": torch.get_rng_state(),
        }

    def restore(self, state: dict) -> None:
        """Continue exactly where `state` was taken."""
        self.master.load_state_dict(state["master"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds = state["step"], state["seconds"]
        torch.set_rng_state(state["rng"])
        self.publish()

    def publish(self) -> None:
        """Copy the master's weights into the bfloat16 worker."""
        with torch.no_grad():
            for compute, exact in zip(self.worker.parameters(), self.master.parameters(), strict=True):
                compute.copy_(exact)


def start_run(tokenizer: PreTrainedTokenizerFast, rate: float, device: torch.device) -> Run:
    """A fresh model with its optimizers."""
    master = build_model(0, bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id).to(device)
    worker = copy.deepcopy(master).to(torch.bfloat16)
    # Rounded rotary frequencies would be other ones than the exported model has.
    worker.model.rotary_emb = master.model.rotary_emb
    if device.type == "cpu":
        use_training_attention(worker)
    matrices = [p for name, p in master.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in master.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    for optimizer in (muon, adam):
        optimizer.param_groups[0]["peak"] = rate
    return Run(master, worker, [muon, adam], device)


def rate_factor(step: int, steps: int) -> float:
    """Learning rate as a fraction of its peak: warm-up, constant, linear decay to zero."""
    return min(1.0, (step + 1) / WARMUP_STEPS, (steps - step) / (steps * DECAY_FRACTION))


def row_length(step: int, steps: int) -> int:
    """Short rows first: attention then costs half as much while most is learned."""
    return 256 if step < 0.6 * steps else 512


def weighted_loss(logits: Tensor, batch: Batch, hits: Tensor) -> Tensor:
    """Next-token cross-entropy, answers weighted up; adds this batch's answer accuracy to `hits` (kind, right/all)."""
    targets = batch.tokens[:, 1:].flatten()
    kinds = batch.kinds[:, 1:].flatten()
    flat = logits[:, :-1].flatten(0, 1).float()
    losses = functional.cross_entropy(flat, targets, reduction="none")
    weights = torch.where(kinds >= 0, ANSWER_WEIGHT, OTHER_WEIGHT) * (kinds != PADDING)
    answers = kinds >= 0
    right = (flat[answers].argmax(-1) == targets[answers]).float().cpu()
    hits[:, 0].index_add_(0, kinds[answers].cpu(), right)
    hits[:, 1].index_add_(0, kinds[answers].cpu(), torch.ones_like(right))
    return (losses * weights).sum() / weights.sum()


def train_step(run: Run, batch: Batch, factor: float) -> float:
    """One optimizer step; returns the loss."""
    batch = Batch(batch.tokens.to(run.device), batch.kinds.to(run.device))
    logits = run.worker(input_ids=batch.tokens, use_cache=False).logits
    loss = weighted_loss(logits, batch, run.hits)
    loss.backward()
    for compute, exact in zip(run.worker.parameters(), run.master.parameters(), strict=True):
        exact.grad = compute.grad.float()
        compute.grad = None
    torch.nn.utils.clip_grad_norm_(run.master.parameters(), 1.0)
    for optimizer in run.optimizers:
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["peak"] * factor
        optimizer.step()
    run.publish()
    run.step += 1
    return loss.item()


def save_atomically(state: dict[str, object], path: Path) -> None:
    """Write beside `path` and rename, so that an interruption never leaves half a checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the bfloat16 checkpoint, with uneven channels, and the tokenizer files."""
    exported = copy.deepcopy(model).to("cpu", torch.bfloat16)
    spread_channels(exported)
    exported.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_portable_tokenizer_config(folder / "tokenizer_config.json")
    for file in folder.iterdir():
        file.chmod(0o644)


def write_portable_tokenizer_config(path: Path) -> None:
    """Name the class that every release of transformers knows, and drop what only says where it was loaded from."""
    config = json.loads(path.read_text())
    config = {key: value for key, value in config.items() if key not in ("backend", "is_local", "local_files_only")}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def prepare_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that this run began with, trained now if it begins."""
    if not folder.exists():
        train_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def report(run: Run, loss: float, steps: int) -> None:
    """One line of progress: accuracy on the answers of the training documents, which are always fresh ones."""
    accuracy = " ".join(f"{k} {100 * h / max(n, 1):.1f}" for k, (h, n) in zip(TASKS, run.hits.tolist(), strict=True))
    speed = run.step * TOKENS_PER_STEP / run.seconds
    print(f"step {run.step}/{steps} {run.seconds:.0f} s {speed:.0f} tok/s loss {loss:.3f} | {accuracy}", flush=True)
    run.hits.zero_()


def train(run: Run, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> None:
    """Run to the last step, saving as it goes."""
    steps = args.tokens // TOKENS_PER_STEP
    while run.step < steps:
        began = time.perf_counter()
        length = row_length(run.step, steps)
        batch = draw_batch(tokenizer, args.seed, run.step, TOKENS_PER_STEP // length, length)
        loss = train_step(run, batch, rate_factor(run.step, steps))
        run.seconds += time.perf_counter() - began
        if run.step % args.report_every == 0:
            report(run, loss, steps)
        if run.step % args.save_every == 0 or run.step == steps:
            save_atomically(run.state(), args.work / "run.pt")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("demo-run"), help="folder of the resumable checkpoint")
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="folder to export to")
    parser.add_argument("--tokens", type=int, default=7_000_000)
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--seed", default="train", help="of the training documents")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--report-every", type=int, default=25)
    return parser.parse_args()


def main() -> None:
    """Train, or resume, then export."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = prepare_tokenizer(args.work / "tokenizer")
    run = start_run(tokenizer, args.rate, device)
    checkpoint = args.work / "run.pt"
    if checkpoint.exists():
        run.restore(torch.load(checkpoint, map_location=device, weights_only=True))
    train(run, tokenizer, args)
    export(run.master, tokenizer, args.out)


if __name__ == "__main__":
    main()
