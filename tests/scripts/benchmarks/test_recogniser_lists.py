"""Sentences, lists and the table of the recogniser benchmark."""

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lm.rescoring.nbest import read_nbest
from scripts.benchmarks.recogniser_lists import draw, sentences
from tests.commands.test_rescore import ARPA
from tests.conftest import toy_sentences
from tests.nbest_lists import ErrorSource

Run = Callable[..., subprocess.CompletedProcess[str]]
BOOK = """\
" It's a well-known , old garden ! " he said ; then : " Come . "
In 1812 he came . The old man sees the dog . The old man sees the dog .
"""
HAS_RECOGNISER = bool(shutil.which("flite") and importlib.util.find_spec("pocketsphinx"))


def test_sentences_have_letters_and_apostrophes_only() -> None:
    texts = [" ".join(words) for words in sentences(BOOK.splitlines())]
    said = ["it's a well known old garden", "he said", "then", "come"]
    assert texts == [*said, *["the old man sees the dog"] * 2]
    drawn = draw(BOOK.splitlines(), 2, seed=1)
    assert sorted(map(" ".join, drawn)) == ["it's a well known old garden", texts[-1]]


def test_the_table_has_the_rates_of_each_way_to_choose(
    lstm_run: Path, tmp_path: Path, run_benchmark: Run
) -> None:
    source = ErrorSource(toy_sentences(0, 300), 12.0, seed=1)
    for name, seed in (("tune", 7), ("report", 8)):
        rows, references = [], []
        for number, line in enumerate(toy_sentences(seed, 20)):
            references.append(f"{name}{number} {line}\n")
            for score, words in source.hypotheses(line.split(), 4):
                rows.append(f"{name}{number}\t{score:.3f}\t-1\t{' '.join(words)}\n")
        (tmp_path / f"{name}.nbest").write_text("".join(rows))
        (tmp_path / f"{name}.ref").write_text("".join(references))
    arpa, log = tmp_path / "model.arpa", tmp_path / "log.jsonl"
    arpa.write_text(ARPA)
    arguments = ["--json", log, "table", lstm_run, tmp_path, "--arpa", arpa]
    done = run_benchmark("recogniser_lists", *arguments)
    assert done.returncode == 0, done.stderr
    rows_by_name = {row["row"]: row for row in map(json.loads, log.read_text().splitlines())}
    assert len(rows_by_name) == 12
    oracle = rows_by_name["oracle"]["wer"]
    for row in rows_by_name.values():
        assert 0 <= oracle <= row["wer"] <= 100
    both = rows_by_name["run and n-gram model, tuned"]["development"]
    for name in ("n-gram model, tuned", "run, tuned, U = 1,000,000"):
        assert both <= rows_by_name[name]["development"]
    done = run_benchmark("recogniser_lists", "table", lstm_run, tmp_path / "absent")
    assert done.stderr == f"recogniser_lists: {tmp_path / 'absent'} has no tune.nbest\n"


@pytest.mark.skipif(not HAS_RECOGNISER, reason="requires flite and pocketsphinx")
def test_spoken_sentences_become_lists_and_references(tmp_path: Path, run_benchmark: Run) -> None:
    (tmp_path / "book").write_text(BOOK)
    options = ["--utterances=1", "--hypotheses=5", "--snr=30"]
    done = run_benchmark("recogniser_lists", "lists", tmp_path / "book", tmp_path, *options)
    assert done.returncode == 0, done.stderr
    for name in ("tune", "report"):
        nbest = read_nbest(str(tmp_path / f"{name}.nbest"))
        assert nbest.ids == [f"{name}0000"]
        assert (nbest.scores < 0).all()
        assert set((tmp_path / f"{name}.ref").read_text().split()) & set(nbest.texts[0].split())


def test_a_missing_synthesiser_is_a_single_line_error(
    tmp_path: Path, run_benchmark: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "book").write_text(BOOK)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    arguments = [tmp_path / "book", tmp_path / "out", "--utterances=1"]
    done = run_benchmark("recogniser_lists", "lists", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("recogniser_lists: `lists` requires the program flite")
    assert done.stderr.count("\n") == 1
