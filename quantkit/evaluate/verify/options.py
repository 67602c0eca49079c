"""Options of a verification, and checks that need no model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quantkit.benchmark.options import BenchmarkOptions
from quantkit.errors import RequestError
from quantkit.evaluate.drift import LEAST_TOKENS
from quantkit.evaluate.lm_eval_run import import_language_model
from quantkit.evaluate.options import EvaluationOptions
from quantkit.evaluate.run import check_evaluation
from quantkit.evaluate.tasks import read_named_text
from quantkit.runtime.vllm_engine import import_vllm, vllm_arguments

BENCH = BenchmarkOptions(concurrencies=(1, 8), prompt_tokens=128, new_tokens=32, rounds=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions:
    """Options of a verification.

    Args:
        evaluation: tasks and texts for both models.
        text: name of the text on which distributions are compared; None = the first text of the evaluation, or a
            shipped text.
        noise: whether to run the original in another dtype too, to measure noise.
        bench: workloads to time; None = time nothing.
        sensitivity: whether to make a sensitivity map; None = only if an accuracy gate fails.
        drift: number of tokens over which drift is measured, see `quantkit.evaluate.drift`; None = do not measure it.
        engine: keywords of `LLM` for both models; KV cache, KV budget, head and speculation apply only to the
            checkpoint.
        vllm: vLLM's own settings, to run both models in vLLM; None = use quantkit's engine.
        command: command line, for the record.
    """

    evaluation: EvaluationOptions = field(default_factory=lambda: EvaluationOptions(suite="quick"))
    text: str | None = None
    noise: bool = True
    bench: BenchmarkOptions | None = BENCH
    sensitivity: bool | None = None
    drift: int | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    vllm: Mapping[str, Any] | None = None
    command: str = ""


def check_options(options: VerifyOptions) -> None:
    """Check everything that can be checked before a model is compressed or loaded.

    Raises:
        DataError: lm-eval is missing, or a suite or text does not exist.
        InputError: vLLM is missing.
        RequestError: drift is requested over too few tokens; or vLLM is requested together with a sensitivity map, with
            drift or with an engine setting that it lacks.
    """
    check_evaluation(options.evaluation)
    if options.drift is not None and options.drift < LEAST_TOKENS:
        raise RequestError(
            f"drift over {options.drift} tokens cannot be measured: give --drift at least {LEAST_TOKENS} tokens"
        )
    if options.text is not None:
        read_named_text(options.text, options.evaluation.data)
    if options.evaluation.suite is not None or options.evaluation.tasks:
        import_language_model()
    if options.vllm is not None:
        vllm_arguments(options.engine)
        import_vllm()
        for what, asked, option in (
            ("make the sensitivity map", options.sensitivity, "--sensitivity"),
            ("measure drift", options.drift, "--drift"),
        ):
            if asked:
                raise RequestError(f"only quantkit's engine can {what}; leave out {option} or --engine")
