"""Words of a loaded model: their ids, and what is said where one is unknown."""

import pydoc
import re
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import lm
from lm.figures import Evaluation
from lm.loaded import LoadedModel


@pytest.mark.parametrize(
    ("options", "word", "warns"),
    [
        ({}, "zebra", True),
        ({}, "the zebra", True),
        ({}, "<unk>", True),
        ({}, None, True),
        ({}, "the", False),
        ({"open_vocabulary": True}, "zebra", False),
        ({"open_vocabulary": True}, None, True),
        ({"vocabulary_size": 1000}, "zebra", False),
        ({"vocabulary_size": 1000}, None, False),
    ],
)
@pytest.mark.parametrize(
    "ask",
    [
        lambda model, word: model.step(model.start("the"), word),
        lambda model, word: model.step_many([model.start("the")], [word]),
        lambda model, word: model.candidate_log_prob("the", [word]),
        lambda model, word: model.candidate_log_probs([model.start("the")], [word]),
    ],
)
def test_a_word_with_the_probability_of_all_unknown_ones_warns_once(
    lstm_run: Path,
    ask: Callable[[LoadedModel, Any], object],
    options: dict[str, Any],
    word: str | None,
    warns: bool,
) -> None:
    loaded = lm.load(lstm_run, **options)
    word_or_id = loaded.unk_id if word is None else word
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ask(loaded, word_or_id)
        ask(loaded, word_or_id)
    assert {each.filename for each in caught} <= {__file__}
    found = [str(each.message) for each in caught]
    expected = f"{word_or_id!r} is given the probability of all unknown words together"
    assert [message.startswith(expected) for message in found] == [True] * warns


def test_ids_and_words_are_converted(lstm_run: Path) -> None:
    loaded = lm.load(lstm_run)
    for id in range(loaded.vocab_size):
        assert loaded.word(id) == loaded.tokenizer.token(id)
        if id not in (loaded.eos_id, loaded.unk_id):
            assert loaded.id(loaded.word(id)) == id
    assert loaded.id("zebra") == loaded.unk_id
    for word, log_prob in loaded.topk("the", 3):
        assert log_prob == pytest.approx(float(loaded.log_prob("the")[loaded.id(word)]), abs=1e-6)
    with pytest.raises(ValueError, match="'the cat' has 2 tokens, not one"):
        loaded.id("the cat")
    with pytest.raises(ValueError, match="outside the vocabulary"):
        loaded.word(loaded.vocab_size)


def test_help_explains_every_figure() -> None:
    for figures in (Evaluation, lm.LineScore):
        text = pydoc.render_doc(figures, renderer=pydoc.plaintext)  # type: ignore[attr-defined]
        for each in fields(figures):
            assert re.search(rf"\n \|  +{each.name}: [a-z\[]", text), each.name


def test_every_file_of_a_run_is_described(lstm_run: Path) -> None:
    page = (Path(lm.__file__).parent / "training" / "README.md").read_text()
    found = [path.name for path in lstm_run.rglob("*") if path.is_file()]
    assert len(found) > 10
    for name in found:
        name = re.sub("evaluate-.*.json", "evaluate-SPLIT.json", name)
        assert re.search(rf"[`/]{re.escape(name)}`", page), name
