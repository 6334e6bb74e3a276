"""Decoders of speech, called as they call language models, and words by their beginnings."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import lm
from data_prep.errors import UserError
from lm.adapters.decoders import FusedModel, flashlight_class
from lm.loaded import LoadedModel

pytestmark = pytest.mark.filterwarnings("ignore:'zebra' is given")
WORDS = ["the", "cat", "dog", "zebra", "sees"]
HYPOTHESES = [[0, 1, 4, 0, 2], [0, 2], [0, 1, 4, 0, 3]]


@pytest.fixture
def model(lstm_run: Path) -> LoadedModel:
    return lm.load(lstm_run)


class Node:
    """As `CTCDecoderLMState` is: `child` returns the same object for the same word."""

    def __init__(self) -> None:
        self.children: dict[int, Node] = {}

    def child(self, index: int) -> "Node":
        return self.children.setdefault(index, Node())


def test_hypotheses_of_flashlight_have_the_probabilities_of_the_model(model: LoadedModel) -> None:
    adapter = flashlight_class(object, Node)(model, WORDS)
    root = adapter.start(False)
    for hypothesis in HYPOTHESES:
        node, total = root, 0.0
        for index in hypothesis:
            node, log_prob = adapter.score(node, index)
            total += log_prob
        end, log_prob = adapter.finish(node)
        assert end is node
        (score,) = model.score([" ".join(WORDS[index] for index in hypothesis)])
        assert total + log_prob == pytest.approx(score.total, abs=1e-4)
    assert len(adapter.steps) == 1 + 5 + 1 + 1  # the beginnings in common are computed once
    adapter.start(False)
    assert len(adapter.steps) == 1


def test_hypotheses_of_pyctcdecode_have_weighted_probabilities_one_by_one_and_at_once(
    model: LoadedModel,
) -> None:
    fused = FusedModel(model, alpha=0.7, beta=0.3)
    for hypothesis in HYPOTHESES:
        words = [WORDS[index] for index in hypothesis]
        state, total = fused.get_start_state(), 0.0
        for place, word in enumerate(words):
            score, state = fused.score(state, word, is_last_word=place == len(words) - 1)
            total += score
        (expected,) = model.score([" ".join(words)])
        assert total == pytest.approx(0.7 * expected.total + 0.3 * len(words), abs=1e-4)
    start = fused.get_start_state()
    starts = [start, state, start, state]
    many = fused.score_many(starts, ["the", "cat", "the", ""], are_last=True)
    for (score, after), before, word in zip(many, starts, ["the", "cat", "the", ""], strict=True):
        single = fused.score(before, word, True)
        assert score == pytest.approx(single[0], abs=1e-5)
        assert after == single[1]
    assert many[0][1] == many[2][1]
    assert hash(many[0][1]) == hash(many[2][1])
    assert len({state for _, state in many}) == 3
    assert [fused.score_partial_token(part) for part in ("ca", "cat", "cab")] == [0, 0, -10]
    fused.reset_params(alpha=0.0, beta=1.5, unk_score_offset=None)
    assert fused.score(start, "the")[0] == 1.5


def test_pyctcdecode_decodes_with_the_model(lstm_run: Path) -> None:
    model = lm.load(lstm_run, vocabulary_size=10_000)
    pyctcdecode = pytest.importorskip("pyctcdecode", reason="pyctcdecode is not installed")
    labels = ["", " ", *"abcdefghijklmnopqrstuvwxyz"]
    alphabet = pyctcdecode.Alphabet.build_alphabet(labels)
    logits = np.full((7, len(labels)), -9.0)
    for frame, letters in enumerate(["t", "h", "e", " ", "c", "ao", "t"]):
        for letter in letters:
            logits[frame, labels.index(letter)] = math.log(0.9 / len(letters))
    logits[5, labels.index("o")] += 0.1  # "cot", an unknown word, is a little louder
    for language_model, expected in ((None, "the cot"), (FusedModel(model), "the cat")):
        best = pyctcdecode.BeamSearchDecoderCTC(alphabet, language_model).decode_beams(logits)[0]
        assert best[0] == expected
    fused = FusedModel(model)
    (score,) = model.score(["the cat"])
    expected_score = fused.alpha * score.total + 2 * fused.beta
    assert best[-1] - best[-2] == pytest.approx(expected_score, abs=1e-4)


@pytest.mark.parametrize("beginning", ["", "t", "th", "the", "f", "cat", "q", "<", "thex"])
@pytest.mark.parametrize("searched", [1, 8, 256])
@pytest.mark.parametrize("few", [0, 2])
def test_completions_are_the_best_of_all_words_that_begin_so(
    model: LoadedModel, beginning: str, searched: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.generation.completion.SEARCHED", searched)
    monkeypatch.setattr("lm.generation.completion.FEW_ROWS", few)
    state = model.start("the old")
    log_prob = model.log_prob(state)
    names = [model.word(id) for id in range(model.vocab_size)]
    known = [id for id, name in enumerate(names) if name not in ("<unk>", "<eos>")]
    chosen = [id for id in known if names[id].startswith(beginning)]
    chosen.sort(key=lambda id: -log_prob[id])
    found = model.complete(state, beginning, 4)
    assert [word for word, _ in found] == [names[id] for id in chosen[:4]]
    assert [each for _, each in found] == pytest.approx(log_prob[chosen[:4]].tolist(), abs=1e-5)
    mass = float(log_prob[chosen].logsumexp(0))
    assert model.prefix_log_prob("the old", beginning) == pytest.approx(mass, abs=1e-5)
    assert model.has_beginning(beginning) == bool(chosen)


def test_completions_are_of_words_in_the_case_of_the_model(
    train: Callable[..., Path], pieces_run: Path, tmp_path: Path, model: LoadedModel
) -> None:
    with pytest.raises(UserError, match="a model of words"):
        lm.load(pieces_run).complete("", "th")
    for k in (0, 1.5):
        with pytest.raises(ValueError, match="number of words"):
            model.complete("", "th", k)  # type: ignore[arg-type]
    options = ["--tokenizer.lowercase=true", f"--data.prepared_dir={tmp_path}"]
    lower = lm.load(train(tmp_path / "run", *options, "--train.max_steps=1"))
    for beginning in ("THE", "B\u0130"):
        known = lower.complete("", beginning.replace("\u0130", "I").lower())
        assert lower.complete("", beginning) == known != []
