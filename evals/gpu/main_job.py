"""The main job from end to end on the device: quantize, generate, verify, for two recipes and two models.

The models are the demo model and two layers of the 8B shape with random weights. Each recipe writes a checkpoint on the
device; the GPU engine's greedy text is compared with the CPU engine's; then `verify` compares distributions with the
original, without timing and without tasks. A stage that fails is a row, and the stages that need its checkpoint say so.

The CPU computes in float32, the GPU in float16, so two words that are almost equally likely may change places: where
the text differs, the distance of the two best logits on the CPU counts as a tie below 1 % of their range.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from timing import open_results, parse

# isort: split
import torch
from quantization import two_layers, write_model
from results import Results

import quantkit
from quantkit.evaluate.fidelity import Texts, divergences
from quantkit.evaluate.options import EvaluationOptions
from quantkit.evaluate.verify.options import VerifyOptions
from quantkit.runtime.types import SamplingParams

RECIPES = ("awq-int4", "gptq-int4")
MODELS = ("demo", "8B, 2 layers")
STAGES = ("quantize", "text", "verify")
# Tokens after each prompt; the CPU computes them in float32, and the large model's are few.
TOKENS = {"demo": 48, "8B, 2 layers": 7}
TINY_TOKENS = {"demo": 1, "8B, 2 layers": 2}
PROMPTS = ("Once upon a time", "The little dog", "Sums:42+37=", "One day, a girl named Lily wanted to", "He said that")
FEW_PROMPTS = 2  # where few tokens follow each
TIE = 0.01
CALIBRATION = {"calibration.samples": 32, "calibration.sequence_length": 512}
TINY = {"calibration.samples": 4, "calibration.sequence_length": 32}
GATES = {"demo": ("kl<=0.05",), "8B, 2 layers": ()}  # random weights say nothing of accuracy


def generate(llm: quantkit.LLM, num_tokens: int) -> Texts:
    """Tokens after each prompt."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    prompts = PROMPTS[:FEW_PROMPTS] if num_tokens < 8 else PROMPTS
    return [done.token_ids for done in llm.generate(list(prompts), params)]


def compare(path: Path, device: str, num_tokens: int, graphs: bool) -> dict[str, Any]:
    """How far the GPU engine gives the CPU engine's text: float16 and its kernels against float32 without them."""
    sizes: dict[str, Any] = {"kv_cache": "auto", "max_length": 256}
    reference = quantkit.LLM(path, device="cpu", dtype="float32", max_sequences=1, **sizes)
    expected = generate(reference, num_tokens)
    os.environ["QUANTKIT_CUDA_GRAPHS"] = "1" if graphs else "0"
    llm = quantkit.LLM(path, device=device, dtype="float16", max_sequences=8, **sizes)
    tokens = generate(llm, num_tokens)
    gaps = [
        _gap(reference, [*reference.encode(prompt), *text[:equal]])
        for prompt, equal, text in zip(PROMPTS, divergences(tokens, expected), expected, strict=False)
        if equal is not None
    ]
    return {
        "prompts": len(tokens),
        "same": len(tokens) - len(gaps),
        "ties": sum(gap < TIE for gap in gaps),
        "largest_gap": max(gaps, default=0.0),
        "graphs": llm.engine.runner.graph_status or "none",
    }


def _gap(llm: quantkit.LLM, ids: list[int]) -> float:
    """Distance of the two best logits of the next token, as a share of their range."""
    logits = llm.score([ids])[0][-1].float()
    best = torch.topk(logits, 2).values
    return ((best[0] - best[1]) / (logits.max() - logits.min())).item()


class Job:
    """One recipe for one model. *Mutable*: keeps what later stages need.

    Args:
        model, recipe: see MODELS, RECIPES.
        source: directory of the model; None = the demo model.
        work: where the checkpoint goes.
        arguments: device, and whether this is a rehearsal.
        results: gets notes of what is under way.
    """

    def __init__(
        self, model: str, recipe: str, source: Path | None, work: Path, arguments: Any, results: Results
    ) -> None:
        self._model, self._recipe, self._source, self._out = model, recipe, source, work / f"{recipe}-{model[:4]}"
        self._device, self._tiny, self._results = arguments.device, arguments.tiny, results

    def quantize(self) -> dict[str, Any]:
        """Write the checkpoint; seconds and the most device memory."""
        on_gpu = self._device == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        begun, overrides = time.perf_counter(), TINY if self._tiny else CALIBRATION
        quantkit.quantize(self._source, self._recipe, self._out, overrides=overrides, device=self._device, resume=False)
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "peak_device_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0}

    def text(self) -> dict[str, Any]:
        """Compare greedy text with the CPU engine's.

        Raises:
            ArithmeticError: a text differs where the CPU engine's two best tokens are no tie.
        """
        begun = time.perf_counter()
        tokens = (TINY_TOKENS if self._tiny else TOKENS)[self._model]
        figures = compare(self._checkpoint(), self._device, tokens, graphs=not self._tiny)
        figures["seconds"] = time.perf_counter() - begun
        self._results.note(**figures)
        wrong = figures["prompts"] - figures["same"] - figures["ties"]
        if wrong:
            raise ArithmeticError(f"{wrong} of {figures['prompts']} texts are not the CPU engine's")
        return figures

    def verify(self) -> dict[str, Any]:
        """Compare distributions with the original's.

        Raises:
            ArithmeticError: a gate does not hold.
        """
        begun, name = time.perf_counter(), None
        engine = {"device": self._device, "max_length": 512}
        if self._tiny:  # without the kernels: the interpreter would take hours for a text
            os.environ["QUANTKIT_TRITON"] = "0"
            text = self._out.parent / "text.txt"
            text.write_text("Once upon a time there was a little girl called Lily. She had a red ball. " * 4)
            name = str(text)
        options = VerifyOptions(
            text=name, evaluation=EvaluationOptions(), noise=False, bench=None, sensitivity=False, engine=engine
        )
        report = quantkit.verify(self._checkpoint(), self._source, gates=GATES[self._model], options=options)
        if self._tiny:
            os.environ["QUANTKIT_TRITON"] = "force"
        assert report.fidelity is not None
        figures = {"mean_kl": report.fidelity.mean_kl, "top1_agreement": report.fidelity.top1_agreement}
        self._results.note(**figures)
        if not report.held and not self._tiny:
            raise ArithmeticError(f"{', '.join(GATES[self._model])} does not hold")
        return {"seconds": time.perf_counter() - begun, **figures}

    def _checkpoint(self) -> Path:
        if not (self._out / "config.json").exists():
            raise FileNotFoundError("no checkpoint was written")
        return self._out


def main() -> None:
    """Write main_job.json."""
    arguments = parse(60)
    results = open_results("main_job", arguments, row_seconds=40)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        work = Path(folder)
        for model in MODELS:
            source = None
            for recipe in RECIPES:
                if source is None and model != "demo" and not results.is_over():
                    source = work / "model"
                    write_model(source, two_layers(arguments.tiny), arguments.device)
                job = Job(model, recipe, source, work, arguments, results)
                for stage in STAGES:
                    results.attempt(getattr(job, stage), model=model, recipe=recipe, stage=stage)
    results.finish()


if __name__ == "__main__":
    main()
