"""Every test runs with compiled loops, and with operations of PyTorch alone."""

import pytest

from lm.output.decoding import compiled


@pytest.fixture(autouse=True, params=["compiled", "reference"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "reference":
        monkeypatch.setattr(compiled, "has_numba", lambda: False)
    return str(request.param)
