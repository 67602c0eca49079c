"""Compare the shares of drafted tokens that two models accept. Each model's MTP head makes the drafts.

Both models get the same prompts and settings, and draft even where that saves no time. Each model drafts for the text
that it generates itself, so a model that repeats itself accepts more drafts. A higher share alone therefore does not
mean that a model is better.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quantkit.results import Comparison
from quantkit.results.statistics.comparison import ACCEPTANCE
from quantkit.runtime.llm import LLM
from quantkit.runtime.types import SamplingParams

PROMPT_TOKENS, NEW_TOKENS, MAX_PROMPTS = 64, 64, 32
Counts = tuple[list[int], list[int]]  # numbers of drafted and of accepted tokens, by position in a step
Side = tuple[Path, Mapping[str, Any]]  # directory of a model, and keywords of `LLM`


def check_heads(sides: tuple[Side, Side]) -> None:
    """Check, without reading weights, that both models can draft with an MTP head.

    Raises:
        RequestError: a model cannot draft with an MTP head.
    """
    for path, settings in sides:
        LLM(path, lazy=True, **{**settings, "speculate": "mtp"})


def compare_acceptance(sides: tuple[Side, Side], text: str, progress: Callable[[str], None]) -> tuple[Comparison, ...]:
    """Compare two models' shares of accepted drafts: of all drafts, then of the first, second, ... draft of a step.

    Args:
        sides: (directory, keywords of `LLM`) of the model and of the original.
        text: text whose beginning is split into at most `MAX_PROMPTS` prompts of `PROMPT_TOKENS` tokens.
        progress: callback for progress messages.
    Raises:
        RequestError: a model has no MTP head.
    """
    ids = LLM(sides[1][0], lazy=True).encode(text)[: PROMPT_TOKENS * MAX_PROMPTS]
    prompts = [ids[start : start + PROMPT_TOKENS] for start in range(0, len(ids), PROMPT_TOKENS)]
    progress(f"measuring the acceptance of drafts with {len(prompts)} prompts")
    (drafted, accepted), (before, kept) = (_count(path, settings, prompts) for path, settings in sides)
    rows = [("all", sum(before), sum(kept), sum(drafted), sum(accepted))]
    rows += [(f"position {n + 1}", *each) for n, each in enumerate(zip(before, kept, drafted, accepted, strict=True))]
    return tuple(_comparison(name, *counts) for name, *counts in rows if counts[0] and counts[2])


def _count(path: Path, settings: Mapping[str, Any], prompts: list[list[int]]) -> Counts:
    """Load a model, count its drafted and its accepted tokens by position in a step, and free the model."""
    llm = LLM(path, **{**settings, "speculate": "mtp", "force_speculation": True})
    llm.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
    controller = llm.engine.controller
    assert controller is not None, "speculation has a controller"
    return controller.drafted_at, controller.accepted_at


def _comparison(name: str, before: int, kept: int, drafted: int, accepted: int) -> Comparison:
    """Compare two models' shares of accepted drafts; a normal approximation gives the interval of the difference."""
    baseline, value = kept / before, accepted / drafted
    reach = 1.96 * (baseline * (1 - baseline) / before + value * (1 - value) / drafted) ** 0.5
    difference = value - baseline
    return Comparison(
        subject=f"{ACCEPTANCE}: {name}",
        metric="share",
        baseline=baseline,
        value=value,
        difference=difference,
        low=difference - reach,
        high=difference + reach,
        p_value=None,
        num_samples=drafted,
        verdict="no difference seen" if abs(difference) <= reach else "better" if difference > 0 else "worse",
        method="normal approximation, drafts taken as independent",
    )
