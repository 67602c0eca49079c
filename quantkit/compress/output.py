"""The files of a compressed checkpoint: each shard is read back when it is written, and config.json as loaders read it.

What `quantize` and `convert` share. Not the work folder and the final name, see `checkpoints.staging`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoints.folder import CONFIG_NAME
from quantkit.checkpoints.header import read_header
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.checkpoints.writer import write_index, write_json, write_shard
from quantkit.errors import AuditError
from quantkit.formats.base import Format
from quantkit.numerics.scheme import LinearScheme
from quantkit.numerics.tensor import QuantizedTensor


class Shard:
    """One safetensors file in the making.

    Args:
        format_: of the quantized linears in it.
    Attributes:
        tensors: by the names that the model's modules have.
    """

    def __init__(self, format_: Format) -> None:
        self._format = format_
        self._linears: dict[str, tuple[QuantizedTensor, LinearScheme, tuple[str, ...]]] = {}
        self.tensors: dict[str, Tensor] = {}

    def add_linear(
        self, module: str, weight: QuantizedTensor, scheme: LinearScheme, encoded: Mapping[str, Tensor]
    ) -> None:
        """Take in a quantized linear.

        Args:
            module: its full name.
            weight: what the file must read back as.
            scheme: of the linear.
            encoded: its tensors, by local name.
        """
        self._linears[module] = weight, scheme, tuple(encoded)
        self.tensors |= {f"{module}.{local}": tensor.cpu() for local, tensor in encoded.items()}

    def write(
        self,
        path: Path,
        layout: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
        read: Callable[[Path], CheckpointReader] = CheckpointReader.of_file,
    ) -> tuple[str, list[str]]:
        """Write the file, read it back and compare.

        Args:
            path: of the file.
            layout: what tensors are stored as.
            read: the inverse: the file with the tensors by the names that they have here.
        Returns:
            SHA-256 of the file, and the names of the tensors in it.
        Raises:
            AuditError: it does not hold what it should.
        """
        stored = layout(self.tensors)
        digest = write_shard(path, stored)
        self.check(read(path))
        return digest, sorted(stored)

    def check(self, reader: CheckpointReader) -> None:
        """Bits in the file are those in memory, and these decode to the codes that calibration computed with.

        Raises:
            AuditError: names the tensor.
        """
        for name, tensor in self.tensors.items():
            if not _same_bits(reader.tensor(name), tensor):
                raise AuditError(f"{name} in {reader.files[0].name} differs from what was written")
        for module, (weight, scheme, names) in self._linears.items() if self._format.keeps_codes else ():
            encoded = {local: self.tensors[f"{module}.{local}"] for local in names}
            check_equal(module, self._format.decode(encoded, scheme), weight)


def check_equal(module: str, decoded: QuantizedTensor, expected: QuantizedTensor) -> None:
    """Codes, scales, zero points and group order are the same, bit for bit.

    Raises:
        AuditError: names what differs.
    """
    for field in ("codes", "scale", "zero_point", "group_index", "input_scale"):
        left, right = getattr(decoded, field), getattr(expected, field)
        if (left is None) != (right is None) or (left is not None and not _same_bits(left, right)):
            raise AuditError(f"{module}: {field} read back from the output differs from what was to be written")


def write_rest(folder: Path, source: CheckpointReader, weight_map: Mapping[str, str], config: dict[str, Any]) -> int:
    """Write everything but the shards.

    Args:
        folder: with all shards.
        source: whose tokenizer, licence and the like are copied.
        weight_map: file name by tensor name.
        config: contents of config.json.
    Returns:
        bytes of all tensors.
    """
    files = sorted(set(weight_map.values()))
    size: int = sum(info.num_bytes for name in files for info in read_header(folder / name).values())
    write_index(folder, weight_map, size)
    write_json(folder / CONFIG_NAME, config)
    for path in source.metadata_files():
        shutil.copyfile(path, folder / path.name)
    return size


def check_config(
    format_: Format, config: Mapping[str, Any], linears: Mapping[str, LinearScheme], ignored: Iterable[str]
) -> None:
    """The config as a loader will read it gives each linear the scheme that it was quantized with.

    Args:
        format_: of the checkpoint.
        config: contents of its config.json.
        linears: scheme of each quantized linear by full name.
        ignored: full names of the others.
    Raises:
        AuditError: names the linear.
    """
    scheme = format_.recognise(config)
    if scheme is None:
        if format_.keeps_codes and linears:
            raise AuditError("config.json does not describe the format it was written in")
        return
    for name, linear in linears.items():
        if scheme.find(name) != linear:
            raise AuditError(f"config.json describes {name} differently from how it was quantized")
    for name in ignored:
        if scheme.find(name) is not None:
            raise AuditError(f"config.json does not leave {name} alone")


def _same_bits(left: Tensor, right: Tensor) -> bool:
    """Also where values are not equal to themselves."""
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(_bytes(left), _bytes(right))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)
