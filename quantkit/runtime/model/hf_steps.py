"""How a transformers model continues a sequence: with which cache, and whether it is told the positions.

Nothing says which of its models keep keys and values alone, which have a cache of a class of their own, and which count
positions from zero again at every step: each way is tried on a few tokens, and the first that computes what the model
computes of all tokens at once is taken.
"""

import inspect
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.huggingface.layer_call import cache_argument

# Layers whose state is keys and values by position, so that its end can be cut off.
_CROPPED = {"full_attention", "sliding_attention", "chunked_attention"}
_TRIED = range(2, 8)  # token ids of the trial
# Relative error of logits: other products are taken of one token than of six.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """A way to compute the next tokens.

    Args:
        cached: the model takes a cache; None = it knows none; False: all tokens are computed again.
        argument: in which it takes it, and by which it gives it back.
        crops: the end of the cache can be cut off.
        positions: it is told the positions of the tokens.
        keeps_rows: it can be asked for some rows of the logits.
    """

    cached: bool | None
    argument: str
    crops: bool
    positions: bool
    keeps_rows: bool

    def advance(self, model: Any, tokens: Tensor, past: int, cache: Any, keep: Tensor) -> tuple[Tensor, Any]:
        """Compute tokens that follow on others.

        Args:
            model: of transformers.
            tokens: (T,) int64.
            past: tokens before them, which the cache holds.
            cache: None at the beginning.
            keep: (R,) rows of the T whose logits are wanted.
        Returns:
            logits (R, V), and the cache with these tokens.
        """
        options: dict[str, Any] = {"logits_to_keep": keep} if self.keeps_rows and len(keep) else {}
        if self.positions:
            options["position_ids"] = torch.arange(past, past + len(tokens), device=tokens.device)[None]
        if self.cached:
            # A model that can have nothing cut off makes its cache itself, which may be of a class of its own.
            options |= {self.argument: _croppable() if cache is None and self.crops else cache, "use_cache": True}
        elif self.cached is False:
            options["use_cache"] = False
        output = model(input_ids=tokens[None], **options)
        logits: Tensor = output.logits[0]
        state = output[self.argument] if self.cached else None
        return (logits if "logits_to_keep" in options else logits[keep]), state


@torch.inference_mode()
def find_steps(model: Any) -> Steps:
    """The first way that computes what the model computes of all tokens at once; without a cache if there is none.

    Args:
        model: of transformers, loaded, in evaluation mode.
    """
    accepted = inspect.signature(model.forward).parameters
    positions = (True, False) if "position_ids" in accepted else (False,)
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    crops = (True, False) if not getattr(model, "_is_stateful", False) and kinds <= _CROPPED else (False,)
    keeps_rows = "logits_to_keep" in accepted
    argument = cache_argument(model.forward)
    known: dict[str, Any] = {"argument": argument or "", "keeps_rows": keeps_rows}
    plain = Steps(cached=False if argument else None, crops=False, positions=False, **known)
    if argument:
        tokens = torch.tensor(_TRIED, device=model.device)
        whole = plain.advance(model, tokens, 0, None, tokens - _TRIED[0])[0].float()
        for positioned, cut in itertools.product(positions, crops):
            steps = Steps(cached=True, crops=cut, positions=positioned, **known)
            if _error(steps, model, tokens, whole) <= _TOLERANCE.get(model.dtype, 0.1):
                return steps
    return plain


def _error(steps: Steps, model: Any, tokens: Tensor, whole: Tensor) -> float:
    """Relative error of logits computed in two steps, the second of them twice if the cache can be cropped."""
    first = len(tokens) - 2
    keep = torch.arange(2, device=tokens.device)
    try:
        _, cache = steps.advance(model, tokens[:first], 0, None, keep)
        if cache is None:
            return torch.inf
        if steps.crops:
            steps.advance(model, tokens[first:].flip(0), first, cache, keep)
            cache.crop(-2)
        logits, _ = steps.advance(model, tokens[first:], first, cache, keep)
    except Exception:  # whatever a model raises that takes no such cache
        return torch.inf
    error: Tensor = (logits.float() - whole[first:]).norm() / whole[first:].norm()
    return float(error.nan_to_num(torch.inf))


def _croppable() -> Any:
    from transformers import DynamicCache

    # Without a config every layer keeps all tokens, those with a window too, so that each can be cropped.
    return DynamicCache()
