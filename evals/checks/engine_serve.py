"""The engines' half of vllm_cpu.py and cpu_engines.py: what an engine computes of checkpoints, or why it refuses them.

    python engine_serve.py vllm|openvino|onnxruntime|gptqmodel|llama.cpp CASES.json

Runs in an environment with the engine; needs no quantkit. CASES.json: [{"checkpoint": PATH, "source": DIR, "texts":
IDS.json, "output": FILE.json}, ...], with the model's folder as source, from where some take config.json if the
checkpoint is one GGUF file. What takes long is imported once, and a fork of that process loads each checkpoint: one
that crashes or hangs takes only its own row.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from processes import run_forked
from provenance import write_whole

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    TORCHDYNAMO_DISABLE="1",  # vLLM compiles what gathers log-probabilities, which takes longer than all else
)

PROMPT, NEW_TOKENS = 20, 40
SHARED = {
    "vllm": (
        "vllm",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.executor.uniproc_executor",
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
        "vllm.model_executor.models.llama",
        "vllm.model_executor.models.qwen3_moe",
    )
}
# What is stored, not what is fastest: both would round activations to 8 bits, OpenVINO the cache too, in bfloat16; ONNX
# Runtime would round the output head to 4.
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
LIMIT_S = 900
Answer = dict[str, Any]
Logits = Callable[[list[int]], Any]  # (T, V) of a text


def main() -> None:
    """Every case, one after another."""
    engine, cases = sys.argv[1:]
    for module in SHARED.get(engine, ()):
        importlib.import_module(module)
    gc.freeze()  # what is imported is never garbage: children neither walk it nor get pages of their own for it
    for case in json.loads(Path(cases).read_text()):
        began, output = time.monotonic(), Path(case["output"])
        log = output.with_suffix(".log")
        code, _ = run_forked(partial(_write_answer, engine, case), stdout=log, stderr=log, limit_s=LIMIT_S)
        if not output.exists():
            how = "hung" if code is None else f"ended with {code}"
            output.write_text(json.dumps({"error": f"the process {how}"}))
        print(f"{output.stem}: {time.monotonic() - began:.0f} s", flush=True)


def _write_answer(engine: str, case: dict[str, str]) -> None:
    texts, output = json.loads(Path(case["texts"]).read_text()), Path(case["output"])
    try:
        answer = ENGINES[engine](Path(case["checkpoint"]), texts, case["source"], output.with_suffix(".work"))
    except Exception as error:
        traceback.print_exc()
        answer = {"error": _reason(error)}
    write_whole(output, json.dumps(answer))


def _reason(error: BaseException) -> str:
    """The first cause, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


def _computed(logits: Logits, texts: list[list[int]]) -> Answer:
    """Greedy texts, the whole text computed for each token; log-probabilities of the texts' tokens but the first."""
    import numpy as np

    written, chosen = [], []
    for text in texts:
        tokens = text[:PROMPT]
        for _ in range(NEW_TOKENS):
            tokens.append(int(logits(tokens)[-1].argmax()))
        written.append(tokens[PROMPT:])
        rows = np.asarray(logits(text)[:-1], dtype=np.float64)
        own = rows[np.arange(len(rows)), text[1:]]
        chosen.append((own - np.logaddexp.reduce(rows, axis=-1)).tolist())
    return {"greedy": written, "logprobs": chosen}


def _vllm(checkpoint: Path, texts: list[list[int]], _source: str, _work: Path) -> Answer:
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(checkpoint),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
        kv_cache_memory_bytes=64 << 20,  # pages are cleared, which takes as long as all the rest
    )
    score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    scored = llm.generate([{"prompt_token_ids": ids} for ids in texts], score, use_tqdm=False)
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    written = llm.generate([{"prompt_token_ids": ids[:PROMPT]} for ids in texts], greedy, use_tqdm=False)
    return {
        "logprobs": [
            [row[token].logprob for token, row in zip(ids[1:], done.prompt_logprobs[1:], strict=True)]
            for ids, done in zip(texts, scored, strict=True)
        ],
        "greedy": [list(done.outputs[0].token_ids) for done in written],
        "cache": str(llm.llm_engine.vllm_config.cache_config.cache_dtype),
    }


def _in_torch(model: Any, texts: list[list[int]]) -> Answer:
    """What a model computes that is called as transformers' are."""
    import torch

    @torch.inference_mode()
    def logits(tokens: list[int]) -> Any:
        text = torch.tensor([tokens])
        return model(input_ids=text, attention_mask=torch.ones_like(text)).logits[0].float().numpy()

    return _computed(logits, texts)


def _openvino(checkpoint: Path, texts: list[list[int]], _source: str, _work: Path) -> Answer:
    if checkpoint.suffix == ".gguf":
        return _openvino_gguf(checkpoint, texts)
    from optimum.intel import OVModelForCausalLM

    model = OVModelForCausalLM.from_pretrained(str(checkpoint), export=True, load_in_8bit=False, ov_config=EXACT)
    return _in_torch(model, texts)


def _openvino_gguf(checkpoint: Path, texts: list[list[int]]) -> Answer:
    import numpy as np
    import openvino
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(str(checkpoint), "CPU", **EXACT)
    config = openvino_genai.GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, ignore_eos=True)
    written = []
    for text in texts:
        tokens = openvino.Tensor(np.array([text[:PROMPT]], dtype=np.int64))
        mask = openvino.Tensor(np.ones((1, PROMPT), dtype=np.int64))
        done = pipeline.generate(openvino_genai.TokenizedInputs(tokens, mask), config)
        written.append([int(token) for token in done.tokens[0]])
    return {"greedy": written}


def _onnxruntime(checkpoint: Path, texts: list[list[int]], source: str, work: Path) -> Answer:
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

    return _computed(logits, texts)


def _gptqmodel(checkpoint: Path, texts: list[list[int]], _source: str, _work: Path) -> Answer:
    import torch
    from gptqmodel import BACKEND, GPTQModel

    section = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    backend = BACKEND.AWQ_TORCH if section["quant_method"] == "awq" else BACKEND.TORCH
    return _in_torch(GPTQModel.load(str(checkpoint), device="cpu", backend=backend, dtype=torch.float16).model, texts)


def _llama_cpp(checkpoint: Path, texts: list[list[int]], _source: str, _work: Path) -> Answer:
    import llama_cpp
    import numpy as np

    sizes = {"n_ctx": 256, "n_batch": 256, "n_threads": 1, "n_threads_batch": 1}
    model = llama_cpp.Llama(str(checkpoint), logits_all=True, verbose=False, **sizes)

    def logits(tokens: list[int]) -> Any:
        model.reset()
        model.eval(tokens)
        return np.array(model.scores[: len(tokens)], dtype=np.float32)

    return _computed(logits, texts)


ENGINES = {
    "vllm": _vllm,
    "openvino": _openvino,
    "onnxruntime": _onnxruntime,
    "gptqmodel": _gptqmodel,
    "llama.cpp": _llama_cpp,
}


if __name__ == "__main__":
    main()
