"""Sizes of the blocks in which row-wise gradients are formed, for their tests."""

import pytest

from lm.output.rowwise import blocks


@pytest.fixture
def portion(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the elements of a block; `in_blocks` chooses them."""
    monkeypatch.setattr(blocks, "PRODUCT_ELEMENTS", request.param)
    monkeypatch.setattr(blocks, "ROWS_ELEMENTS", request.param)
