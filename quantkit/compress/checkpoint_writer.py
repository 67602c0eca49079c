"""Write the files of a compressed checkpoint, and compare each shard in the file with the tensors in memory.

`quantize` and `convert` use this module. `output.staging` handles the work folder and the final path; the package
`formats` encodes the tensors.
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
    """Tensors to write into one safetensors file.

    Args:
        format_: format of the shard's quantized linears.
    Attributes:
        tensors: tensors to write, keyed by full name in the model; names in the file may differ.
    """

    def __init__(self, format_: Format) -> None:
        self._format = format_
        self.tensors: dict[str, Tensor] = {}

    def add_linear(self, module: str, weight: QuantizedTensor, scheme: LinearScheme) -> int:
        """Encode a quantized linear and add the encoded tensors to the shard.

        Args:
            module: full name of the linear.
            weight: codes and scales of the linear.
            scheme: scheme of the linear.
        Returns:
            Size of the encoded tensors in bytes, not counting a tensor that only records the weight's shape.
        Raises:
            AuditError: the encoded tensors do not decode to the codes and scales of `weight`.
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
        """Write the shard to a file, read the file back, and compare its tensors with those in memory.

        Args:
            path: path of the file.
            layout: function that converts this shard's tensors to those of the file, which may have other names and
                shapes.
            read: function that opens the file and converts its tensors back to the names and shapes of this shard.
        Returns:
            SHA-256 of the file, and the names of its tensors.
        Raises:
            AuditError: a tensor in the file differs from the tensor in memory.
        """
        stored = layout(self.tensors)
        digest = write_shard(path, stored)
        self.check(read(path))
        return digest, sorted(stored)

    def check(self, reader: CheckpointReader) -> None:
        """Check that the tensors in the file equal those in memory, bit for bit.

        Raises:
            AuditError: a tensor differs; the message names it.
        """
        for name, tensor in self.tensors.items():
            if not identical(reader.tensor(name), tensor):
                raise AuditError(f"{name} reads back differently from what was written; check the disk and run again")


def write_rest(folder: Path, source: CheckpointReader, weight_map: Mapping[str, str], config: dict[str, Any]) -> int:
    """Write all files of a checkpoint except the shards.

    Args:
        folder: folder with all shards.
        source: checkpoint from which tokenizer, licence etc. are copied.
        weight_map: file name of each tensor, keyed by tensor name.
        config: contents of config.json.
    Returns:
        Size of all tensors in bytes.
    """
    files = sorted(set(weight_map.values()))
    size: int = sum(info.num_bytes for name in files for info in read_header(folder / name).values())
    write_index(folder, weight_map, size)
    write_json(folder / CONFIG_NAME, config)
    for path in metadata_files(source.path):
        shutil.copyfile(path, folder / path.name)
    return size
