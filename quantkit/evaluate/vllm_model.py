"""lm-eval's own model class for vLLM, over an engine that is loaded already. What is here needs lm-eval and vLLM."""

import importlib.metadata
from typing import Any
from unittest.mock import patch

from quantkit.runtime.vllm_engine import VllmLLM, import_vllm


def make_vllm_model(llm: VllmLLM, *, add_bos_token: bool | None) -> Any:
    """What lm-eval asks; texts, tokens and truncation are its own.

    Args:
        llm: answers.
        add_bos_token: whether texts begin with BOS; None = as the tokenizer does.
    """
    known = importlib.metadata.version
    number = import_vllm().__version__
    # The module asks for the version of a package called vllm; builds for CPUs have other names.
    with patch("importlib.metadata.version", lambda name: number if name == "vllm" else known(name)):
        from lm_eval.models import vllm_causallms
    # Its class loads an engine of its own, and two do not fit beside each other on a GPU.
    with patch.object(vllm_causallms, "LLM", lambda **_: llm.vllm):
        model = vllm_causallms.VLLM(str(llm.path), add_bos_token=add_bos_token)
    # Not "auto": then it lets vLLM draw its bars, and progress is told by ours.
    model.batch_size = llm.config.scheduler_config.max_num_seqs
    return model
