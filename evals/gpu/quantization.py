"""How long GPTQ takes on a GPU: layers of an 8B model through `quantkit.quantize`, and the most device memory.

A checkpoint of two such layers with random weights is written and compressed with `gptq-int4` (groups of 128) on 128
sequences of 2048 random tokens, as the real thing would be; the time of a whole model is the second layer's times 32,
plus what is outside the layers. Random weights and inputs take the same time as real ones.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from timing import open_results, parse

# isort: split
import torch
from random_model import settings
from results import Results
from safetensors.torch import save_file

import quantkit
from quantkit.compress.pipeline.state import Listener
from quantkit.results import LayerRecord

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checks"))
from make_random_llama import weight_shapes

LAYERS = 32
_TOKENIZER = Path(quantkit.__file__).parent / "demo" / "model"


class _Clock(Listener):
    """Notes when layers begin and end, each at once."""

    def __init__(self, results: Results, on_gpu: bool) -> None:
        self.seconds: list[float] = []
        self._results, self._on_gpu, self._begun = results, on_gpu, 0.0

    def layer_started(self, index: int, name: str) -> None:
        """See `Listener`."""
        self._begun = time.perf_counter()

    def layer_finished(self, record: LayerRecord) -> None:
        """See `Listener`."""
        if self._on_gpu:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._begun)
        self._results.note(seconds_of_layers=self.seconds)


def write_model(folder: Path, config: dict[str, Any], device: str) -> None:
    """A checkpoint with the demo model's tokenizer, which is not asked for anything."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    for path in _TOKENIZER.glob("*token*.json"):
        shutil.copy(path, folder)
    tensors = {}
    for name, shape in (pair for shapes in weight_shapes(config) for pair in shapes.items()):
        value = torch.randn(shape, device=device) * shape[-1] ** -0.5 if len(shape) > 1 else torch.ones(shape)
        tensors[name] = value.to("cpu", torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_samples(path: Path, count: int, length: int, vocabulary: int) -> None:
    """Calibration data as token ids."""
    with path.open("w") as file:
        for row in torch.randint(3, vocabulary, (count, length)).tolist():
            file.write(json.dumps({"input_ids": row}) + "\n")


def two_layers(tiny: bool) -> dict[str, Any]:
    """config.json of two layers of the 8B shape with the demo model's vocabulary."""
    vocabulary = json.loads((_TOKENIZER / "config.json").read_text())["vocab_size"]
    return {**settings("tiny" if tiny else "8B"), "vocab_size": vocabulary, "num_hidden_layers": 2}


def quantize(work: Path, device: str, tiny: bool, results: Results) -> dict[str, Any]:
    """Compress, and say what it took."""
    count, length = (4, 32) if tiny else (128, 2048)
    config = two_layers(tiny)
    write_model(work / "model", config, device)
    write_samples(work / "samples.jsonl", count, length, config["vocab_size"])
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    clock, begun = _Clock(results, on_gpu), time.perf_counter()
    overrides = {
        "calibration.data": str(work / "samples.jsonl"),
        "calibration.samples": count,
        "calibration.sequence_length": length,
    }
    quantkit.quantize(
        work / "model", "gptq-int4", work / "out", overrides=overrides, device=device, resume=False, listener=clock
    )
    seconds = time.perf_counter() - begun
    layer, layers = clock.seconds[-1], config["num_hidden_layers"]
    return {
        "layers": layers,
        "samples": count,
        "sequence_length": length,
        "layer_seconds": layer,
        "other_seconds": seconds - sum(clock.seconds),
        "model_minutes": (LAYERS * layer + seconds - sum(clock.seconds)) / 60,
        "peak_device_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
    }


def main() -> None:
    """Write quantization.json."""
    arguments = parse(60)
    results = open_results("quantization", arguments, row_seconds=arguments.seconds, share=1.0)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        work = partial(quantize, Path(folder), arguments.device, arguments.tiny, results)
        results.attempt(work, kind="gptq-int4 g128")
    results.finish()


if __name__ == "__main__":
    main()
