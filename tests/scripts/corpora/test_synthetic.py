"""The synthetic corpus has the stated distribution and depends on its arguments alone."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from scripts.corpora.synthetic import WordModel, Zipf
from tests.scripts.conftest import Run

Ranks = NDArray[np.int64]


def test_equal_arguments_give_equal_text_and_other_seeds_other_text(
    tmp_path: Path, run_benchmark: Run
) -> None:
    options = ("--types=300", "--tokens=1007", "--held-out-tokens=205", "--no-progress")
    for name, seed in (("a", 4), ("b", 4), ("c", 5)):
        chosen = f"--out={tmp_path / name}", f"--seed={seed}"
        done = run_benchmark("scripts.corpora.synthetic", *options, *chosen)
        assert (done.returncode, done.stderr) == (0, "")
    a, b, c = (
        [(tmp_path / name / f"{split}.txt").read_text() for split in ("train", "valid", "test")]
        for name in "abc"
    )
    assert a == b
    assert len({*a, *c}) == 6
    assert [len(line.split()) for line in a[0].splitlines()] == [20] * 50 + [7]
    assert [len(text.split()) for text in a] == [1007, 205, 205]
    assert all(line == " ".join(line.split()) for text in a for line in text.splitlines())


@pytest.mark.parametrize("num_types", [1, 2, 4096, 4097, 10_000_000])
def test_the_quantile_function_inverts_the_cumulative_weights(num_types: int) -> None:
    zipf = Zipf(num_types)
    cumulative = np.cumsum(1 / np.arange(1, num_types + 1))
    assert zipf.total == pytest.approx(cumulative[-1], rel=1e-9)
    share = np.r_[np.linspace(0, 1, 20_000, endpoint=False), np.nextafter(1, 0)]
    rank = zipf.quantile(share)
    exact = np.searchsorted(cumulative, share * cumulative[-1], side="right") + 1
    assert (rank == exact).mean() > 0.999
    assert (rank[0], rank[-1]) == (1, num_types)
    assert (np.diff(rank) >= 0).all()


def ranks_of(markov: float) -> Ranks:
    """Ranks of 400,000 words in lines of 20."""
    model = WordModel(zipf=Zipf(2_000), markov=markov, seed=3)
    return np.concatenate(list(model.blocks(0, 400_000)))


def test_independent_words_follow_zipf() -> None:
    ranks = ranks_of(markov=0.0).reshape(-1)
    expected = 1 / np.arange(1, 2_001)
    expected *= len(ranks) / expected.sum()
    observed = np.bincount(ranks, minlength=2_001)
    assert (observed[0], observed.sum()) == (0, len(ranks))
    chi_square = ((observed[1:] - expected) ** 2 / expected).sum()
    assert abs(chi_square - 1_999) < 5 * (2 * 1_999) ** 0.5


def test_half_of_the_words_are_successors_of_the_previous_word() -> None:
    lines, independent = ranks_of(markov=0.5), ranks_of(markov=0.0)
    following = lines[:, 1:][lines[:, :-1] == 1]
    successors = np.argsort(-np.bincount(following))[:4]
    by_chance = np.isin(independent, successors).mean()
    expected = 0.5 + 0.5 * by_chance
    assert np.isin(following, successors).mean() == pytest.approx(expected, abs=0.01)
