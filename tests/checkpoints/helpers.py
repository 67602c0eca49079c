"""What the tests of the reader share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quantkit.checkpoints.reader import CheckpointReader
from quantkit.errors import InputError

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int64)


def make_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"t.{str(dtype).removeprefix('torch.')}": torch.randint(-100, 100, (7, 5), generator=generator).to(dtype)
        for dtype in DTYPES
    }
    tensors["flag"] = torch.tensor([True, False, True])
    tensors["scalar"] = torch.tensor(3.5)
    tensors["empty"] = torch.empty(0, 4)
    return tensors


def write_config(folder: Path, config: object = None) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["X"]} if config is None else config))


def raw_file(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def fails(folder: Path, kind: type[InputError], *parts: str) -> None:
    with pytest.raises(kind) as error:
        CheckpointReader(folder)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
