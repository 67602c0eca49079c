"""Files of a compressed checkpoint, each shard read back as soon as it is written: for `quantize` and `convert`.

Not the work folder and the final name, see `output.staging`; nor what a format demands, see `formats`.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.checkpoints.folder import CONFIG_NAME, metadata_files
from quantkit.checkpoints.header import read_header
from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import AuditError
from quantkit.formats.base import Format, identical
from quantkit.numerics.scheme import LinearScheme
from quantkit.numerics.tensor import QuantizedTensor
from quantkit.output.writer import write_index, write_json, write_shard


class Shard:
    """One safetensors file in the making.

    Args:
        format_: of the quantized linears in it.
    Attributes:
        tensors: by the names that the model's modules have.
    """

    def __init__(self, format_: Format) -> None:
        self._format = format_
        self.tensors: dict[str, Tensor] = {}

    def add_linear(self, module: str, weight: QuantizedTensor, scheme: LinearScheme) -> int:
        """Take in a quantized linear, of which only what it is stored as is kept.

        Args:
            module: its full name.
            weight: what the file must read back as.
            scheme: of the linear.
        Returns:
            bytes of the tensors that it is stored as, without one that only says its shape.
        Raises:
            AuditError: these do not decode to the numbers that calibration computed with.
        """
        encoded = self._format.encode(weight, scheme)
        self._format.check_encoded(module, weight, scheme, encoded)
        self.tensors |= {f"{module}.{local}": tensor.cpu() for local, tensor in encoded.items()}
        return sum(tensor.nbytes for local, tensor in encoded.items() if not local.endswith("_shape"))

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
        """Bits in the file are those in memory.

        Raises:
            AuditError: names the tensor.
        """
        for name, tensor in self.tensors.items():
            if not identical(reader.tensor(name), tensor):
                raise AuditError(f"{name} reads back differently from what was written")


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
    for path in metadata_files(source.path):
        shutil.copyfile(path, folder / path.name)
    return size
