"""Paired comparison of runs, and loss by frequency: figures of evaluations, true intervals."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm.cli import main
from lm.evaluation import evaluate_text, token_nats
from lm.run import TrainedRun
from lm.scoring import comparison, frequency
from lm.scoring.comparison import bootstrap_interval
from tests.conftest import OTHER_LETTERS, PIECES_WITH_BYTES, Printed, Train


def test_differences_are_those_of_both_evaluations(
    lstm_run: Path, transformer_run: Path, printed: Printed
) -> None:
    values = []
    for run, *others in ((lstm_run, transformer_run, lstm_run), (transformer_run,)):
        options = ["--compare", *others] if others else []
        values.append(json.loads(printed("evaluate", run, "--by-frequency", "--json", *options)))
    ours, theirs = values
    found, same = ours["compared"]
    assert found["perplexity"] == pytest.approx(theirs["perplexity"], rel=1e-6)
    difference = math.log(ours["perplexity"]) - math.log(theirs["perplexity"])
    assert found["difference"] == pytest.approx(difference, abs=1e-6)
    low, high = found["interval"]
    assert low <= found["difference"] <= high
    assert (same["difference"], same["interval"]) == (0, [0, 0])
    bins = theirs["by_frequency"]["target"]
    assert [each["tokens"] for each in found["by_frequency"]] == [each["tokens"] for each in bins]
    assert found["by_frequency"][0]["nll_nats"] == pytest.approx(bins[0]["nll_nats"])


def test_words_and_pieces_are_compared_in_bits_per_byte(
    letters: Train, tmp_path: Path, printed: Printed, complaint: Printed
) -> None:
    run, other = letters("words"), letters("other", "--model.hidden=6")
    bytes_run = letters("bytes", *PIECES_WITH_BYTES)
    lines = [*OTHER_LETTERS, "b <unk>", "bab"] * 5
    (tmp_path / "text").write_text("\n".join(lines) + "\n")
    command = ["evaluate", run, f"--text={tmp_path / 'text'}", "--open-vocabulary", "--compare"]
    (other / "data").rename(other / "away")  # ranks are those of the first run
    ours = json.loads(printed(*command, bytes_run, other, "--by-frequency", "--json"))
    (pieces, words), bins = ours["compared"], ours["by_frequency"]["target"]
    options: Any = {"progress": False, "open_vocabulary": True}
    theirs = [evaluate_text(TrainedRun(each), lines, **options) for each in (bytes_run, other)]
    for each, evaluation in zip((pieces, words), theirs, strict=True):
        assert each["unit"] == "bits/byte"
        assert each["bits_per_byte"] == pytest.approx(evaluation.bits_per_byte, rel=1e-6)
        difference = ours["bits_per_byte"] - each["bits_per_byte"]
        assert each["difference"] == pytest.approx(difference, abs=1e-6)
        assert each["perplexity"] == pytest.approx(evaluation.perplexity, rel=1e-6)
        low, high = each["interval"]
        assert low <= each["difference"] <= high
    assert pieces["by_frequency"] is None
    nats = sum(part["nll_nats"] for part in words["by_frequency"])
    assert nats == pytest.approx(theirs[1].nll_nats - (theirs[1].spelling_nats or math.nan))
    tokens = ([each["tokens"] for each in part] for part in (bins, words["by_frequency"]))
    assert next(tokens) == next(tokens)
    table = printed(*command, bytes_run, other, "--by-frequency")
    assert "by rank                   not known" in table

    # Spaces that no model of words spells: losses of the same tokens alone can be compared.
    (tmp_path / "text").write_text(" b abba zebra\n" * 20)
    (spaced,) = json.loads(printed(*command, other, "--json"))["compared"]
    assert (spaced["unit"], spaced["bits_per_byte"]) == ("nats/token", None)
    more = letters("more", "--tokenizer.min_count=1")
    (extended,) = json.loads(printed(*command, more, "--json"))["compared"]
    one, two = (
        evaluate_text(TrainedRun(r), [" b abba zebra"] * 20, **options) for r in (run, more)
    )
    difference = one.nll_nats / one.tokens - two.nll_nats / two.tokens
    assert one.oov != two.oov
    assert (extended["unit"], extended["difference"]) == ("nats/token", pytest.approx(difference))
    assert "run does not spell case or spaces" in complaint(*command, bytes_run)
    closed = [each for each in command if each != "--open-vocabulary"]
    refusal = f"{bytes_run} has another tokenizer than {run}"
    assert complaint(*closed, bytes_run) == f"{refusal}, so other tokens: add --open-vocabulary"


def test_comparisons_need_the_same_lines(
    letters: Train, tmp_path: Path, complaint: Printed, caplog: pytest.LogCaptureFixture
) -> None:
    run = letters("words")
    dropping = letters("dropping", *PIECES_WITH_BYTES, "--data.keep_empty_lines=false")
    (tmp_path / "text").write_text("b ab\n\nab\n" * 9)
    options = ["--open-vocabulary", "--compare"]
    for first, second in ((run, dropping), (dropping, run)):
        for text in ([], [f"--text={tmp_path / 'text'}"]):
            told = complaint("evaluate", first, *text, *options, second)
            assert told.startswith(f"{dropping} leaves out empty lines, {run} does not")
    (tmp_path / "text").write_text("b ab\nab\n" * 9)
    assert main(["evaluate", str(run), f"--text={tmp_path / 'text'}", *options, str(dropping)]) == 0
    other = letters("other", "--data.files.test=train.txt")
    for each, warns in ((run, False), (other, True)):
        assert main(["evaluate", str(run), "--compare", str(each)]) == 0
        assert (f"{each} was prepared with another test split" in caplog.text) == warns


def test_few_lines_have_no_interval(lstm_run: Path, tmp_path: Path, printed: Printed) -> None:
    text = tmp_path / "text"
    for num_lines, interval in ((19, "not known: fewer than 20 lines"), (20, "+0.0000 … +0.0000")):
        text.write_text("it was\n" * num_lines)
        assert interval in printed("evaluate", lstm_run, "--text", text, "--compare", lstm_run)


def test_intervals_of_short_texts_cover_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "NUM_SAMPLES", 1000)
    generator, zeros, tokens = np.random.default_rng(3), np.zeros(20), np.ones(20)
    found = [bootstrap_interval(generator.normal(size=20), zeros, tokens) for _ in range(2000)]
    covering = [limits is not None and limits[0] <= 0 <= limits[1] for limits in found]
    assert 0.94 < np.mean(covering) < 0.965  # 0.93 without the correction


def test_the_interval_over_texts_has_the_width_of_its_blocks() -> None:
    generator = np.random.default_rng(2)
    tokens = generator.integers(5, 30, 4000)
    other = tokens * 4.0
    ours = other + 0.1 * tokens + np.repeat(generator.normal(0, 1, 80), 50) * tokens
    interval = bootstrap_interval(ours, other, tokens)
    assert interval is not None
    low, high = interval
    assert low < float((ours - other).sum() / tokens.sum()) < high
    assert (high - low) / 2 == pytest.approx(1.96 / math.sqrt(80), rel=0.25)


def test_tokens_are_divided_by_the_rank_of_their_word_and_of_the_word_before(
    lstm_run: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frequency, "LAST_RANKS", (3, 9, 10**9))
    values = json.loads(printed("evaluate", lstm_run, "--by-frequency", "--json"))
    run = TrainedRun.open(lstm_run)
    counts, tokens = run.prepared.counts(), np.array(run.prepared.tokens("test"))
    nll = token_nats(run, tokens)
    by_count = sorted(range(len(counts)), key=lambda word: (-int(counts[word]), word))
    previous = [run.description.eos_id, *tokens[:-1].tolist()]
    for name, words in (("target", tokens.tolist()), ("previous", previous)):
        rank = np.array([1 + by_count.index(word) for word in words])
        bins = values["by_frequency"][name]
        limits = [(each["first_rank"], each["last_rank"]) for each in bins]
        assert limits == [(1, 3), (4, 9), (10, len(counts))]
        for each, (first, last) in zip(bins, limits, strict=True):
            inside = (first <= rank) & (rank <= last)
            assert 0 < each["tokens"] == inside.sum()
            assert each["nll_nats"] == pytest.approx(nll[inside].sum())
        assert sum(each["nll_nats"] for each in bins) == pytest.approx(values["nll_nats"], rel=1e-5)
