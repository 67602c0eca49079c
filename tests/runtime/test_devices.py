"""Which device a name means."""

from __future__ import annotations

import pytest
import torch

from quantkit.errors import InputError
from quantkit.machine.devices import pick_device


def test_devices():
    assert pick_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="unknown device 'tpu'"):
        pick_device("tpu")
    with pytest.raises(InputError, match="device 'cuda:99' does not exist"):
        pick_device("cuda:99")
