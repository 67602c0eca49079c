"""The store gives back what was put in, in memory and on disk, also after an interruption."""

from __future__ import annotations

import pytest
import torch

from quantkit.compress.calibration.hidden_state_store import ActivationStore
from quantkit.errors import ResumeError


def make_batches():
    torch.manual_seed(0)
    return [torch.randn(2, 3, 4), torch.randn(1, 5, 4).bfloat16()]


@pytest.mark.parametrize("mode", ["ram", "disk"])
def test_advance_replaces_every_batch(tmp_path, mode):
    batches = make_batches()
    store = ActivationStore(tmp_path, mode, iter(batches))
    store.advance(lambda _, hidden: hidden * 2)
    store.forget_previous()
    assert len(store) == 2
    for states, batch in zip(store, batches, strict=True):
        assert torch.equal(states, batch * 2)
    assert not (tmp_path / "0").exists()


@pytest.mark.parametrize("before", ["ram", "disk"])
@pytest.mark.parametrize("after", ["ram", "disk"])
def test_restore_continues_where_it_was(tmp_path, before, after):
    store = ActivationStore(tmp_path, before, iter(make_batches()))
    store.advance(lambda _, hidden: hidden + 1)
    again = ActivationStore.restore(tmp_path, after, 1, store.digests)
    assert all(torch.equal(a, b) for a, b in zip(again, store, strict=True))
    again.advance(lambda _, hidden: hidden - 1)
    assert torch.equal(again[0], make_batches()[0] + 1 - 1)


def test_previous_states_stay_until_forgotten(tmp_path):
    store = ActivationStore(tmp_path, "ram", iter(make_batches()))
    digests = list(store.digests)
    store.advance(lambda _, hidden: hidden * 0)
    again = ActivationStore.restore(tmp_path, "ram", 0, digests)
    assert torch.equal(again[0], make_batches()[0])


def test_sensitivity_is_noticed(tmp_path):
    store = ActivationStore(tmp_path, "ram", iter(make_batches()))
    path = tmp_path / "0" / "00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ResumeError, match="has changed since it was written"):
        ActivationStore.restore(tmp_path, "ram", 0, store.digests)
    path.unlink()
    with pytest.raises(ResumeError, match="is missing"):
        ActivationStore.restore(tmp_path, "disk", 0, store.digests)


def test_memory_mode_without_a_folder_writes_nothing(tmp_path):
    store = ActivationStore(None, "ram", iter(make_batches()))
    store.advance(lambda _, hidden: hidden * 2)
    store.forget_previous()
    assert store.digests == []
    assert torch.equal(store[0], make_batches()[0] * 2)
