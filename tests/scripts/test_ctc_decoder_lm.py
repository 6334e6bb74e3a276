"""The adapter for torchaudio's CTC decoder, called as that calls it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lm
from scripts.ctc_decoder_lm import decoder_lm

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


def test_the_decoder_prefers_the_word_that_the_model_does(lstm_run: Path) -> None:
    decoder: Any = pytest.importorskip("flashlight.lib.text.decoder")
    model = lm.load(lstm_run)
    adapter = decoder_lm(decoder.LM, decoder.LMState)(model, WORDS)
    # Each word is one acoustic token; token 5 is the blank.
    trie = decoder.Trie(6, -1)
    start = adapter.start(False)
    for index in range(5):
        trie.insert([index], index, adapter.score(start, index)[1])
    trie.smear(decoder.SmearingMode.MAX)
    options = decoder.LexiconDecoderOptions(
        beam_size=20,
        beam_size_token=6,
        beam_threshold=1e6,
        lm_weight=1.0,
        word_score=0.0,
        unk_score=-np.inf,
        sil_score=0.0,
        log_add=False,
        criterion_type=decoder.CriterionType.CTC,
    )
    search = decoder.LexiconDecoder(options, trie, adapter, -1, 5, 3, [], False)
    emissions = np.zeros((2, 6), dtype=np.float32)  # two frames that distinguish nothing ...
    emissions[:, 5] = -1e4  # ... but have no blank
    emissions[0, 1:5] = -1e4  # and "the" first
    best = search.decode(emissions.ctypes.data, 2, 6)[0]
    words = [index for index in best.words if index >= 0]
    log_prob = {
        index: adapter.model.step(model.start("the"), WORDS[index]) for index in range(1, 5)
    }
    end = model.eos_id
    totals = {i: s.log_prob + model.step(s.state, end).log_prob for i, s in log_prob.items()}
    first = model.step(model.start("the"), end).log_prob
    expected = [0, max(totals, key=lambda i: totals[i])] if max(totals.values()) > first else [0]
    assert words == expected
