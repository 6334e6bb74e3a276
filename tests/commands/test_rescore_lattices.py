"""`lm rescore` with lattices, with a subtracted model, and with labels that are no words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm.rescoring.nbest import read_nbest
from tests.commands.test_rescore import lm_column

Rescored = Callable[..., tuple[list[str], dict[str, Any]]]


def test_lattices_are_rescored_tuned_and_reported_as_lists(
    lstm_run: Path, lists: Path, rescored: Rescored, tmp_path: Path, complaint: Callable[..., str]
) -> None:
    for name in ("dev", "test"):
        nbest = read_nbest(str(lists / f"{name}.nbest"))
        each = zip(
            np.repeat(nbest.ids, nbest.num_hypotheses), nbest.scores, nbest.texts, strict=True
        )
        tabs = [f"{id}\t{score}\t0\t{text}\n" for id, (score,), text in each]
        (tmp_path / f"{name}.nbest").write_text("".join(tabs))
        rows, ends = list[str](), np.append(nbest.first[1:], len(nbest.texts))
        for id, first, end in zip(nbest.ids, nbest.first, ends, strict=True):
            rows += ["", id]
            state = 1
            for k in range(first, end):  # a chain of arcs for each hypothesis
                words = nbest.texts[k].split() or ["<eps>"]
                costs = [f"0,{-nbest.scores[k, 0]}", *["0,0"] * len(words)]
                nodes = [0, *range(state + 1, state + len(words)), 1]
                arcs = zip(nodes[:-1], nodes[1:], words, costs, strict=False)
                rows += [f"{s} {t} {word} {cost}" for s, t, word, cost in arcs]
                state += len(words)
            rows.append("1")
        (tmp_path / name).write_text("\n".join(rows[1:]) + "\n")
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
    error = complaint("rescore", lstm_run, lists / "test.nbest", "--lm-weight=1", "--beam=2")
    assert error.startswith("--beam applies to lattices")


def test_a_second_model_is_subtracted_from_lists_and_lattices(
    lstm_run: Path, transformer_run: Path, lists: Path, rescored: Rescored, tmp_path: Path
) -> None:
    (tmp_path / "nbest").write_text("u\t-3\tthe cat\nu\t-4\ta dog sees\nu\t-5\tthe old dog\n")
    rows = "0 1 the 0,3\n1 9 cat\n0 2 a 0,4\n2 3 dog\n3 9 sees\n0 4 the 0,5\n4 5 old\n5 9 dog\n9\n"
    (tmp_path / "lattice").write_text(f"u\n{rows}")
    options = ["--lm-weight=0", "--all"]
    ours, theirs = (
        lm_column(rescored(run, tmp_path / "nbest", *options)[0])
        for run in (lstm_run, transformer_run)
    )
    acoustic = {"the cat": -3, "a dog sees": -4, "the old dog": -5}
    best = {
        gamma: max(ours, key=lambda t: acoustic[t] + 0.7 * ours[t] + gamma * theirs[t])
        for gamma in (-9.0, -0.3, 0.0, 5.0)
    }
    assert len(set(best.values())) > 1
    for gamma, text in best.items():
        weights = ["--lm-weight=0.7", "--with", transformer_run, f"--second-weight={gamma}"]
        for name in ("nbest", "lattice"):
            found, values = rescored(lstm_run, tmp_path / name, *weights)
            assert found == [f"u\t{text}"]
            assert values["weights"]["second_weight"] == gamma
    tuning = ["--tune", lists / "dev.nbest", lists / "dev.ref", "--with", transformer_run]
    _, plain = rescored(lstm_run, lists / "test.nbest", *tuning[:3])
    _, values = rescored(lstm_run, lists / "test.nbest", *tuning, "--subtract")
    assert values["weights"]["mixture"] == 1
    assert values["weights"]["second_weight"] <= 0
    assert values["development"]["wer_after"] <= plain["development"]["wer_after"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--lm-weight=-1"], "--lm-weight must be at least 0, .*by --second-weight=-0.3"),
        (
            ["--lm-weight=1", "--second-weight=-1"],
            "--second-weight and --subtract require a second",
        ),
        (["--subtract", "--lm-weight=1"], "--second-weight and --subtract require a second model"),
        (["--subtract", "--lm-weight=1", "--arpa=x"], "--subtract requires --tune; without it"),
        (
            ["--lm-weight=1", "--arpa=x", "--second-weight=1", "--mixture=0.5"],
            "--second-weight excludes --mixture",
        ),
        (["--lm-weight=1", "--arpa=x", "--second-weight=nan"], "--second-weight must be finite"),
        (["--lm-weight=1", "--non-words=("], r"--non-words '\(': no regular expression"),
    ],
)
def test_mistakes_are_single_lines(
    options: list[str], error: str, lstm_run: Path, lists: Path, complaint: Callable[..., str]
) -> None:
    with pytest.raises(ValueError, match=error):
        raise ValueError(complaint("rescore", lstm_run, lists / "test.nbest", *options))


def test_labels_that_are_no_words_are_left_out_unless_they_are_words(
    lstm_run: Path, rescored: Rescored, tmp_path: Path
) -> None:
    (tmp_path / "nbest").write_text("u\t-3\tthe [noise] cat\n")
    for options, text in (([], "the cat"), (["--non-words="], "the [noise] cat")):
        rows, _ = rescored(lstm_run, tmp_path / "nbest", "--lm-weight=1", *options)
        assert rows == [f"u\t{text}"]
