"""The adapter for torchaudio's CTC decoder, called as that calls it."""

from pathlib import Path

import pytest

import lm
from scripts.examples.ctc_decoder_lm import decoder_lm

pytestmark = pytest.mark.filterwarnings("ignore:'zebra' is given")
WORDS = ["the", "cat", "dog", "zebra", "sees"]


class Base:
    """As `CTCDecoderLM` is, for the adapter."""


class Node:
    """As `CTCDecoderLMState` is: `child` returns the same object for the same word."""

    def __init__(self) -> None:
        self.children: dict[int, Node] = {}

    def child(self, index: int) -> "Node":
        return self.children.setdefault(index, Node())


def test_hypotheses_have_the_probabilities_of_the_model(lstm_run: Path) -> None:
    model = lm.load(lstm_run)
    adapter = decoder_lm(Base, Node)(model, WORDS)
    root = adapter.start(False)
    for hypothesis in ([0, 1, 4, 0, 2], [0, 2], [0, 1, 4, 0, 3]):
        node, total = root, 0.0
        for index in hypothesis:
            node, log_prob = adapter.score(node, index)
            total += log_prob
        end, log_prob = adapter.finish(node)
        assert end is node
        (score,) = model.score([" ".join(WORDS[index] for index in hypothesis)])
        assert total + log_prob == pytest.approx(score.log_prob.sum(), abs=1e-4)
    assert len(adapter.states) == 1 + 5 + 1 + 1  # the beginnings in common are computed once
    adapter.start(False)
    assert len(adapter.states) == 1
