"""The engines' half of cpu_engines.py: loads one checkpoint and continues texts. Needs the engine, not quantkit.

python cpu_engines_serve.py openvino|onnxruntime CHECKPOINT SOURCE TEXTS.json OUTPUT.json

SOURCE: the model's folder, for those who take config.json from there where CHECKPOINT is one GGUF file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
PROMPT, NEW_TOKENS = 20, 40
# What is stored, not what is fastest: both would round activations to 8 bits, OpenVINO the cache too, in bfloat16; ONNX
# Runtime would round the output head to 4.
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
Answer = dict[str, Any]


def main() -> None:
    """One checkpoint."""
    engine, checkpoint, source, texts, output = sys.argv[1:]
    ids = json.loads(Path(texts).read_text())
    try:
        if engine == "openvino":
            answer = _openvino(Path(checkpoint), ids)
        else:
            answer = _onnxruntime(Path(checkpoint), source, ids, Path(f"{output}.work"))
    except Exception as error:
        while error.__cause__ is not None and isinstance(error.__cause__, Exception):
            error = error.__cause__
        answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]}
    Path(output).write_text(json.dumps(answer))


def _greedy(logits: Callable[[list[int]], Any], ids: list[list[int]]) -> list[list[int]]:
    """The likeliest token, again and again, with the whole text computed each time."""
    written = []
    for text in ids:
        tokens = text[:PROMPT]
        for _ in range(NEW_TOKENS):
            tokens.append(int(logits(tokens)[-1].argmax()))
        written.append(tokens[PROMPT:])
    return written


def _chosen(logits: Callable[[list[int]], Any], ids: list[list[int]]) -> list[list[float]]:
    """Log-probabilities of the texts' tokens but the first."""
    import torch

    rows = [torch.as_tensor(logits(text)[:-1]).float().log_softmax(-1) for text in ids]
    return [row.gather(-1, torch.tensor(text)[1:, None])[:, 0].tolist() for row, text in zip(rows, ids, strict=True)]


def _openvino(checkpoint: Path, ids: list[list[int]]) -> Answer:
    if checkpoint.suffix == ".gguf":
        return _openvino_gguf(checkpoint, ids)
    import torch
    from optimum.intel import OVModelForCausalLM

    model = OVModelForCausalLM.from_pretrained(str(checkpoint), export=True, load_in_8bit=False, ov_config=EXACT)

    def logits(tokens: list[int]) -> Any:
        text = torch.tensor([tokens])
        return model(input_ids=text, attention_mask=torch.ones_like(text)).logits[0]

    return {"greedy": _greedy(logits, ids), "logprobs": _chosen(logits, ids)}


def _openvino_gguf(checkpoint: Path, ids: list[list[int]]) -> Answer:
    import numpy as np
    import openvino
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(str(checkpoint), "CPU", **EXACT)
    config = openvino_genai.GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, ignore_eos=True)
    written = []
    for text in ids:
        tokens = openvino.Tensor(np.array([text[:PROMPT]], dtype=np.int64))
        mask = openvino.Tensor(np.ones((1, PROMPT), dtype=np.int64))
        done = pipeline.generate(openvino_genai.TokenizedInputs(tokens, mask), config)
        written.append([int(token) for token in done.tokens[0]])
    return {"greedy": written}


def _onnxruntime(checkpoint: Path, source: str, ids: list[list[int]], work: Path) -> Answer:
    import onnxruntime_genai as og
    from onnxruntime_genai.models.builder import create_model, parse_extra_options

    work.mkdir(exist_ok=True)
    is_file = checkpoint.suffix == ".gguf"
    quantized = not is_file and "quantization_config" in json.loads((checkpoint / "config.json").read_text())
    # With a checkpoint that has codes, int4 means those; with a GGUF file it would round anew.
    precision = "int4" if quantized else "fp32"
    arguments = (source if is_file else None, str(checkpoint), str(work), precision, "cpu", str(work / "cache"))
    create_model(
        *arguments, **parse_extra_options(*arguments, ["accuracy_level=1", "nodes_to_exclude=/lm_head/MatMul"])
    )
    model = og.Model(str(work))

    def logits(tokens: list[int]) -> Any:
        params = og.GeneratorParams(model)
        params.set_search_options(do_sample=False, max_length=len(tokens) + 1)
        generator = og.Generator(model, params)
        generator.append_tokens(tokens)
        return generator.get_output("logits")[0]

    return {"greedy": _greedy(logits, ids), "logprobs": _chosen(logits, ids)}


if __name__ == "__main__":
    main()
