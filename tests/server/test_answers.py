"""Test the bytes of answers."""

from __future__ import annotations

import pytest

from quantkit.server.answers import Head, event, framed


@pytest.mark.parametrize("further", [{}, {"usage": None}])
def test_a_framed_choice_is_the_event_that_it_stands_for(further):
    head = Head(kind="text_completion", model='"choices":[{}] "ö', prefix="cmpl")
    choice = {"index": 0, "text": 'a "quoted" ✓ {}', "logprobs": None}
    assert framed(head.frame(**further), choice) == event(head.around([choice], **further))
