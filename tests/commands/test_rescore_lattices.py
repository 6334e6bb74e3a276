"""`lm rescore` with lattices, and with labels that are no words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lm.rescoring.nbest import read_nbest

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
    option = f"--acoustic-costs={lists / 'costs'}"
    error = complaint("rescore", lstm_run, tmp_path / "test", "--lm-weight=1", option)
    assert error.endswith("files of costs belong to n-best lists in Kaldi's layout")


def test_labels_that_are_no_words_are_left_out_unless_they_are_words(
    lstm_run: Path, rescored: Rescored, tmp_path: Path
) -> None:
    (tmp_path / "nbest").write_text("u\t-3\tthe [noise] cat\n")
    for options, text in (([], "the cat"), (["--non-words="], "the [noise] cat")):
        rows, _ = rescored(lstm_run, tmp_path / "nbest", "--lm-weight=1", *options)
        assert rows == [f"u\t{text}"]
