"""What a search keeps: its numbers, and the number of threads that they were measured with."""

from __future__ import annotations

import json

import pytest
import torch

from quantkit.bit_search.state import SearchState
from quantkit.errors import ResumeError


def test_the_threads_of_the_first_start_are_kept(tmp_path):
    before = torch.get_num_threads()
    state = SearchState(tmp_path / "state.json", {"a": 1})
    state.get("x", lambda: 1.0)
    try:
        torch.set_num_threads(before + 1)
        assert SearchState(tmp_path / "state.json", {"a": 1}).threads == before
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("text", ["[]", "{", '{"numbers": 5}', '{"numbers": {"a": []}, "identity": {}}', "[" * 5000])
def test_a_damaged_state_is_refused(tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ResumeError, match="start over with --no-resume"):
        SearchState(tmp_path / "state.json", {})


def test_a_number_of_threads_from_a_file_is_bounded(tmp_path):
    (tmp_path / "state.json").write_text(json.dumps({"identity": {}, "numbers": {}, "threads": 10**6}))
    assert SearchState(tmp_path / "state.json", {}).threads < 10**5
