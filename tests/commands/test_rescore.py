"""`lm rescore`: the choice, layouts, tuning, a second model, lattices, labels that are no words."""

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from lm.cli import main
from lm.rescoring.models import NUM_UNSEEN, ArpaScores
from lm.rescoring.nbest import read_nbest
from lm.rescoring.weights import Weights
from lm.rescoring.word_errors import word_errors
from lm.run import TrainedRun
from lm.scoring import Scorer
from lm.scoring.arpa import ArpaModel
from tests.conftest import Printed, toy_sentences
from tests.scoring.arpa_files import THE_CAT, write

Rows = Callable[..., tuple[list[str], dict[str, Any]]]


def hypotheses(random: Random, line: str, number: int) -> list[tuple[float, str]]:
    """Different copies of a sentence with errors, by noisy acoustic scores, the highest first."""
    words, vocabulary = line.split(), " ".join(toy_sentences(0, 20)).split()
    copies = set()
    for _ in range(number):
        chosen = [word if random.random() > 0.12 else random.choice(vocabulary) for word in words]
        copies.add(" ".join(word for word in chosen if random.random() > 0.03))
    found = []
    for copy in sorted(copies):
        errors = sum(word_errors(words, copy.split()))
        found.append((random.gauss(-4 * errors, 12), copy))
    return sorted(found, reverse=True)


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """dev and test, each with an n-best list in both layouts and its references."""
    folder = tmp_path_factory.mktemp("nbest")
    random = Random(1)
    for name, seed in (("dev", 7), ("test", 8)):
        tabs, kaldi, acoustic, references = [], [], [], []
        for number, line in enumerate(toy_sentences(seed, 60)):
            id = f"{name}{number}"
            references.append(f"{id} {line}")
            for rank, (score, text) in enumerate(hypotheses(random, line, 6), 1):
                tabs.append(f"{id}\t{score:.3f}\t{text}")
                kaldi.append(f"{id}-{rank} {text}")
                acoustic.append(f"{id}-{rank} {-score:.3f}")
        for ending, rows in (("ref", references), ("nbest", tabs), ("kaldi", kaldi)):
            (folder / f"{name}.{ending}").write_text("\n".join(rows) + "\n")
        with (folder / "costs").open("a") as file:
            file.write("\n".join(acoustic) + "\n")
    return folder


@pytest.fixture
def rescored(printed: Printed) -> Rows:
    """`rescored(*arguments)`: the lines and figures of `lm rescore --json`."""

    def run(*arguments: object) -> tuple[list[str], dict[str, Any]]:
        values = json.loads(printed("rescore", *arguments, "--json"))
        return values.pop("hypotheses"), values

    return run


