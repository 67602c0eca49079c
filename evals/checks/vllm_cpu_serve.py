"""vLLM's half of vllm_cpu.py: what vLLM computes of each checkpoint, or why it refuses it. Needs vLLM, not quantkit.

    python vllm_cpu_serve.py CASES.json

CASES.json: [{"checkpoint": DIR, "texts": IDS.json, "output": FILE.json, "stderr": FILE, "options": {...}}, ...]. vLLM
is imported once, and a fork of that process loads each checkpoint: one that crashes or hangs takes only its own row.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

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
SHARED = (
    "vllm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3_moe",
)
LIMIT_S = 600


def main() -> None:
    """Every case, one after another."""
    for module in SHARED:
        importlib.import_module(module)
    gc.freeze()  # what is imported is never garbage: children neither walk it nor get pages of their own for it
    for case in json.loads(Path(sys.argv[1]).read_text()):
        began = time.monotonic()
        code = _in_child(case)
        output = Path(case["output"])
        if not output.exists():
            how = "hung" if code is None else f"ended with {code}"
            output.write_text(json.dumps({"error": f"the process {how}"}))
        print(f"{output.stem}: {time.monotonic() - began:.0f} s", flush=True)


def _in_child(case: dict[str, Any]) -> int | None:
    """Exit code of the child; None after a hang."""
    ended, written = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ended)
        os.setsid()
        log = os.open(case["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = 1
        try:
            answer = _answer(case)
            new = Path(case["output"]).with_suffix(".new")
            new.write_text(json.dumps(answer))
            new.rename(case["output"])
            code = 0
        finally:
            os._exit(code)
    os.close(written)
    if not select.select([ended], [], [], LIMIT_S)[0]:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _answer(case: dict[str, Any]) -> dict[str, Any]:
    import traceback

    try:
        return _compute(case)
    except Exception as error:
        traceback.print_exc()
        return {"error": _reason(error)}


def _reason(error: BaseException) -> str:
    """The first cause, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


def _compute(case: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities of the texts and greedy continuations of their beginnings."""
    from vllm import LLM, SamplingParams

    engine = {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "seed": 0,
        "kv_cache_memory_bytes": 64 << 20,  # pages are cleared, which takes as long as all the rest
    }
    texts = json.loads(Path(case["texts"]).read_text())
    llm = LLM(case["checkpoint"], **{**engine, **case.get("options", {})})
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


if __name__ == "__main__":
    main()
