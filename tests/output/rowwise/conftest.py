"""Sizes of the blocks in which row-wise gradients are formed, for their tests."""

import pytest

from lm.output.rowwise import blocks


@pytest.fixture(params=[1 << 19, 12], ids=["whole nodes", "two rows at a time"])
def portion(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of whole nodes, and of two rows."""
    monkeypatch.setattr(blocks, "PRODUCT_ELEMENTS", request.param)
    monkeypatch.setattr(blocks, "ROWS_ELEMENTS", request.param)
