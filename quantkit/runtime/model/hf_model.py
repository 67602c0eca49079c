"""Run any causal language model of transformers through the runtime's `Model` interface: slower, and not paged.

Each sequence has its own cache, which transformers fills. Sequences are computed one after another. If a sequence
continues before the end of its cache (after rejected drafts), the cache is cropped, or computed again if this kind of
cache cannot be cropped. Code that comes with a checkpoint is never run.

`Steps` describes how a model continues a sequence: with which cache, and with or without explicit positions. No
attribute of a model says how: some models keep only keys and values, some have their own cache class, some count
positions from zero in every step. `find_steps` therefore tries each way on a few tokens and takes the first way whose
logits equal those of a single pass over all tokens, up to rounding.
"""

import inspect
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import CheckpointError, ModelError, first_line
from quantkit.huggingface.layer_call import cache_argument
from quantkit.huggingface.layer_inputs import config_and_class
from quantkit.kernels.types import ForwardBatch
from quantkit.numerics.name_patterns import check_for_others
from quantkit.runtime.cache.kv_cache import KVCache
from quantkit.runtime.model.expected_tensors import check_memory
from quantkit.runtime.model.model import Model

# Layers whose state is keys and values by position, so that its end can be cut off.
_CROPPED = {"full_attention", "sliding_attention", "chunked_attention"}
_TRIED = range(2, 8)  # token ids of the trial
# Accepted relative error of logits: products of one token round differently from products of six.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """A way to compute the next tokens of a sequence.

    Args:
        cached: True = the model continues from a cache; False = it runs without one, so every step computes all tokens
            again; None = like False, but the model has no cache argument at all.
        argument: name of the cache argument, and of the output attribute that holds the cache.
        crops: whether the end of the cache can be removed.
        positions: whether the model receives the positions of the tokens.
        keeps_rows: whether the model can return only some rows of the logits.
    """

    cached: bool | None
    argument: str
    crops: bool
    positions: bool
    keeps_rows: bool

    def advance(self, model: Any, tokens: Tensor, past: int, cache: Any, keep: Tensor) -> tuple[Tensor, Any]:
        """Compute the logits of tokens that follow the first `past` tokens of a sequence.

        Args:
            model: a transformers model.
            tokens: (T,) int64.
            past: number of earlier tokens, which the cache holds.
            cache: the sequence's cache; None at its beginning.
            keep: (R,) indices of the tokens whose logits to return.
        Returns:
            Logits (R, V), and the cache that also holds these tokens.
        """
        options: dict[str, Any] = {"logits_to_keep": keep} if self.keeps_rows and len(keep) else {}
        if self.positions:
            options["position_ids"] = torch.arange(past, past + len(tokens), device=tokens.device)[None]
        if self.cached:
            if cache is None and self.crops:
                from transformers import DynamicCache

                # Without a config, every layer keeps all tokens, even layers with a window, so that all can be cropped.
                # A model whose cache cannot be cropped creates its cache itself, perhaps of its own class.
                cache = DynamicCache()
            options |= {self.argument: cache, "use_cache": True}
        elif self.cached is False:
            options["use_cache"] = False
        output = model(input_ids=tokens[None], **options)
        logits: Tensor = output.logits[0]
        state = output[self.argument] if self.cached else None
        return (logits if "logits_to_keep" in options else logits[keep]), state


@torch.inference_mode()
def find_steps(model: Any) -> Steps:
    """Return the first way of continuing a sequence whose logits equal those of a single pass.

    If no way with a cache gives equal logits, return the way without a cache.

    Args:
        model: a loaded transformers model in evaluation mode.
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
    """Return the relative error of logits that are computed in two steps, compared with those of a single pass.

    If `steps.crops`, other tokens are computed before the second step and then cropped from the cache.

    Args:
        steps: the way to continue the sequence.
        model: a loaded transformers model.
        tokens: (T,) tokens of the sequence.
        whole: (T, V) float32, logits of a single pass.
    """
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
    except Exception:  # whatever a model raises if it does not accept such a cache
        return torch.inf
    error: Tensor = (logits.float() - whole[first:]).norm() / whole[first:].norm()
    return float(error.nan_to_num(torch.inf))


# Tensors that older checkpoints hold besides weights: rotary frequencies, causal masks and their fill value.
_BUFFERS = re.compile(r"(.*\.)?(inv_freq|(attn|attention)\.(masked_)?bias)")


