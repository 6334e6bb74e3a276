"""Mixtures with an n-gram model: numbers of the definition, the same tokens, mistakes."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.tokenizer.tokenizer import WordTokenizer
from lm.run import TrainedRun
from lm.scoring import Scorer
from lm.scoring.mixture import mixed, tuned_weight
from tests.scoring.arpa_files import NGrams, definition, write


def bigrams(words: list[str]) -> NGrams:
    """All unigrams, and some bigrams; log10 P and back-off weights."""
    rng = np.random.default_rng(1)
    first, second = (rng.permutation(words)[:12].tolist() for _ in range(2))
    shares = np.log10(rng.dirichlet(np.ones(len(words)))).tolist()
    ngrams: NGrams = {("<s>",): (-99.0, -0.2)}
    ngrams |= {(word,): (share, -0.2) for word, share in zip(words, shares, strict=True)}
    pairs = [("<s>", "the"), *zip(first, second, strict=True)]
    return ngrams | {pair: (-0.25 - 0.01 * k, 0.0) for k, pair in enumerate(pairs)}


def write_arpa(path: Path, words: list[str]) -> Path:
    return write(path, bigrams(words), 2)


def by_hand(words: list[str], lines: list[str]) -> list[float]:
    """Log-probabilities in nats of words and line ends; a run lacks the zebra that the file has."""
    unknown = [line.replace("zebra", "<unk>").split() for line in lines]
    values = [definition(bigrams(words), line, 2) for line in unknown]
    return [value * math.log(10) for line in values for value in line]


def words_of(run: TrainedRun) -> list[str]:
    """The unigrams of the test's file: those of the run, one that it lacks, and special ones."""
    assert isinstance(run.tokenizer, WordTokenizer)
    return sorted({*run.tokenizer.words, "zebra", "</s>"} - {"<eos>"})


@pytest.mark.parametrize("name", ["lstm_run", "transformer_run"])
def test_perplexities_of_a_mixture_are_those_of_the_definition(
    name: str,
    request: pytest.FixtureRequest,
    corpus: Path,
    tmp_path: Path,
    printed: Callable[..., str],
) -> None:
    folder: Path = request.getfixturevalue(name)
    run = TrainedRun(folder, "cpu")
    words = words_of(run)
    path = write_arpa(tmp_path / "bigram.arpa", words)
    scorer = Scorer.of(run)
    both: dict[str, list[Any]] = {}
    for split in ("valid", "test"):
        lines = (corpus / f"{split}.txt").read_text().splitlines()
        model = np.concatenate([score.log_prob for score in scorer.stream(lines)])
        both[split] = [model, np.array(by_hand(words, lines))]
        assert len(both[split][0]) == len(both[split][1])

    def perplexity(split: str, weight: float) -> float:
        p, q = map(np.exp, both[split])
        return math.exp(-np.log(weight * p + (1 - weight) * q).mean())

    def figures(*options: str) -> dict[str, Any]:
        values = json.loads(printed("evaluate", folder, "--json", f"--arpa={path}", *options))
        assert values["perplexity"] == pytest.approx(values["mixture"]["perplexity_model"])
        mixture: dict[str, Any] = values["mixture"]
        return mixture

    found = figures("--mixture=0.3")
    assert (found["weight"], found["valid_perplexity"]) == (0.3, None)
    for key, weight in (("perplexity", 0.3), ("perplexity_model", 1.0), ("perplexity_ngram", 0.0)):
        assert found[key] == pytest.approx(perplexity("test", weight), rel=1e-5)
    tuned = figures(f"--text={corpus / 'test.txt'}")
    best = min((perplexity("valid", k / 1000), k / 1000) for k in range(1001))
    assert tuned["weight"] == pytest.approx(best[1], abs=1e-3)
    assert tuned["valid_perplexity"] == pytest.approx(best[0], rel=1e-5)
    assert tuned["perplexity"] == pytest.approx(perplexity("test", tuned["weight"]), rel=1e-5)
    out = printed("evaluate", folder, f"--arpa={path}")
    assert "tuned on the validation split, perplexity" in out
    assert f"perplexity of the mixture             {tuned['perplexity']:.2f}" in out
    (folder / "evaluate-test.json").unlink()


def test_the_tuned_weight_is_the_best_one_also_at_the_ends() -> None:
    rng = np.random.default_rng(2)
    p, q = np.log(rng.uniform(size=(2, 300)))
    weight = tuned_weight(p, q)
    totals = [mixed(p, q, each).sum() for each in (weight - 1e-3, weight, weight + 1e-3)]
    assert totals[1] == max(totals)
    assert tuned_weight(p, p - 1) == pytest.approx(1, abs=1e-9)
    assert tuned_weight(p - 1, p) == pytest.approx(0, abs=1e-9)
    assert tuned_weight(p, np.full(300, -np.inf)) == pytest.approx(1, abs=1e-9)


def test_a_model_of_pieces_is_mixed_with_ngrams_of_its_pieces(
    pieces_run: Path, tmp_path: Path, printed: Callable[..., str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sees a dog\n")
    command = ["evaluate", pieces_run, "--text", text, "--mixture=0.5", "--json", "--arpa"]
    tokenizer = TrainedRun(pieces_run, "cpu").tokenizer
    pieces = [tokenizer.token(id) for id in range(tokenizer.vocab_size)]
    assert "\u2581" in "".join(pieces)
    units = sorted({*pieces, "</s>"} - {"<eos>", "<s>"})
    values = json.loads(printed(*command, write_arpa(tmp_path / "pieces", units)))
    assert values["mixture"]["tokens"] == values["tokens"] > 6


def test_mistakes_are_single_lines(
    lstm_run: Path, corpus: Path, tmp_path: Path, complaint: Callable[..., str]
) -> None:
    path, text = tmp_path / "model.arpa", corpus / "test.txt"
    command = ["evaluate", lstm_run, "--text", text, "--mixture=0.5", "--arpa", path]
    good = write_arpa(path, words_of(TrainedRun(lstm_run, "cpu"))).read_text()
    for content, error in (
        (good.replace("</s>", "gnu"), f"{path} has no </s>"),
        (good.replace("\t<unk>\t", "\tgnu\t"), f"{path} has no <unk>, and the text has a word"),
        (good.replace("\tcat\t", "\tgnu\t"), f"{path} has no unigram 'cat', a word that the model"),
    ):
        path.write_text(content)
        assert complaint(*command).startswith(error)
