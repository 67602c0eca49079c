"""Compute the arguments with which a multimodal model calls its language model for sequences with images.

The model's own forward runs with the weights of everything before the decoder layers: towers, projectors, and the
embedding rows of the tokens that occur. The run ends when the language model is called, so it needs no decoder layer.
"""

import inspect
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import CheckpointError, ModelError, first_line
from quantkit.huggingface.experts import set_stored
from quantkit.huggingface.layer_call import moved
from quantkit.huggingface.layer_inputs import build_model
from quantkit.models.family import Family

# Arguments that are the same in every call, and that layers do not need when they run one by one.
_LEFT_OUT = ("use_cache", "return_dict", "output_attentions", "output_hidden_states", "labels")


class _Called(Exception):
    """Signal that the language model was called; holds its arguments by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageStem:
    """The part of a multimodal model before its language model.

    Args:
        model: the model, with the weights of this part on the device.
        family: family with the names of the model's parts.
        dtype, device: dtype and device of the weights.
        missing: names of this part's parameters that the checkpoint lacks.
    """

    model: nn.Module
    family: Family
    dtype: torch.dtype
    device: torch.device
    missing: tuple[str, ...]

    @classmethod
    def load(
        cls,
        reader: CheckpointReader,
        family: Family,
        token_ids: Iterable[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "ImageStem":
        """Build the model and read the weights before the language model.

        Args:
            reader: reader whose tensors have the model's names, see `load_rules.with_tower_names`.
            family: family of the model; it names the language model's modules.
            token_ids: all token ids that occur.
            dtype, device: dtype and device of the weights.
        Raises:
            CheckpointError: a weight contains NaN or infinity, or its shape differs from the model's.
        """
        model, missing = build_model(reader), []
        behind = tuple(f"{name}." for name in (family.layers, family.final_norm, family.head))
        tables = _tables(model, family)
        tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        used = torch.tensor(sorted({0, *token_ids, *_special_tokens(model)}))
        for name, value in model.state_dict(keep_vars=True).items():
            stored = name if name in reader else tied.get(name, name)
            if name.startswith(behind):
                continue
            if stored not in reader:
                missing.append(name)
                continue
            reader.check_shape(stored, tuple(value.shape))
            new = _rows(reader, stored, used, dtype) if name in tables else reader.tensor(stored)
            if new.is_floating_point() and name not in tables and not torch.isfinite(new).all():
                raise CheckpointError(
                    f"{reader.path}: tensor {name} holds NaN or infinite values; download the checkpoint again"
                )
            set_stored(model, name, new, dtype, device)
            if name in tables:
                owner = model.get_submodule(name.rpartition(".")[0])
                owner.register_forward_pre_hook(partial(_check_rows, used))
        for name, module in model.named_modules():
            if not f"{name}.".startswith(behind):
                for leaf, buffer in module._buffers.items():
                    module._buffers[leaf] = None if buffer is None else buffer.to(device)
        return cls(model=model, family=family, dtype=dtype, device=device, missing=tuple(missing))

    @torch.inference_mode()
    def inputs(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the arguments with which the model calls its language model for one sample.

        Args:
            sample: output of the model's processor for one text and its images.
        Returns:
            Arguments on the CPU, keyed by name, with `inputs_embeds` first.
        Raises:
            ModelError: the model cannot process the sample, or an argument cannot be saved.
        """
        given = tree_map_only(Tensor, lambda value: self._placed(value), dict(sample))
        backbone = self.model.get_submodule(self.family.backbone)
        hook = backbone.register_forward_pre_hook(_stop, with_kwargs=True)
        try:
            self.model(**given, use_cache=False)
        except _Called as call:
            arguments: dict[str, Any] = call.args[0]
        except Exception as error:  # a model may raise anything on inputs that it does not support
            raise ModelError(f"the model fails on a text with images: {self._reason(error)}") from error
        else:
            raise ModelError(
                "the model's forward does not call its language model for a text with images; use calibration data "
                "without images"
            )
        finally:
            hook.remove()
        return self._kept(arguments)

    def _placed(self, value: Tensor) -> Tensor:
        return value.to(self.device, self.dtype if value.is_floating_point() else value.dtype)

    def _kept(self, arguments: dict[str, Any]) -> dict[str, Any]:
        named = {name: value for name, value in arguments.items() if value is not None and name not in _LEFT_OUT}
        embeddings = named.pop("inputs_embeds", None)
        if not isinstance(embeddings, Tensor) or embeddings.is_meta:
            raise ModelError(f"the language model receives no image embeddings{self._reason(None)}")
        for name, value in named.items():
            _check_plain(value, name)
        kept: dict[str, Any] = moved({"inputs_embeds": embeddings, **named}, "cpu", copy=True)
        return kept

    def _reason(self, error: Exception | None) -> str:
        missing = f"; the checkpoint lacks {self.missing[0]}" if self.missing else ""
        return f"{'' if error is None else first_line(error)}{missing}"


def _stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    names = inspect.signature(module.forward).parameters
    raise _Called({**dict(zip(names, args, strict=False)), **kwargs})


def _check_plain(value: Any, name: str) -> None:
    """Raise ModelError unless a value is a nested structure of tensors and plain data, which can be saved."""
    items: Iterator[Any] = iter(())
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        items = iter(value.values())
    elif isinstance(value, (tuple, list)):
        items = iter(value)
    elif value is not None and not isinstance(value, (Tensor, bool, int, float, str)):
        raise ModelError(f"argument {name} of the language model is a {type(value).__name__}, which cannot be saved")
    for item in items:
        _check_plain(item, name)


def _tables(model: nn.Module, family: Family) -> set[str]:
    """Return the names of the language model's embedding tables. Only some rows of these tables are read."""
    modules = model.get_submodule(family.backbone).named_modules()
    return {f"{family.backbone}.{name}.weight" for name, module in modules if isinstance(module, nn.Embedding)}


def _special_tokens(model: Any) -> Iterator[int]:
    """Yield the ids of special tokens in config.json, such as the token that stands for an image."""
    for config in (model.config, model.config.get_text_config()):
        for name, value in vars(config).items():
            if name.endswith(("_token_id", "_token_index")) and type(value) is int and value >= 0:
                yield value


def _rows(reader: CheckpointReader, name: str, used: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an embedding table in which only the rows `used` are filled; the other rows take almost no memory."""
    shape = reader.info(name).shape
    pages = mmap.mmap(-1, max(1, math.prod(shape)) * dtype.itemsize)
    table = torch.frombuffer(pages, dtype=dtype)[: math.prod(shape)].view(shape)
    rows = used[used < shape[0]]
    table[rows] = reader.gather_rows(name, rows).to(dtype)
    return table


def _check_rows(used: Tensor, _: nn.Module, args: tuple[Any, ...]) -> None:
    unread = ~torch.isin(args[0].cpu(), used)
    if unread.any():
        raise ModelError(
            f"the model looks up token {int(args[0].cpu()[unread][0])}, which is not in the samples, so quantkit did "
            "not read its embedding"
        )
