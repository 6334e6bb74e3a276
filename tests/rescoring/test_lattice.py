"""Lattices: both formats, mistakes, the best of all paths; weights, totals and word errors."""

import gzip
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lm
from data_prep.errors import UserError
from lm.rescoring.lattice import Lattice, read_lattices
from lm.rescoring.lattice_search import WordModel, Words, search, to_nbest
from lm.rescoring.models import ArpaScores
from lm.rescoring.nbest import Floats, NBest, read_nbest
from lm.rescoring.weights import ScoredList, Weights, tune
from lm.rescoring.word_errors import WordErrors, _distance, word_errors
from lm.scoring.arpa import ArpaModel
from tests.conftest import ADVERBS, NOUNS, VERBS
from tests.scoring.arpa_files import THE_CAT, write

SLF = """\
VERSION=1.0
base=10
lmscale=2 wdpenalty=-0.5
N=5 L=5
I=0 W=!NULL
I=1 W=the
I=2 W=a
I=3 W="cat"
I=4 W=!NULL
J=0 S=0 E=1 a=-1 l=-2
J=1 S=0 E=2 a=-2 l=-1
J=2 S=1 E=3 a=-1 l=-1
J=3 S=2 E=3 a=-1 l=-1.5
J=4 S=3 E=4 a=-0.25
"""
SLF_OF_LINKS = "# words belong to links\nbase=10 lmscale=2\nwdpenalty=-0.5\nstart=a end=d\n"
SLF_OF_LINKS += "I=a\nI=b\nI=c\nI=d\nJ=0 S=a E=b W=the a=-1 l=-2\nJ=1 S=a E=b W=a a=-2 l=-1\n"
SLF_OF_LINKS += "J=2 S=b E=c W=cat a=-1 l=-1\nJ=3 S=c E=d W=!NULL a=-0.25\n"
KALDI = "first\n0 1 the 2,1,3_4\n0 2 a 1,2,\n1 3 cat 1,1\n2 3 cat 1.5,1\n3 0,0.25,5\n\n"
KALDI += "second\n0 1 3 <eps> 0.5,0.5\n1 2 7 dog 1,2\n2\n"
DISTANCES = {"compiled": _distance, "python": vars(_distance)["py_func"]}


def paths(lattice: Lattice, node: int = 0) -> Iterator[tuple[Words, float, float]]:
    """All paths to the end: words, acoustic and first-pass score."""
    if node == lattice.num_nodes - 1:
        yield (), 0.0, 0.0
    for arc in lattice.leaving[node]:
        for words, acoustic, first_pass in paths(lattice, arc.target):
            word = () if arc.word is None else (arc.word,)
            yield (*word, *words), acoustic + arc.acoustic, first_pass + arc.first_pass


def test_both_formats_have_the_same_paths() -> None:
    nats = math.log(10)
    the_cat = (("the", "cat"), -2.25 * nats, -3 * nats)
    (slf,) = read_lattices("folder/u1.slf", SLF.splitlines())
    (links,) = read_lattices("folder/u2.slf.gz", SLF_OF_LINKS.splitlines())
    assert (slf.id, links.id, slf.lm_scale) == ("u1", "u2", 2)
    assert slf.word_penalty == pytest.approx(0.5 * nats)
    for lattice, first_pass in ((slf, -2.5), (links, -2)):
        found = sorted(paths(lattice), reverse=True)
        values = [the_cat, (("a", "cat"), -3.25 * nats, first_pass * nats)]
        for (words, *scores), (given, *others) in zip(found, values, strict=True):
            assert words == given
            assert scores == pytest.approx(others)
    first, second = read_lattices("lattices", KALDI.splitlines())
    found = sorted(paths(first), reverse=True)
    assert found == [(("the", "cat"), -2.25, -3), (("a", "cat"), -3.25, -2.5)]
    assert [first.id, *paths(second)] == ["first", (("dog",), -2.5, -1.5)]


def made_lattice(seed: int) -> Lattice:
    """A lattice of six layers of one to three nodes, with alternatives, silence and skips."""
    rng = random.Random(seed)
    vocabulary = ["the", "a", "old", "zebra", *NOUNS[:3], *VERBS[:3], *ADVERBS[:2]]
    layers = [["0"], *[[f"{k}{n}" for n in range(rng.randint(1, 3))] for k in range(1, 6)], ["end"]]
    rows = []
    for k, layer in enumerate(layers[:-1]):
        for source in layer:
            for target in layers[k + 1] + (layers[k + 2] if k < 4 else [])[:1]:
                for _ in range(rng.randint(1, 2)):
                    word = rng.choice([*vocabulary, "<eps>"])
                    costs = f"{rng.uniform(0, 6):.3f},{rng.uniform(0, 6):.3f}"
                    rows.append((source, target, word, costs))
    number = {name: k for k, name in enumerate(dict.fromkeys(name for r in rows for name in r[:2]))}
    lines = [f"{number[s]} {number[t]} {word} {costs}" for s, t, word, costs in rows]
    (lattice,) = read_lattices("made", ["u", *lines, str(number["end"])])
    return lattice