class TransformersModel(Model):
    """A model that transformers computes, with the runtime's interface.

    Args:
        model: a loaded transformers model in evaluation mode.
        max_length: maximum number of tokens of a sequence.
        eos_ids: tokens that end a sequence.
        notes: see `Model`.
    """

    paged = False

    def __init__(self, model: Any, max_length: int, eos_ids: tuple[int, ...], notes: tuple[str, ...]) -> None:
        self._steps: Steps = find_steps(model)
        if not self._steps.cached:
            notes = (
                *notes,
                "transformers cannot continue this model from a cache: every step computes all tokens again",
            )
        parameters = list({id(p): p for p in (*model.parameters(), *model.buffers())}.values())
        num_bytes = sum(parameter.nbytes for parameter in parameters)
        table = model.get_input_embeddings().weight
        head = model.get_output_embeddings()
        shared = head is not None and head.weight is table
        super().__init__(
            vocab_size=table.shape[0] if head is None else head.weight.shape[0],
            max_length=max_length,
            eos_ids=eos_ids,
            # A step looks up a few rows of the embedding; it reads the whole table only if the table is the head too.
            stored_bytes=num_bytes if shared else num_bytes - table.nbytes,
            num_bytes=num_bytes,
            dtype=table.dtype,
            device=table.device,
            notes=notes,
        )
        self._model = model
        self._states: dict[int, tuple[Any, list[int]]] = {}  # by sequence id: its cache, and its tokens so far

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVCache | None) -> Tensor:
        """See `Model`; `cache` is not used."""
        logit_rows, rows = batch.logit_rows.tolist(), []
        start = 0
        for sequence_id, count, context in zip(
            batch.sequence_ids, batch.query_lengths, batch.context_lengths, strict=True
        ):
            local = [row - start for row in logit_rows if start <= row < start + count]
            tokens = batch.token_ids[start : start + count]
            rows.append(self._advance(sequence_id, tokens, context - count, local))
            start += count
        return torch.cat(rows)

    def forget(self, sequence_id: int) -> None:
        """Drop the sequence's cache."""
        self._states.pop(sequence_id, None)

    def _advance(self, sequence_id: int, tokens: Tensor, past: int, rows: list[int]) -> Tensor:
        """Return the logits (len(rows), V) of one sequence's new tokens (T,), which follow `past` earlier tokens."""
        nothing: tuple[Any, list[int]] = (None, [])
        cache, known = self._states.get(sequence_id, nothing) if past else nothing
        assert len(known) >= past, f"sequence {sequence_id} continues at {past}, but has {len(known)} computed tokens"
        computed = len(known) if cache is not None else 0
        if computed > past and self._steps.crops:
            cache.crop(past - computed)  # negative: that many tokens less
            computed = past
        elif computed > past:
            cache, computed = None, 0
        known = known[:past] + tokens.tolist()
        skipped = past - computed  # recomputed tokens, whose logits nobody wants
        keep = torch.tensor([row + skipped for row in rows], dtype=torch.int64, device=self.device)
        inputs = torch.tensor(known[computed:], device=self.device)
        logits, cache = self._steps.advance(self._model, inputs, computed, cache, keep)
        self._states[sequence_id] = cache, known
        return logits.float()


def load_with_transformers(
    reader: CheckpointReader,
    *,
    dtype: torch.dtype,
    device: torch.device,
    eos_ids: tuple[int, ...],
    notes: tuple[str, ...] = (),
) -> TransformersModel:
    """Load a checkpoint with transformers.

    Args:
        reader: reader of the checkpoint.
        dtype, device: dtype and device of the computation.
        eos_ids, notes: see `Model`.
    Raises:
        ModelError: transformers cannot load the model.
        SchemeError: the quantization config has regular expressions that may keep transformers busy forever.
        CheckpointError: a weight is missing, does not belong to the model, or has the wrong shape.
        ResourceError: the model does not fit in memory.
    """
    check_memory(reader, dtype, device)
    check_for_others(reader.config)
    try:
        _, kind = config_and_class(reader)
        model, report = kind.from_pretrained(
            reader.path,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except Exception as error:  # whatever transformers raises if it cannot load the model
        raise ModelError(f"{reader.path}: transformers cannot load this model: {first_line(error)}") from error
    _check_report(reader, report)
    config = model.config.get_text_config()
    length = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if length is None:
        notes = (*notes, "config.json has no max_position_embeddings, so contexts are limited to 4096 tokens")
    try:
        return TransformersModel(model.to(device).eval(), length or 4096, eos_ids, notes)
    except Exception as error:  # whatever a model raises if it cannot compute a few tokens
        raise ModelError(
            f"{reader.path}: transformers loads this model, but cannot run it: {first_line(error)}"
        ) from error


def _check_report(reader: CheckpointReader, report: Mapping[str, Any]) -> None:
    """Refuse a checkpoint with missing, unused or wrongly shaped tensors.

    transformers only reports such tensors, and initialises missing ones randomly. The report does not contain tensors
    that transformers declares ignorable, such as speculation layers.
    """
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(
            f"{reader.path}: tensor {missing[0]} is missing ({len(missing)} in all); the download is incomplete, or "
            "config.json belongs to a different model"
        )
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, expected = mismatched[0]
        raise CheckpointError(
            f"{reader.path}: tensor {name} has shape {list(stored)} where transformers expects {list(expected)} "
            f"(tensors with a wrong shape: {len(mismatched)}); config.json belongs to a different model"
        )
    if unexpected := sorted(name for name in report["unexpected_keys"] if not _is_buffer(reader, name)):
        raise CheckpointError(
            f"{reader.path}: transformers would ignore tensor {unexpected[0]} ({len(unexpected)} in all) and compute a "
            "different model; use the config.json that belongs to these weights"
        )


def _is_buffer(reader: CheckpointReader, name: str) -> bool:
    """Whether a tensor is a buffer that the model computes itself.

    A buffer may be named `bias`, but a one-dimensional tensor of this name is a weight.
    """
    is_bias = name.endswith(".bias") and (name not in reader or len(reader.info(name).shape) == 1)
    return _BUFFERS.fullmatch(name) is not None and not is_bias
