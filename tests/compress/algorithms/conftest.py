"""What has a version in C and one in torch is tested with both."""

from __future__ import annotations

import pytest

from quantkit.numerics import native


@pytest.fixture(params=["c", "torch"])
def implementation(request, monkeypatch):
    """Both versions of what has two."""
    if request.param == "torch":
        monkeypatch.setenv("QUANTKIT_NATIVE", "0")
    elif native.library() is None:
        pytest.skip(native.status())
    return request.param
