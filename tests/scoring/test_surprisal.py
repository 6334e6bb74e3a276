"""Tables of surprisal: figures of `lm score`, counts of the training text, words of pieces."""

import math
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas
import pytest

import lm
from lm.loaded import LoadedModel
from lm.output import HierarchicalSoftmax
from tests.conftest import LETTERS, PIECES_WITH_BYTES, Train, corpus_of

LINES = ["the old cat sees a dog", "", "zebra NA the", "  a  horse "]
NAN = float("nan")


@pytest.fixture(scope="module")
def of_pieces(letters: Train) -> LoadedModel:
    return lm.load(letters("surprisal", *PIECES_WITH_BYTES))


@pytest.mark.parametrize("options", [{}, {"vocabulary_size": 50}, {"open_vocabulary": True}])
def test_rows_have_scores_and_counts_of_words(lstm_run: Path, corpus: Path, options: Any) -> None:
    model = lm.load(lstm_run, **options)
    scores = model.score(LINES)
    bits = np.concatenate([score.log_prob for score in scores]) / -math.log(2)
    is_nan = np.concatenate([score.is_oov for score in scores]) & (not options)
    whole = model.surprisal(LINES, eos=True)
    expected: Any = pytest.approx(np.where(is_nan, NAN, bits), rel=1e-9, nan_ok=True)
    assert whole["surprisal"].to_numpy() == expected
    assert whole["word"].tolist() == [w for line in LINES for w in [*line.split(), "<eos>"]]
    table = model.surprisal(LINES)
    words = whole[whole["word"] != "<eos>"].reset_index(drop=True)
    pandas.testing.assert_frame_equal(table, words, check_dtype=False)
    counts = Counter((corpus / "train.txt").read_text().split())
    total, types = counts.total(), len(counts) + 1  # with <unk>
    assert table["sentence"].tolist() == [1] * 6 + [3] * 3 + [4] * 2
    assert table["position"].tolist() == [1, 2, 3, 4, 5, 6, 1, 2, 3, 1, 2]
    assert table["unknown"].tolist() == [word not in counts for word in table["word"]]
    before: Any = None
    for _, row in table.iterrows():
        word, count = row["word"], counts.get(row["word"], NAN)
        expected = 1e6 * count / total, math.log10(1e6 * (count + 1) / (total + types)), len(word)
        found = row["frequency"], row["log10_frequency"], row["length"]
        assert found == pytest.approx(expected, nan_ok=True)
        for name in ("surprisal", "frequency", "log10_frequency", "length"):
            is_first = before is None or before["sentence"] != row["sentence"]
            previous = NAN if is_first else before[name]
            assert row[f"previous_{name}"] == pytest.approx(previous, nan_ok=True)
        before = row


def test_a_word_with_punctuation_has_the_frequency_of_the_word(
    train: Train, tmp_path: Path
) -> None:
    options = corpus_of(tmp_path, "the cat (the dog) sees.\n" * 40)
    options += ["--tokenizer.split_punctuation=true", f"--data.prepared_dir={tmp_path / 'data'}"]
    run = train(tmp_path / "run", *options, "--train.max_steps=1", "--train.batch_size=1")
    table = lm.load(run).surprisal(["The the (dog). the(dog)"])
    share = 1e6 / 8
    assert table["frequency"].to_numpy() == pytest.approx([NAN, 2 * share, share, NAN], nan_ok=True)
    assert table["length"].tolist() == [3, 3, 6, 8]


def test_words_of_pieces_end_where_the_next_begins(of_pieces: LoadedModel) -> None:
    line = "ab bé abba  b"
    words, ids, word_of_id = of_pieces.tokenizer.align(line)
    pieces = [of_pieces.word(id) for id in range(of_pieces.vocab_size)]
    begins = [piece[0] == "▁" or piece in ("</s>", "<eos>", "<unk>") for piece in pieces]
    assert 3 < sum(begins) < 100
    expected, log_boundary = np.zeros(len(words) + 1), list[float]()
    units = zip([*ids, of_pieces.eos_id], [*word_of_id, 4], strict=True)
    for place, (id, unit) in enumerate(units):
        log_prob = of_pieces.log_prob(ids[:place].tolist())
        expected[unit] += float(log_prob[id])
        if len(log_boundary) == unit:
            log_boundary.append(float(log_prob[begins].logsumexp(0)) if place else 0.0)
    expected[:-1] += log_boundary[1:]
    expected -= log_boundary
    table = of_pieces.surprisal([line], eos=True)
    assert table["surprisal"].to_numpy() == pytest.approx(expected / -math.log(2), rel=1e-5)
    (score,) = of_pieces.score([line])
    assert -math.log(2) * table["surprisal"].sum() == pytest.approx(score.log_prob.sum(), rel=1e-6)


@pytest.mark.parametrize("context", ["", "ab b"])
def test_probabilities_of_words_of_pieces_add_up_to_at_most_one(
    of_pieces: LoadedModel, context: str
) -> None:
    model = lm.load(of_pieces._run.folder)
    pieces = [model.word(id) for id in range(model.vocab_size)]
    is_rare = [len(piece.strip("▁ab")) > 0 and piece != "</s>" for piece in pieces]
    output = cast(HierarchicalSoftmax, model.model.output)
    assert output.bias is not None
    output.bias.data[output.tree.row_of_word[is_rare]] -= 20
    words = ["".join(each) for n in range(1, 8) for each in product("ab", repeat=n)]
    lines = [f"{context} {word}".strip() for word in words]
    last = model.surprisal(lines).drop_duplicates("sentence", keep="last")
    assert 0.3 < (2 ** -last["surprisal"]).sum() <= 1


def test_words_of_pieces_are_counted_in_the_prepared_data_if_they_are_there(
    of_pieces: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lm.scoring.surprisal.TOKENS_AT_ONCE", 7)
    counts = Counter(" ".join(LETTERS).split())
    table = of_pieces.surprisal(["ab bé new <unk>"])
    expected = [1e6 * counts[word] / counts.total() for word in ("ab", "bé", "new")]
    assert table["frequency"].to_numpy() == pytest.approx([*expected, NAN], nan_ok=True)
    smoothed = math.log10(1e6 / (counts.total() + len(counts)))
    assert table["log10_frequency"][2] == pytest.approx(smoothed)
    data = Path(of_pieces._run.config.prepared_path)
    del of_pieces._run.__dict__["prepared"]
    data.rename(data.with_name("moved"))
    assert of_pieces.surprisal(["ab bé"])["frequency"].isna().all()
    assert "not a prepared folder" in caplog.text
    data.with_name("moved").rename(data)


def test_a_table_is_written_and_read_again(lstm_run: Path, tmp_path: Path) -> None:
    table = lm.load(lstm_run).surprisal(LINES)
    table.to_csv(tmp_path / "surprisal.csv", index=False)
    numbers = [name for name in table if name != "word"]
    options: Any = {"keep_default_na": False, "na_values": dict.fromkeys(numbers, "")}
    found = pandas.read_csv(tmp_path / "surprisal.csv", **options)
    assert "NA" in set(found["word"])
    pandas.testing.assert_frame_equal(found, table)
    assert lm.load(lstm_run).surprisal([]).columns.tolist() == table.columns.tolist()


def test_items_outside_the_catalogue_are_unknown(items_run: Path) -> None:
    table = lm.load(items_run).surprisal(["item%203 none item%204"])
    assert table["unknown"].tolist() == [False, True, False]
    assert table["frequency"].isna().tolist() == [False, True, False]