def best_of_all(
    lattice: Lattice, weights: Weights, lm_scores: Callable[[list[str]], list[np.ndarray]]
) -> dict[Words, float]:
    """The total of each sequence of words of a lattice, by its best path."""
    totals: dict[Words, float] = {}
    texts = sorted({" ".join(words) for words, *_ in paths(lattice)})
    lm_score = dict(zip(texts, (float(s.sum()) for s in lm_scores(texts)), strict=True))
    for words, acoustic, first_pass in paths(lattice):
        r = weights.first_pass_share
        language = (1 - r) * lm_score[" ".join(words)] + r * first_pass
        value = acoustic + weights.lm_weight * language - weights.insertion_penalty * len(words)
        totals[words] = max(totals.get(words, -math.inf), value)
    return totals


@pytest.mark.parametrize("name", ["lstm_run", "transformer_run", "both"])
def test_a_large_beam_is_exact(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    arpa = ArpaScores(ArpaModel(write(tmp_path / "model.arpa", THE_CAT, 2)), 1000)
    has_two = name == "both"
    run: Path = request.getfixturevalue("lstm_run" if has_two else name)
    model = lm.load(run, vocabulary_size=1000)
    models: list[WordModel] = [model, arpa] if has_two else [model]
    share = 0.3 if has_two else 1.0

    def lm_scores(texts: list[str]) -> list[np.ndarray]:
        with np.errstate(divide="ignore"):
            pairs = zip([score.log_prob for score in model.score(texts)], arpa(texts), strict=True)
            shares = np.log([share, 1 - share])
            return [np.logaddexp(shares[0] + x, shares[1] + y) for x, y in pairs]

    weights = Weights(lm_weight=0.7, insertion_penalty=-0.4, first_pass_share=0.25, mixture=share)
    lattice = made_lattice(3)
    totals = best_of_all(lattice, weights, lm_scores)
    assert len(totals) > 100
    found = search(lattice, weights, len(list(paths(lattice))), models)
    assert [words for words, _ in found][:20] == sorted(totals, key=lambda w: -totals[w])[:20]
    assert len(found) == len(totals)
    assert totals[search(lattice, weights, 2, models)[0][0]] <= totals[found[0][0]]


def test_a_folder_of_slf_files_is_a_list_of_lattices(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no lattice here \(expected \*.slf, "):
        read_lattices(str(tmp_path))
    (tmp_path / "b.lat").write_text(SLF)
    (tmp_path / "a.slf.gz").write_bytes(gzip.compress(SLF_OF_LINKS.encode()))
    (tmp_path / "notes").write_text("no lattice")
    first, second = read_lattices(str(tmp_path))
    assert (first.id, second.id) == ("a", "b")
    assert {words for words, *_ in paths(first)} == {words for words, *_ in paths(second)}
    (tmp_path / "c.htk").write_text(re.sub(" l=.*", "", SLF))
    with pytest.raises(UserError, match="some lattices have scores of a language model, others"):
        read_lattices(str(tmp_path))


def test_scales_are_relative_to_that_of_the_acoustic_scores() -> None:
    text = SLF.replace("lmscale=2", "acscale=0.5 lmscale=2")
    (lattice,) = read_lattices("x.slf", text.splitlines())
    assert lattice.lm_scale == 4
    assert lattice.word_penalty == pytest.approx(math.log(10))
    text = text.replace("E=1 a", "E=1 r=-3 a")
    for scale, relative in (("", 2), (" prscale=0.25", 0.5)):  # of pronunciations
        (lattice,) = read_lattices("x.slf", text.replace("=0.5", f"=0.5{scale}", 1).splitlines())
        acoustic = {words: score for words, score, _ in paths(lattice)}["the", "cat"]
        assert acoustic == pytest.approx((-2.25 - 3 * relative) * math.log(10))


def test_words_of_probability_0_are_chosen_by_the_acoustic_score_alone(tmp_path: Path) -> None:
    zero = THE_CAT | {("the",): (-math.inf, 0.0), ("dog",): (-math.inf, 0.0)}
    models = [ArpaScores(ArpaModel(write(tmp_path / "model.arpa", zero, 2)))]
    lines = ["u", "0 1 the 1,1", "0 1 dog 1,2", "0 1 cat 1,3", "1"]
    for weights, best in (
        (Weights(lm_weight=0.0), "the"),
        (Weights(lm_weight=1.0, first_pass_share=1.0), "the"),
        (Weights(lm_weight=1.0), "cat"),
    ):
        nbest = to_nbest("x", read_lattices("x", lines), weights, models, 9)
        scored = ScoredList(nbest, [models[0](nbest.texts)])
        (chosen,) = scored.choose(scored.totals(weights))
        assert nbest.texts[chosen] == best


def test_scores_in_base_0_are_probabilities() -> None:
    text = "base=0\nI=0\nI=1 W=the\nI=2\nJ=0 S=0 E=1 a=0.1 l=0.2\nJ=1 S=1 E=2 a=0.5\n"
    for penalty, nats in (("0.0", 0.0), ("0.25", math.log(4))):
        lines = text.replace("=0\n", f"=0 wdpenalty={penalty}\n", 1).splitlines()
        (lattice,) = read_lattices("x.slf", lines)
        assert lattice.word_penalty == pytest.approx(nats)
    ((words, *scores),) = paths(lattice)
    assert words == ("the",)
    assert scores == pytest.approx([math.log(0.05), math.log(0.2)])


@pytest.mark.parametrize(
    ("header", "id"),
    [
        *(("", "file"), ("UTTERANCE=an4.01", "an4.01")),
        *(("U=data/one.mfc", "one"), ('UTTERANCE="two.lat"', "two")),
    ],
)
def test_the_header_of_an_slf_file_names_the_utterance(header: str, id: str) -> None:
    (lattice,) = read_lattices("folder/file.slf", [header, *SLF.splitlines()])
    assert lattice.id == id


def test_the_first_pass_is_that_of_the_lattice_alone() -> None:
    for seed in range(6):
        lattice = made_lattice(seed)
        nbest = to_nbest("made", [lattice])
        weights = Weights(lm_weight=lattice.lm_scale, first_pass_share=1.0)
        by_words = best_of_all(lattice, weights, lambda texts: [np.zeros(1) for _ in texts])
        totals = {" ".join(words): total for words, total in by_words.items()}
        best = sorted(totals, key=lambda text: -totals[text])[:100]
        assert nbest.texts == best
        assert nbest.scores @ [1, lattice.lm_scale] == pytest.approx([totals[t] for t in best])


def nbest_of(texts: list[str], scores: Floats) -> NBest:
    """A list with two hypotheses per utterance."""
    ids, first = [f"u{k}" for k in range(len(texts) // 2)], np.arange(0, len(texts), 2)
    return NBest(name="made", separator="\t", ids=ids, first=first, texts=texts, scores=scores)


def scored_list(scores: Floats, texts: list[str], models: Sequence[Sequence[Any]]) -> ScoredList:
    """Such a list, and given log-probabilities of words."""
    return ScoredList(nbest_of(texts, scores), [list(map(np.array, each)) for each in models])


def test_a_tuned_mixture_has_no_more_errors_than_either_model_alone() -> None:
    rng = np.random.default_rng(1)
    for _ in range(12):
        texts, acoustic = ["a", "b"] * 15, rng.normal(size=(30, 1))
        models = [[[value, 0.0] for value in rng.normal(size=30) - 3] for _ in range(2)]
        errors = WordErrors(counts=rng.integers(0, 3, (30, 1)), references=["a"] * 15)

        def fewest(chosen: list[list[list[float]]]) -> int:
            scored = scored_list(acoustic, texts, chosen)  # noqa: B023
            weights = tune(scored, errors)  # noqa: B023
            return int(errors.errors[scored.choose(scored.totals(weights))].sum())  # noqa: B023

        assert fewest(models) <= min(fewest(models[:1]), fewest(models[1:]))


@pytest.mark.parametrize(
    "weights",
    [
        Weights(lm_weight=2.0, insertion_penalty=0.25, mixture=0.3),
        Weights(lm_weight=0.5, first_pass_share=0.25, mixture=0.0),
        Weights(lm_weight=0.0, insertion_penalty=-1.0, first_pass_share=1.0),
    ],
)
@pytest.mark.parametrize("num_scores", [0, 1, 2])
def test_totals_are_those_of_the_definition(weights: Weights, num_scores: int) -> None:
    rng, texts = np.random.default_rng(num_scores), ["a", "a b", "", "b a b"]
    scores, share = rng.normal(size=(4, num_scores)), weights.mixture
    models = [[-rng.random(len(text.split()) + 1) for text in texts] for _ in range(2)]
    found = scored_list(scores, texts, models).totals(weights)
    for k, text in enumerate(texts):
        first, second = models[0][k], models[1][k]
        language = np.log(share * np.exp(first) + (1 - share) * np.exp(second)).sum()
        if num_scores > 1:
            r = weights.first_pass_share
            language = (1 - r) * language + r * scores[k, 1]
        expected = weights.lm_weight * language
        expected += scores[k, :1].sum() - weights.insertion_penalty * len(text.split())
        assert found[k] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("weights", "unused"),
    [
        (Weights(lm_weight=1.0, mixture=0.5, first_pass_share=0.5), []),
        (Weights(lm_weight=1.0, mixture=0.0, first_pass_share=0.5), ["run"]),
        (Weights(lm_weight=1.0, mixture=1.0, first_pass_share=0.0), ["arpa", "the first pass"]),
        (Weights(lm_weight=1.0, mixture=0.5, first_pass_share=1.0), ["run", "arpa"]),
        (Weights(lm_weight=0.0), ["run", "arpa", "the first pass"]),
    ],
)
def test_models_without_a_weight_are_unused(weights: Weights, unused: list[str]) -> None:
    assert weights.unused(run="run", second="arpa", has_first_pass=True) == unused
    alone = weights.unused(run="run", second=None, has_first_pass=False)
    assert alone == [name for name in unused if name == "run"]


def definition(reference: Sequence[str], hypothesis: Sequence[str]) -> tuple[int, ...]:
    """Errors, minus equal words, substitutions, insertions, deletions: the least, recursively."""

    @cache
    def least(i: int, j: int) -> tuple[int, ...]:
        if i == j == 0:
            return 0, 0, 0, 0, 0
        steps = []
        if i and j:
            equal = reference[i - 1] == hypothesis[j - 1]
            steps.append((least(i - 1, j - 1), (0, -1, 0, 0, 0) if equal else (1, 0, 1, 0, 0)))
        if j:
            steps.append((least(i, j - 1), (1, 0, 0, 1, 0)))
        if i:
            steps.append((least(i - 1, j), (1, 0, 0, 0, 1)))
        return min(tuple(a + b for a, b in zip(x, y, strict=True)) for x, y in steps)

    return least(len(reference), len(hypothesis))


@pytest.mark.parametrize("distance", DISTANCES.values(), ids=DISTANCES)
def test_word_errors_are_the_edit_distance_with_the_most_equal_words(
    distance: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.rescoring.word_errors._distance", distance)
    rng = random.Random(1)
    for _ in range(300):
        first, second = (rng.choices("abcd", k=rng.randrange(8)) for _ in range(2))
        total, _, *kinds = definition(first, second)
        found = word_errors(first, second)
        assert list(found) == kinds
        assert sum(found) == total
    assert word_errors(["a", "b"], ["b", "c"]) == (0, 1, 1)


def test_letters_with_their_marks_apart_are_equal() -> None:
    nbest = read_nbest("a", lines=["u\tte\u0301l e\u0301"])
    assert WordErrors.of([["t\xe9l", "\xe9"]], nbest).counts.sum() == 0


def test_intervals_of_error_rates_are_those_of_samples_of_utterances() -> None:
    rng, size = np.random.default_rng(3), 400
    nbest = nbest_of(["a b c d"] * (2 * size), np.zeros((2 * size, 0)))
    counts = rng.integers(0, 3, (2 * size, 3)) // 2
    errors = WordErrors(counts=counts, references=["a b c d"] * size)
    report = errors.report(nbest, nbest.first + 1)
    assert report == errors.report(nbest, nbest.first + 1)
    alone = WordErrors(counts=counts[:2], references=["a b c d"])
    ends = alone.report(nbest_of(["a b c d"] * 2, np.zeros((2, 0))), nbest.first[:1] + 1)
    assert [ends[f"wer_{name}"] for name in ("after_low", "change_high")] == [None, None]
    kinds = [report[name] for name in ("substitutions", "insertions", "deletions")]
    assert kinds == counts[1::2].sum(0).tolist()
    after, change = counts[1::2].sum(1), (counts[1::2] - counts[::2]).sum(1)
    for name, each in (("after", after), ("change", change)):
        mean, error = 25 * each.mean(), 25 * each.std() / size**0.5  # four words each
        assert report[f"wer_{name}_low"] == pytest.approx(mean - 1.96 * error, abs=error / 4)
        assert report[f"wer_{name}_high"] == pytest.approx(mean + 1.96 * error, abs=error / 4)
