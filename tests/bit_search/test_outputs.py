"""What a search keeps: its numbers, and the number of threads that they were measured with."""

from __future__ import annotations

import pytest
import torch

from quantkit.bit_search.outputs import SearchState
from quantkit.compress.pipeline.state import write_state
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
    write_state(tmp_path / "state.json", {"identity": {}, "numbers": {}, "threads": 10**6})
    assert SearchState(tmp_path / "state.json", {}).threads < 10**5


@pytest.mark.parametrize("numbers", [5, {"a": []}, [1]])
def test_numbers_of_other_types_are_refused(tmp_path, numbers):
    write_state(tmp_path / "state.json", {"identity": {}, "numbers": numbers})
    with pytest.raises(ResumeError, match="is damaged"):
        SearchState(tmp_path / "state.json", {})


def test_a_number_that_was_changed_is_noticed(tmp_path):
    path = tmp_path / "state.json"
    SearchState(path, {"a": (1, 2)}).get("x", lambda: 0.125)
    assert SearchState(path, {"a": (1, 2)}).get("x", lambda: 9.0) == 0.125
    path.write_text(path.read_text().replace("0.125", "0.126"))
    with pytest.raises(ResumeError, match=r"is damaged \(it was changed"):
        SearchState(path, {"a": (1, 2)})
