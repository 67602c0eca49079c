"""Arrays that go to a device in one piece come out as they were."""

from __future__ import annotations

import numpy as np
import torch

from quantkit.kernels import transfer

ARRAYS = (
    np.arange(5, dtype=np.int64),
    np.arange(20, dtype=np.int32).reshape(4, 5)[:, 1:4],  # a page table's rows are a slice
    np.linspace(0, 1, 7, dtype=np.float32).reshape(7, 1),
    np.zeros(0, dtype=np.int64),
    np.array([2**62, -1]),
)


def test_packed_arrays_come_out_as_they_were():
    tensors = transfer._in_one_piece(torch.device("cpu"), ARRAYS)
    first = tensors[0].data_ptr()
    assert all((tensor.data_ptr() - first) % 16 == 0 for tensor in tensors if tensor.numel())
    for tensor, array in zip(tensors, ARRAYS, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
        assert tensor.dtype == torch.from_numpy(array).dtype


def test_on_the_cpu_nothing_is_copied():
    array = np.zeros(3)
    (tensor,) = transfer.send(torch.device("cpu"), array)
    array[1] = 5
    assert tensor.tolist() == [0, 5, 0]