def test_both_layouts_and_the_printed_list_give_the_same_choice(
    lstm_run: Path, lists: Path, rescored: Rows, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = ["--lm-weight=2", "--insertion-penalty=0.5"]
    references = ["--references", lists / "test.ref"]
    rows, values = rescored(lstm_run, lists / "test.nbest", *weights, *references)
    costs = ["--acoustic-costs", tmp_path / "costs"]
    (tmp_path / "costs").write_text((lists / "costs").read_text().replace(" ", "\t") + "\n")
    kaldi, kaldi_values = rescored(lstm_run, lists / "test.kaldi", *costs, *weights, *references)
    assert [row.replace("\t", " ") for row in rows] == kaldi
    assert values == kaldi_values
    printed, _ = rescored(lstm_run, lists / "test.nbest", *weights, "--all")
    caplog.set_level("INFO")
    assert main(["rescore", str(lstm_run), str(lists / "test.nbest"), *weights, "--all"]) == 0
    assert caplog.messages[-1].startswith("columns: utterance, acoustic score, ")
    path = tmp_path / "all.nbest"
    path.write_text("\n".join(printed) + "\n")
    again, _ = rescored(lstm_run, path, *weights, "--first-pass-share=1")
    assert again == rows
    first = {row.split("\t")[0]: row.split("\t")[3] for row in reversed(printed)}
    assert [f"{id}\t{text}" for id, text in reversed(first.items())] == rows
    path.write_text("a\t-123456.91\tthe cat\na\t-123456.42\tthe dog\n")
    large, _ = rescored(lstm_run, path, "--lm-weight=1", "--all")
    assert {row.split("\t")[1] for row in large} == {"-123456.91", "-123456.42"}


def test_files_of_costs_have_those_of_the_list_to_tune_on_too(
    lstm_run: Path, lists: Path, rescored: Rows, tmp_path: Path, complaint: Printed
) -> None:
    tuning = ["--tune", lists / "dev.kaldi", lists / "dev.ref"]
    arguments = [lstm_run, lists / "test.kaldi", *tuning, "--acoustic-costs"]
    _, values = rescored(*arguments, lists / "costs")
    assert values["development"]["hypotheses"] == len(read_nbest(str(lists / "dev.kaldi")).texts)
    rows = (lists / "costs").read_text().splitlines(keepends=True)
    (tmp_path / "test").write_text("".join(row for row in rows if row.startswith("test")))
    error = complaint("rescore", *arguments, tmp_path / "test")
    assert error.startswith(f"{lists / 'dev.kaldi'}, line 1: dev")
    assert error.endswith("has no cost in the files of costs")


def test_tuning_recovers_the_weights_that_the_references_were_made_with(
    lstm_run: Path, lists: Path, rescored: Rows, tmp_path: Path
) -> None:
    for name in ("dev", "test"):
        rows, _ = rescored(lstm_run, lists / f"{name}.nbest", "--lm-weight=2")
        (tmp_path / f"{name}.ref").write_text("\n".join(rows) + "\n")
    tuning = ["--tune", lists / "dev.nbest", tmp_path / "dev.ref"]
    references = ["--references", tmp_path / "test.ref"]
    rows, values = rescored(lstm_run, lists / "test.nbest", *references, *tuning)
    report, development, weights = (values[name] for name in ("report", "development", "weights"))
    assert (development["wer_after"], development["wer_oracle"]) == (0, 0)
    assert weights["lm_weight"] == pytest.approx(2, rel=0.5)
    assert report["wer_after"] < 0.2 * report["wer_before"]
    gained = report["wer_before"] - report["wer_after"]
    assert report["recovered"] == pytest.approx(gained / report["wer_before"])
    given = [f"--{name.replace('_', '-')}={weights[name]}" for name in list(weights)[:2]]
    again, fixed = rescored(lstm_run, lists / "test.nbest", *references, *given)
    assert (again, fixed["report"]) == (rows, report)


@pytest.fixture
def unknown(tmp_path: Path) -> Path:
    """An n-best list with three unknown words, in four places."""
    path = tmp_path / "unknown.nbest"
    rows = ["a\t-3\tthe zebra sees a gnu", "a\t-1\tthe cat sees a zebra", "b\t-2\tthe okapi"]
    path.write_text("\n".join([*rows, "b\t-3\tthe dog\n"]))
    return path


def lm_column(rows: list[str]) -> dict[str, float]:
    """The language-model score of each hypothesis printed by `--all`."""
    return {row.split("\t")[3]: float(row.split("\t")[2]) for row in rows}


def test_a_second_run_takes_its_share_and_a_vocabulary_size_applies_to_both(
    lstm_run: Path, transformer_run: Path, unknown: Path, rescored: Rows
) -> None:
    num_words = TrainedRun(lstm_run, "cpu").model.vocab_size
    for size, option in ((num_words - 1 + NUM_UNSEEN, "--all"), (num_words + 9, None)):
        options = ["--lm-weight=1", "--all", option or f"--vocabulary-size={size}"]
        for share, run in ((1, lstm_run), (0, transformer_run)):
            alone = lm_column(rescored(run, unknown, *options)[0])
            mixing = ["--with", transformer_run, f"--mixture={share}"]
            rows, values = rescored(lstm_run, unknown, *options, *mixing)
            assert lm_column(rows) == pytest.approx(alone, rel=1e-5)
            assert [each["vocabulary_size"] for each in values["unknown"]] == [size, size]


def test_unknown_words_share_p_unk(
    lstm_run: Path,
    unknown: Path,
    lists: Path,
    rescored: Rows,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = TrainedRun(lstm_run, "cpu")
    scorer = Scorer(run)
    size = run.model.vocab_size
    (lists / "one.nbest").write_text("c\t0\ta quagga\nc\t-1\ta gnu\n")
    (lists / "one.ref").write_text("c a gnu\n")
    tuning, fixed = ["--tune", lists / "one.nbest", lists / "one.ref"], ["--lm-weight=1"]
    for least, options, num_unseen, rule in (
        (NUM_UNSEEN, fixed, 10**6, "each of the 3 unknown words of the lists has 1/1,000,000 of"),
        (2, fixed, 4, f"has 1/4 of P(<unk>), as by --vocabulary-size={size + 3}"),
        (2, tuning, 5, f"has 1/5 of P(<unk>), as by --vocabulary-size={size + 4}"),
        (2, [*fixed, f"--vocabulary-size={size}"], 1, "has 1/1 of P(<unk>), as by --vocab"),
        (2, [*fixed, f"--vocabulary-size={size + 9}"], 10, "has 1/10 of P(<unk>), as by --vocab"),
    ):
        monkeypatch.setattr("lm.rescoring.models.NUM_UNSEEN", least)
        caplog.clear()
        rows, values = rescored(lstm_run, unknown, "--all", *options)
        for text, value in lm_column(rows).items():
            (score,) = scorer.sentences([text])
            expected = score.log_prob.sum() - score.is_oov.sum() * math.log(num_unseen)
            assert value == pytest.approx(expected, rel=1e-5)
        assert values["unknown"][0]["vocabulary_size"] == size - 1 + num_unseen
        assert any(rule in message for message in caplog.messages)


def test_unknown_pieces_have_all_of_p_unk(
    pieces_run: Path, unknown: Path, rescored: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    rows, values = rescored(pieces_run, unknown, "--lm-weight=1", "--all")
    texts, scores = zip(*lm_column(rows).items(), strict=True)
    found = Scorer(TrainedRun(pieces_run)).sentences(texts)
    assert scores == pytest.approx([each.log_prob.sum() for each in found], rel=1e-5)
    assert (values["unknown"][0]["vocabulary_size"], values["unknown"][0]["types"]) == (None, None)
    assert f"{pieces_run}: each unknown piece has P(<unk>)" in caplog.messages


def test_unknown_words_of_references_and_of_first_and_chosen_hypotheses_are_counted(
    lstm_run: Path, unknown: Path, rescored: Rows, tmp_path: Path
) -> None:
    references = tmp_path / "references"
    references.write_text("b the dog\na the zebra sees a gnu\n")
    rows, values = rescored(lstm_run, unknown, "--lm-weight=1", "--references", references)
    assert rows == ["a\tthe cat sees a zebra", "b\tthe dog"]
    counts = {"references": 2, "hypotheses": 4, "first": 3, "chosen": 1, "types": 3}
    assert counts.items() <= values["unknown"][0].items()
    without = rescored(lstm_run, unknown, "--lm-weight=1")[1]["unknown"][0]
    assert (without["references"], without["chosen"]) == (None, 1)


def test_run_and_arpa_model_share_p_unk_among_the_words_that_each_of_them_lacks(
    lstm_run: Path, unknown: Path, rescored: Rows, tmp_path: Path, complaint: Printed
) -> None:
    with_zebra = THE_CAT | {("zebra",): (-0.5, 0.0)}
    path = write(tmp_path / "model.arpa", with_zebra, 2)
    run = TrainedRun(lstm_run, "cpu")
    scorer = Scorer(run)
    size = run.model.vocab_size
    for options, expected_size in (
        ([], size - 1 + NUM_UNSEEN),
        ([f"--vocabulary-size={size + 6}"], size + 6),
    ):
        mixed = ["--arpa", path, "--mixture=0.3", "--lm-weight=1", "--all", *options]
        rows, values = rescored(lstm_run, unknown, *mixed)
        assert values["unknown"][0]["vocabulary_size"] == expected_size
        for text, value in lm_column(rows).items():
            (score,) = scorer.sentences([text])
            (arpa,) = ArpaScores(ArpaModel(path))([text])
            is_known = [word in ("the", "cat", "zebra", "</s>") for word in [*text.split(), "</s>"]]
            arpa -= np.where(is_known, 0.0, math.log(expected_size - 4))
            unseen = expected_size - (size - 1)
            ours = np.exp(score.log_prob) / np.where(score.is_oov, unseen, 1)
            expected = np.log(0.3 * ours + 0.7 * np.exp(arpa)).sum()
            assert value == pytest.approx(expected, rel=1e-5)
    write(path, with_zebra | {(f"w{k}",): (-2.0, 0.0) for k in range(size)}, 2)
    _, values = rescored(lstm_run, unknown, "--arpa", path, "--lm-weight=1")
    assert values["unknown"][0]["vocabulary_size"] == size + 4 + NUM_UNSEEN
    options = ["--arpa", str(path), "--lm-weight=1", f"--vocabulary-size={size + 4}"]
    message = f"vocabulary size {size + 4}: expected at least {size + 5}, one word more than {path}"
    assert complaint("rescore", lstm_run, unknown, *options).startswith(message)


def test_models_whose_tuned_weight_is_0_are_named(
    lstm_run: Path, lists: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lm.rescoring.weights.tune", lambda *_: Weights(lm_weight=0.0))
    caplog.set_level("INFO")
    tuning = ["--tune", f"{lists}/dev.nbest", f"{lists}/dev.ref"]
    assert main(["rescore", str(lstm_run), f"{lists}/test.nbest", *tuning]) == 0
    assert f"the tuned weight of {lstm_run} is 0: it is not used" in caplog.messages


def test_lattices_are_rescored_tuned_and_reported_as_lists(
    lstm_run: Path, lists: Path, rescored: Rows, tmp_path: Path
) -> None:
    for name in ("dev", "test"):
        tabs, lattices = list[str](), dict[str, list[str]]()
        for number, line in enumerate((lists / f"{name}.nbest").read_text().splitlines(), 1):
            id, score, text = line.split("\t")
            tabs.append(f"{id}\t{score}\t0\t{text}\n")
            words = text.split() or ["<eps>"]  # a chain of arcs
            nodes = [0, *range(100 * number, 100 * number + len(words) - 1), 1]
            costs = [f"0,{-float(score)}", *["0,0"] * (len(words) - 1)]
            arcs = zip(pairwise(nodes), words, costs, strict=True)
            rows = [f"{s} {t} {word} {cost}" for (s, t), word, cost in arcs]
            lattices.setdefault(id, []).extend(rows)
        (tmp_path / f"{name}.nbest").write_text("".join(tabs))
        blocks = ("\n".join([id, *rows, "1", ""]) for id, rows in lattices.items())
        (tmp_path / name).write_text("\n".join(blocks))
    references = ["--references", lists / "test.ref"]
    for weights in (
        ["--lm-weight=2", "--insertion-penalty=0.5"],
        ["--tune", tmp_path / "dev", lists / "dev.ref"],
    ):
        of_lists = [f"{each}.nbest" if each == tmp_path / "dev" else each for each in weights]
        expected, figures = rescored(lstm_run, tmp_path / "test.nbest", *of_lists, *references)
        rows, values = rescored(lstm_run, tmp_path / "test", *weights, *references, "--beam=99")
        assert rows == expected
        for name in ("wer_after", "wer_before", "wer_oracle", "substitutions", "hypotheses"):
            assert values["report"][name] == figures["report"][name], name


def test_a_penalty_is_for_what_it_is_tuned_for_and_labels_are_left_out(
    lstm_run: Path, rescored: Rows, tmp_path: Path
) -> None:
    for name, space in (("dev", ""), ("test", " ")):  # whose hypotheses have two words each
        pairs = [(-10, f"天地火{space}人水"), (-13, f"天地{space}人水")]
        rows = [f"{name}{k}\t{score}\t[noise] {text}" for k in range(9) for score, text in pairs]
        (tmp_path / name).write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "said").write_text("".join(f"dev{k} 天地人水\n" for k in range(9)))
    rows, _ = rescored(lstm_run, tmp_path / "test", "--tune", tmp_path / "dev", tmp_path / "said")
    assert rows == [f"test{k}\t天地 人水" for k in range(9)]
