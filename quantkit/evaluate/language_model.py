"""Adapter from lm-eval's `LM` interface to the engine, with prefix sharing and continuous batching.

The adapter behaves like lm-eval's `HFLM` for decoder-only models: it produces the same tokens, truncates texts from
the left and ends answers in the same way. Trailing spaces of a context belong to the continuation, and BOS is added if
the tokenizer or `add_bos_token` says so. Module `lm_eval_run` runs tasks. Importing this module needs lm-eval, which
the extra `eval` installs.

    lm_eval --model quantkit --model_args pretrained=OUT,kv_cache=int8 --tasks hellaswag
"""

import importlib.metadata
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from quantkit.checkpoints.tokenizer import render_chat
from quantkit.errors import RequestError, first_line
from quantkit.evaluate.loading import load_llm
from quantkit.evaluate.work_sharing import generate_in_turns, score_in_turns
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import PromptScores, SamplingParams, ScoredText
from quantkit.runtime.vllm_engine import VllmLLM, import_vllm

DEFAULT_NEW_TOKENS = 256  # as HFLM

Tokens = list[int]
Encoded = tuple[tuple[str, str], Tokens, Tokens]
Answer = TypeVar("Answer")


class QuantkitLM(TemplateLM):  # type: ignore[misc]  # lm-eval is untyped
    """A model in quantkit's engine, with the interface that lm-eval needs.

    Args:
        pretrained: directory, hub id or a loaded `LLM`; None = the demo model.
        batch_size: maximum number of concurrent sequences; None, "auto" and lm-eval's default of 1 let the engine
            choose, because it does not pad and gains nothing from a smaller number.
        max_batch_size: ignored; the engine's limits apply.
        add_bos_token: whether texts begin with BOS; None = as the tokenizer does.
        prefix_token_id: token that precedes a text without context; None = BOS, or EOS if there is no BOS.
        chat_template_args: further variables of the chat template.
        settings: keywords of `LLM`: dtype, device, kv_cache, max_length, threads, ...
    Raises:
        QuantkitError: `LLM` cannot load the model, or the model has no tokenizer.
    """

    backend = "causal"

    def __init__(
        self,
        pretrained: str | LLM | None = None,
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if isinstance(pretrained, LLM):
            self.llm = pretrained
        else:
            settings["device"] = _device(settings.get("device"))
            count = None if batch_size in (None, "auto", 1, "1") else int(str(batch_size).removeprefix("auto:"))
            self.llm = load_llm(pretrained, **({"max_sequences": count, **settings} if count else settings))
        if self.llm.tokenizer is None:
            raise RequestError(
                f"{self.llm.path} has no usable tokenizer, which tasks need; copy the original's tokenizer there"
            )
        self.tokenizer = self.llm.tokenizer
        self.add_bos_token = add_bos_token
        self.batch_size = self.llm.engine.config.max_sequences
        self.say: Callable[[str], None] | None = None  # callback for progress
        self._prefix_token_id = prefix_token_id
        self._chat_template_args = chat_template_args or {}
        self._device = self.llm.device

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Token that precedes a text without context."""
        for token in (self._prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise RequestError(f"{self.llm.path}: the tokenizer has neither BOS nor EOS; give prefix_token_id")

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in a sequence."""
        return self.llm.engine.capacity

    @property
    def max_gen_toks(self) -> int:
        """Default number of tokens to generate."""
        return DEFAULT_NEW_TOKENS

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for lm-eval's caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Format a conversation as one text with the model's chat template.

        Raises:
            RequestError: the template fails, or exceeds the limits of time or memory.
        """
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
            **self._chat_template_args,
        }
        try:
            return render_chat(self.tokenizer, chat_history, **options)
        except Exception as error:  # templates raise whatever their author chose
            raise RequestError(f"the chat template refuses these messages: {first_line(error)}") from error

    def get_model_info(self) -> dict[str, Any]:
        """Return the dtype, the size and the KV cache type of the model, which lm-eval records with its results."""
        model = self.llm.model
        return {"model_dtype": str(model.dtype), "model_bytes": model.num_bytes, "kv_cache": self.llm.kv_type}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> Tokens:
        """Return the token ids of a text; BOS is not added to a text that already begins with it."""
        if add_special_tokens is None:
            begins = string.startswith(self.tokenizer.decode(self.prefix_token_id))
            add_special_tokens = False if begins else self.add_bos_token
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer(string, verbose=False, **options)["input_ids"])

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether greedy decoding would generate it.

        Raises:
            RequestError: a request has neither a context nor a continuation.
        """
        if any(not any(request.args) for request in requests):
            raise RequestError("a request has neither a context nor a continuation; give at least one token of each")
        return list(super().loglikelihood(requests, disable_tqdm))

    def _loglikelihood_tokens(self, requests: list[Encoded], **_: Any) -> list[tuple[float, bool]]:
        scores = self._score([(context, continuation) for _, context, continuation in requests])
        answers = [(float(score.logprobs.sum()), bool(score.greedy.all())) for score in scores]
        return self._remembered("loglikelihood", [pair for pair, _, _ in requests], answers)

    def _remembered(self, kind: str, arguments: Sequence[tuple[Any, ...]], answers: list[Answer]) -> list[Answer]:
        """Pass answers to lm-eval's cache and return them."""
        for argument, answer in zip(arguments, answers, strict=True):
            self.cache_hook.add_partial(kind, argument, answer)
        return answers

    def _score(self, pairs: Iterable[tuple[Tokens, Tokens]]) -> list[PromptScores]:
        """Score continuations; sequences that are too long are truncated from the left."""
        texts = []
        for context, continuation in pairs:
            if not context or not continuation:
                raise RequestError(
                    f"a request has {len(context)} tokens of context and {len(continuation)} of continuation; "
                    "both need at least one token"
                )
            if len(continuation) > self.max_length:
                raise RequestError(
                    f"a request has a continuation of {len(continuation)} tokens, but the model's context is "
                    f"{self.max_length} tokens; use a model with a longer context"
                )
            # One token more than the context holds: the last one is scored but never read.
            ids = (context + continuation)[-(self.max_length + 1) :]
            texts.append(ScoredText(ids=tuple(ids), num_scored=len(continuation)))
        return score_in_turns(self.llm, texts, say=self.say)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, computed in windows that score every token once."""
        windows = [self._windows(self.tok_encode(request.args[0])) for request in requests]
        scores = iter(self._score([pair for group in windows for pair in group]))
        answers = [sum(float(next(scores).logprobs.sum()) for _ in group) for group in windows]
        return self._remembered("loglikelihood_rolling", [request.args[:1] for request in requests], answers)

    def _windows(self, ids: Tokens) -> list[tuple[Tokens, Tokens]]:
        # As HFLM: windows are disjoint, except for the one token that each is conditioned on.
        rolling = get_rolling_token_windows(
            token_list=ids, prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1
        )
        return [make_disjoint_window(window) for window in rolling]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate a text for each request, and cut it before the first stop text."""
        generations = [_Generation(dict(request.args[1]), self) for request in requests]
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        # As HFLM, truncate from the left, because the question is at the end of a prompt.
        kept = [ids[-(self.max_length - each.max_tokens) :] for ids, each in zip(prompts, generations, strict=True)]
        completions = generate_in_turns(self.llm, kept, [each.params for each in generations], say=self.say)
        texts = [self.tokenizer.decode(each.token_ids, skip_special_tokens=True) for each in completions]
        answers = [each.cut(text) for each, text in zip(generations, texts, strict=True)]
        return self._remembered("generate_until", [request.args for request in requests], answers)


def _device(name: str | None) -> str | None:
    """Return the device to use: "cpu" instead of a GPU, such as lm-eval's default cuda:0, if no GPU is available."""
    if name is not None and str(name).startswith("cuda") and not torch.cuda.is_available():
        logging.getLogger("lm_eval").warning("device %s is not available; computing on the CPU", name)
        return "cpu"
    return name


class _Generation:
    """Generation options of one task, converted to sampling parameters."""

    def __init__(self, options: dict[str, Any], model: QuantkitLM) -> None:
        given: Any = normalize_gen_kwargs(options, model.max_gen_toks)
        self.max_tokens: int = given["max_gen_toks"]
        if self.max_tokens >= model.max_length:
            raise RequestError(
                f"the task generates {self.max_tokens} tokens, but the model's context is {model.max_length} tokens; "
                "lower max_gen_toks in the task's generation_kwargs, or with lm-eval's --gen_kwargs max_gen_toks=..."
            )
        temperature = float(given.get("temperature", 0.0)) if given["do_sample"] else 0.0
        drawn = ("top_p", "top_k", "min_p", "seed") if temperature > 0 else ()
        self.params = SamplingParams(
            max_tokens=self.max_tokens,
            temperature=temperature,
            repetition_penalty=float(given.get("repetition_penalty") or 1.0),
            stop=tuple(filter(None, given["until"])),
            **{name: given[name] for name in drawn if given.get(name) is not None},
        )
        # As with HFLM, the text of EOS ends an answer too; the engine itself stops at the token.
        self.stops = handle_stop_sequences(given["until"], eos=model.tokenizer.decode(model.eot_token_id))

    def cut(self, text: str) -> str:
        """Return the text before the first stop text."""
        return str(postprocess_generated_text(text, self.stops, None))


def make_vllm_model(llm: VllmLLM, *, add_bos_token: bool | None) -> Any:
    """Wrap a loaded vLLM model in lm-eval's own model class, which does tokenization and truncation.

    Args:
        llm: the loaded model.
        add_bos_token: whether texts begin with BOS; None = as the tokenizer does.
    """
    known = importlib.metadata.version
    number = import_vllm().__version__
    # lm-eval's module asks for the version of the package `vllm`; builds for CPUs have other names.
    with patch("importlib.metadata.version", lambda name: number if name == "vllm" else known(name)):
        from lm_eval.models import vllm_causallms
    # lm-eval's class would load a second engine, and two do not fit on a GPU.
    with patch.object(vllm_causallms, "LLM", lambda **_: llm.vllm):
        model = vllm_causallms.VLLM(str(llm.path), add_bos_token=add_bos_token)
    # Not "auto", with which lm-eval lets vLLM draw its own progress bars.
    model.batch_size = llm.config.scheduler_config.max_num_seqs
    return model
