"""The batch builder on the worked example of ForwardBatch, and rows that change hands."""

from __future__ import annotations

import numpy as np
import torch

from quantkit.runtime.engine.batch_builder import BatchBuilder, ScheduledChunk
from quantkit.runtime.engine.runner import _Inputs
from quantkit.runtime.sequence import PageHolder


def holder(number, row, pages):
    return PageHolder(id=number, row=row, pages=pages)


def builder():
    return BatchBuilder(max_sequences=3, max_pages=4, page_size=4, device="cpu")


def test_the_worked_example():
    one, two = holder(5, 2, [7, 2]), holder(6, 0, [9])
    batch = builder().build([ScheduledChunk(one, [50], 5, 1), ScheduledChunk(two, [60, 61, 62], 0, 1)])
    assert batch.token_ids.tolist() == [50, 60, 61, 62]
    assert batch.positions.tolist() == [5, 0, 1, 2]
    assert batch.query_starts.tolist() == [0, 1, 4]
    assert batch.page_table.tolist() == [[7, 2], [9, -1]]
    assert batch.slots.tolist() == [9, 36, 37, 38]
    assert batch.residual_rows.tolist() == [2, 0]
    assert batch.logit_rows.tolist() == [0, 3]
    assert (batch.query_lengths, batch.context_lengths, batch.sequence_ids) == ((1, 3), (6, 3), (5, 6))


def test_a_row_forgets_its_last_owner():
    made = builder()
    made.build([ScheduledChunk(holder(0, 1, [3, 4, 5]), [1], 11, 1)])
    other, long = holder(1, 1, [6]), holder(2, 0, [7, 8, 9])
    batch = made.build([ScheduledChunk(other, [1], 0, 1), ScheduledChunk(long, [2], 8, 0)])
    assert batch.page_table.tolist() == [[6, -1, -1], [7, 8, 9]]
    assert batch.logit_rows.tolist() == [0]
    long.pages = [7]
    other.pages = [6, 2]
    batch = made.build([ScheduledChunk(long, [1], 2, 1), ScheduledChunk(other, list(range(5)), 1, 5)])
    assert batch.page_table.tolist() == [[7, -1], [6, 2]]
    assert batch.logit_rows.tolist() == [0, 1, 2, 3, 4, 5]


def test_long_chunks_grow_the_buffers():
    made = builder()
    batch = made.build([ScheduledChunk(holder(0, 0, [0, 1, 2, 3]), list(range(16)), 0, 1)])
    assert batch.token_ids.tolist() == list(range(16)) == batch.slots.tolist()


def test_tokens_behind_evicted_ones_are_stored_where_those_were_and_rotated_where_they_are():
    kept, whole = holder(1, 0, [5, 2]), holder(2, 1, [3])
    kept.num_evicted = 8
    batch = builder().build([ScheduledChunk(kept, [7, 8], 13, 1), ScheduledChunk(whole, [9], 2, 1)])
    assert batch.positions.tolist() == [5, 6, 2]
    assert batch.slots.tolist() == [9, 10, 14]
    assert batch.context_lengths == (7, 3)
    assert batch.page_table.tolist() == [[5, 2], [3, -1]]
    positions, lengths = batch.in_text()
    assert positions.tolist() == [13, 14, 2]
    assert lengths == (15, 3)


def test_inputs_of_graphs_have_both_positions():
    inputs = _Inputs(2, 4, 4, 100, torch.device("cpu"))
    kept = holder(1, 0, [5, 2])
    kept.num_evicted = 8
    inputs.write([ScheduledChunk(kept, [7], 13, 1)], np.array([[5, 2]], dtype=np.int32), 4)
    inputs.send()
    assert inputs.batch.positions.tolist() == [5, 0]
    assert inputs.batch.slots.tolist() == [9, -1]
    assert inputs.batch.in_text()[0].tolist() == [13, 0]
    assert inputs.batch.in_text()[1] == (100, 100)
