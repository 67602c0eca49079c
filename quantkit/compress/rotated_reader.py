"""Read a checkpoint as an equivalent model whose residual stream is rotated, so that outliers spread over all channels.

Norm weights are folded into the linears that follow. Then the hidden states h become h Q, where Q is a random
orthogonal matrix. Weights that write to the residual stream (embedding, attention output, down) are multiplied by Q.
Weights that read the residual stream (q, k, v, gate, up, head) are multiplied by Q too, which cancels the rotation.
Value heads can be rotated too; the output projection then undoes their rotation. Tensors are rotated when they are
read; embedding and head are rotated a few rows at a time. An output head that was tied to the embedding gets its own
weights. Queries, keys and the inside of the MLP are not rotated: weights cannot absorb these rotations, so the runtime
would have to compute them.
Source: Ashkboos et al. 2024, QuaRot; Liu et al. 2024, SpinQuant (R1 and R2).
Shapes: D hidden width, N outputs, K inputs, d head width.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoints.model_reader import ModelReader
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import ModelError
from quantkit.models.description import describe
from quantkit.models.family import Family
from quantkit.numerics.hadamard import Rotation, random_rotation


class RotatedReader(ModelReader):
    """Reader that returns the tensors of a checkpoint's rotated model; see the module's docstring.

    Args:
        source: reader of the checkpoint.
        family: family of the model.
        seed: seed of the random rotations.
        heads: whether to rotate value heads too.
    Raises:
        ModelError: this model cannot be rotated; the message says why.
    """

    def __init__(self, source: CheckpointReader, family: Family, *, seed: int, heads: bool) -> None:
        self._share(source)  # the files of `source` are already open and checked
        self._view(family)
        self._head = f"{family.stored_head or family.head}.weight"
        self._embedding, self._final_norm = f"{family.embedding}.weight", f"{family.final_norm}.weight"
        parts = family.parts
        self._readers = {**dict.fromkeys(parts.qkv, parts.input_norm), **dict.fromkeys(parts.up, parts.mlp_norm)}
        self._check(source.path)
        self._tied = self._head not in self._tensors
        if self._tied:
            # The head cannot stay tied: the final norm is folded into the head but not into the embedding.
            self._tensors[self._head] = self._tensors[self._embedding]
            self.names = tuple(sorted(self._tensors))
            self.config = {**self.config, "tie_word_embeddings": False}
            size = self.info(self._head).num_bytes / 1e6
            note = f"the output head shares the embedding's weights, but needs its own once rotated: {size:.1f} MB more"
            self.notes = (*self.notes, note)
        self._stream = random_rotation(self.info(self._embedding).shape[1], seed)
        rotates_heads = heads and len(parts.qkv) == 3
        self._heads = random_rotation(self._head_width(), seed + 1) if rotates_heads else None

    def tensor(self, name: str) -> Tensor:
        if name in (self._embedding, self._head):
            return self.rows(name, 0, self.info(name).shape[0])
        value = super().tensor(name)
        # In float32, so that the result is rounded only once, at the end.
        return self._rotated(name, value.float()).to(value.dtype)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        if name not in (self._embedding, self._head):
            return self.tensor(name)[start:stop].clone()
        value = super().rows(self._embedding if self._tied else name, start, stop)
        scaled = value.float() if name == self._embedding else value.float() * self._norm(self._final_norm)
        return self._stream.apply(scaled).to(value.dtype)

    def gather_rows(self, name: str, indices: Tensor) -> Tensor:
        """See `CheckpointReader.gather_rows`; only rows of the embedding can be read."""
        assert name == self._embedding, "only rows of the embedding can be gathered"
        value = super().gather_rows(name, indices)
        return self._stream.apply(value.float().view(-1, value.shape[-1])).view(value.shape).to(value.dtype)

    def chunks(self, name: str, size: int = 1 << 22) -> Iterator[bytes | memoryview]:
        shape, width = self.info(name).shape, self.info(name).num_bytes // self.info(name).shape[0]
        step = max(1, size // width) if name in (self._embedding, self._head) else shape[0]
        for start in range(0, shape[0], step):
            block = self.rows(name, start, min(start + step, shape[0]))
            yield block.view(-1).view(torch.uint8).numpy().tobytes()

    def _rotated(self, name: str, value: Tensor) -> Tensor:
        """Return a tensor of the rotated model, given the same tensor of the original model, float32 (N, K) or (N,)."""
        names, parts = self.family, self.family.parts
        match = re.match(rf"({re.escape(names.layers)}\.\d+\.)(.+)\.(weight|bias)$", name)
        if match is None:
            # A folded norm has a weight of one, minus the offset that the family adds to norm weights.
            return torch.full_like(value, 1 - names.norm_offset) if name == self._final_norm else value
        prefix, module, kind = match.groups()
        if module in (parts.input_norm, parts.mlp_norm):
            return torch.full_like(value, 1 - names.norm_offset)
        if module in self._readers and kind == "weight":
            # Multiply by the norm's weight first: it cannot be folded in once the channels are mixed.
            value = self._stream.apply(value * self._norm(f"{prefix}{self._readers[module]}.weight"))
        if self._heads is not None and module == parts.qkv[-1]:
            value = _outputs(self._heads, value)
        if module in (parts.output, parts.down):
            if self._heads is not None and module == parts.output and kind == "weight":
                value = self._heads.apply_blocks(value)
            value = _outputs(self._stream, value)
        return value.contiguous()

    def _norm(self, name: str) -> Tensor:
        return super().tensor(name).float() + self.family.norm_offset

    def _head_width(self) -> int:
        """Return the width of a value head from config.json, checked against the first layer."""
        width = describe(self.config, self.family, f"{self.path}/config.json").head_dim
        name = f"{self.family.layers}.0.{self.family.parts.qkv[-1]}.weight"
        if name in self._tensors and self.info(name).shape[0] % width:
            raise ModelError(
                f"{self.path}: {name} has {self.info(name).shape[0]} rows, not a multiple of the head width {width} "
                "in config.json; correct config.json"
            )
        return width

    def _check(self, path: Path | str) -> None:
        """Raise ModelError if quantkit cannot rotate this model without changing its outputs."""
        names, parts = self.family, self.family.parts
        parallel = self.config.get(names.parallel) if isinstance(names.parallel, str) else names.parallel
        reason = None
        if names.norm != "rms":
            reason = "its norms subtract the mean"
        elif parts.attention_norm or parts.output_norm or not parts.input_norm or not parts.mlp_norm:
            reason = "it has a norm between a linear and the residual stream"
        elif parallel or names.experts is not None:
            reason = "its attention and MLP run in parallel" if parallel else "it has experts"
        else:
            known = {*self._readers, parts.input_norm, parts.mlp_norm, parts.output, parts.down}
            if names.qk_norm is not None:
                known |= {names.qk_norm.query, names.qk_norm.key}
            layer = re.compile(rf"{re.escape(names.layers)}\.\d+\.(.+)\.(weight|bias)$")
            outside = (self._embedding, self._head, self._final_norm)
            for name in self.names:
                match = layer.match(name)
                if name not in outside and (match is None or match.group(1) not in known):
                    reason = f"quantkit does not know how {name} uses the residual stream"
                    break
        if reason is not None:
            raise ModelError(f"{path}: the step rotate does not support this model: {reason}; remove rotate from steps")


def _outputs(rotation: Rotation, value: Tensor) -> Tensor:
    """Rotate the output channels of a weight (N, K) or bias (N,), in blocks of the rotation's width."""
    return rotation.apply_blocks(value.view(len(value), -1).T.contiguous()).T.reshape(value.shape)
