"""Tests that ask for a way run with compiled loops, and with operations of PyTorch alone."""

import pytest

from lm.output.decoding import compiled


@pytest.fixture(params=["compiled", "reference"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "reference":
        monkeypatch.setattr(compiled, "has_numba", lambda: False)
    return str(request.param)
