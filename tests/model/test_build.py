"""Models and trees are those of the configuration."""

from typing import Any

import pytest
import torch

from lm.config import ModelConfig, OutputConfig, WordTable, validate
from lm.model.build import build_model
from lm.output import ClassTree

N, H, T = 30, 8, 5
COUNTS = torch.arange(N) ** 2


def test_the_default_cutoffs_are_a_tenth_and_a_third_of_the_vocabulary() -> None:
    output = OutputConfig(tree="adaptive")
    adaptive: Any = build_model(
        ModelConfig(hidden=H, init_range=0.1), output, WordTable(), None, T, counts=COUNTS
    ).output
    assert float(adaptive.softmax.head.weight.detach().abs().max()) <= 0.1
    assert adaptive.softmax.cutoffs == [3, 10, 30]
    assert int(adaptive.index_of_word[N - 1]) < 3  # the most frequent word


@pytest.mark.parametrize(("hidden", "heads"), [(200, 5), (300, 6), (256, 8), (650, 5), (6, 3)])
def test_the_default_number_of_heads_fits_the_hidden_size(hidden: int, heads: int) -> None:
    """A bare configuration (H = 200) and what `lm new` writes (200, 300) had 8 heads: an error."""
    config = ModelConfig(backbone="transformer", hidden=hidden, layers=1)
    model = build_model(config, OutputConfig(), WordTable(), ClassTree.full(5), 4)
    assert [block.attention.heads for block in model.backbone.blocks] == [heads]  # type: ignore[attr-defined]
    values = {"name": "a", "model": {"backbone": "transformer", "hidden": hidden}}
    assert validate(values | {"train": {"max_steps": 1}}, "a").model.heads is None
