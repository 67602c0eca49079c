"""A vLLM for machines without one: the part of its interface that is used, over quantkit's own engine."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

from quantkit.runtime.llm import LLM
from quantkit.runtime.types import SamplingParams

LOADED: list[dict] = []
"""Arguments of every engine that was loaded, and whether it is closed."""


class FakeParams(SimpleNamespace):
    """What vLLM is asked, unchecked."""

    def __getattr__(self, name):
        return None


class FakeLLM:
    def __init__(self, model, **arguments):
        if arguments.get("quantization") == "nonsense":
            raise ValueError("Unknown quantization method: nonsense.\nMust be one of ...")
        dtype = arguments.get("dtype", "auto")
        self._llm = LLM(model, dtype=dtype, threads=1)
        self.record = {"model": model, **arguments, "closed": False}
        LOADED.append(self.record)
        config = SimpleNamespace(
            model_config=SimpleNamespace(
                max_model_len=arguments.get("max_model_len", self._llm.capacity),
                get_vocab_size=lambda: self._llm.vocab_size,
                dtype=self._llm.model.dtype,
            ),
            cache_config=SimpleNamespace(cache_dtype=arguments.get("kv_cache_dtype", "auto")),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
        )
        core = SimpleNamespace(shutdown=lambda: self.record.update(closed=True))
        self.llm_engine = SimpleNamespace(vllm_config=config, engine_core=core, add_request=self._add, step=self._step)
        self._names: dict[int, str] = {}

    def _add(self, name, prompt, params):
        if len(prompt["prompt_token_ids"]) > self.llm_engine.vllm_config.model_config.max_model_len:
            raise ValueError("The prompt is longer than the maximum model length.")
        asked = SamplingParams(max_tokens=params.max_tokens, ignore_eos=params.ignore_eos, stop=params.stop)
        self._names[self._llm.engine.add(prompt["prompt_token_ids"], asked)] = f"{name}-inner"
        return f"{name}-inner"

    def _step(self):
        return [
            SimpleNamespace(
                request_id=self._names[out.request_id],
                finished=out.completion is not None,
                outputs=[
                    SimpleNamespace(
                        token_ids=list(out.token_ids),
                        text=out.text,
                        finish_reason=out.completion and out.completion.finish_reason,
                    )
                ],
            )
            for out in self._llm.engine.step()
        ]

    def generate(self, inputs, params, use_tqdm):
        prompts = [one["prompt_token_ids"] for one in inputs]
        return [
            self._scored(ids, rows.log_softmax(-1), params.prompt_logprobs)
            for ids, rows in zip(prompts, self._llm.score(prompts), strict=True)
        ]

    def _scored(self, ids, rows, count):
        values, tokens = (part.tolist() for part in rows.sort(-1, descending=True))

        def row(position, chosen):
            ranks = [*([] if chosen is None else [tokens[position].index(chosen)]), *range(count)]
            return {
                tokens[position][rank]: SimpleNamespace(logprob=values[position][rank], rank=rank + 1) for rank in ranks
            }

        prompt = [None, *(row(at, token) for at, token in enumerate(ids[1:]))]
        return SimpleNamespace(prompt_logprobs=prompt, outputs=[SimpleNamespace(logprobs=[row(len(ids) - 1, None)])])


def install(monkeypatch) -> None:
    """Put it where `import vllm` looks."""
    LOADED.clear()
    vllm = ModuleType("vllm")
    vllm.__version__, vllm.LLM, vllm.SamplingParams = "0.0", FakeLLM, FakeParams
    vllm.sampling_params = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta"))
    state = ModuleType("vllm.distributed.parallel_state")
    state.cleanup_dist_env_and_memory = lambda: None
    for name, module in {
        "vllm": vllm,
        "vllm.distributed": ModuleType("vllm.distributed"),
        state.__name__: state,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
