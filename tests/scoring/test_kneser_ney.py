"""The Kneser–Ney model has the probabilities of its equations, which sum to 1."""

import json
import math
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest

from data_prep.prepare import prepare
from data_prep.settings import DataConfig, SplitFiles, TokenizerConfig
from data_prep.tokenizer.tokenizer import WordTokenizer
from lm.scoring.mixture import ngram_log_probs
from lm.scoring.ngram import NGramModel
from scripts.benchmarks.kneser_ney import KneserNey
from tests.scripts.conftest import Run

NUM_WORDS, EOS = 400, 0
BEGIN = NUM_WORDS
NGram = tuple[int, ...]


def lines() -> list[list[int]]:
    """Lines of words by inverse rank."""
    random = Random(3)
    words = range(1, NUM_WORDS)
    weights = [1 / word for word in words]
    return [random.choices(words, weights, k=random.randint(0, 9)) for _ in range(500)]


class Definition:
    """Equations (1) and (2), of n-grams that are counted one by one."""

    def __init__(self, text: list[list[int]], order: int) -> None:
        padded = [[BEGIN, *line, EOS] for line in text]
        counts = [
            Counter(tuple(line[i : i + n]) for line in padded for i in range(len(line) - n + 1))
            for n in range(1, order + 1)
        ]
        self.adjusted = [Counter(gram[1:] for gram in longer) for longer in counts[1:]]
        self.adjusted.append(counts[-1])
        for adjusted, count in zip(self.adjusted[1:], counts[1:], strict=True):
            adjusted |= {gram: count[gram] for gram in count if gram[0] == BEGIN}
        self.counts_of_counts = [Counter(each.values()) for each in self.adjusted]

    def discount(self, n: int, count: int) -> float:
        """The function D."""
        number = self.counts_of_counts[n - 1]
        k, y = min(count, 3), number[1] / (number[1] + 2 * number[2])
        value = k - (k + 1) * y * number[k + 1] / number[k] if k else 0.0
        assert 0 <= value <= k, "the text is too small"
        return value

    def prob(self, history: NGram, word: int) -> float:
        """P(word | history); the history is one that occurs."""
        n = len(history) + 1
        counts = {w: self.adjusted[n - 1][(*history, w)] for w in range(NUM_WORDS)}
        total, count = sum(counts.values()), counts[word]
        lower = self.prob(history[1:], word) if history else 1 / NUM_WORDS
        gamma = sum(self.discount(n, c) for c in counts.values()) / total
        return (count - self.discount(n, count)) / total + gamma * lower


def test_the_arpa_file_has_the_probabilities_of_the_definition(tmp_path: Path) -> None:
    text = lines()
    tokens = np.array([token for line in text for token in [*line, EOS]])
    names = ["<eos>", "<unk>", *(f"w{word}" for word in range(2, NUM_WORDS))]
    model = KneserNey(tokens, NUM_WORDS, EOS, 3)
    model.write_arpa(tmp_path / "arpa", ["</s>", *names[1:], "<s>"])
    ngram, tokenizer = NGramModel(tmp_path / "arpa"), WordTokenizer(names)
    definition, words = Definition(text, 3), range(NUM_WORDS)
    for before in ([], text[1][:1], text[2][:3], [150, 2]):
        history: NGram = (BEGIN, *before)[-2:]
        while history and not any(
            gram[:-1] == history for gram in definition.adjusted[len(history)]
        ):
            history = history[1:]
        texts = [np.array([*before, word]) for word in words]
        probs = [math.exp(ngram_log_probs(ngram, tokenizer, text)[-1]) for text in texts]
        assert sum(probs) == pytest.approx(1, abs=1e-5)
        assert probs == pytest.approx([definition.prob(history, word) for word in words], rel=1e-5)


def test_log_probs_without_a_file_are_those_of_the_arpa_file(tmp_path: Path) -> None:
    tokens = np.array([token for line in lines() for token in [*line, EOS]])
    train, text = tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]
    names = ["<eos>", "<unk>", *(f"w{word}" for word in range(2, NUM_WORDS))]
    for order in (2, 4):
        model = KneserNey(train, NUM_WORDS, EOS, order)
        model.write_arpa(tmp_path / "arpa", ["</s>", *names[1:], "<s>"])
        ngram = NGramModel(tmp_path / "arpa")
        expected = ngram_log_probs(ngram, WordTokenizer(names), text)
        assert model.log_prob(text) == pytest.approx(expected, rel=1e-5)
        assert np.isin(text, train).mean() < 1  # words that training lacks are among them


def test_a_part_of_the_text_is_the_beginnings_of_its_streams(
    tmp_path: Path, run_benchmark: Run
) -> None:
    for split, text in (("train", "a b\nb c\na c\na d\n"), ("valid", "a c\nz b\n")):
        (tmp_path / f"{split}.txt").write_text(text)
    data = DataConfig(dir=str(tmp_path), files=SplitFiles(train="train.txt", valid="valid.txt"))
    prepared = prepare(data, TokenizerConfig(), None, tmp_path / "data", progress=False)
    options = "--split=valid", "--order=2", "--tokens=6", "--streams=2"
    row = json.loads(run_benchmark("kneser_ney", prepared.folder, *options).stdout)
    train, valid = (prepared.tokens(split).astype(np.int64) for split in ("train", "valid"))
    model = KneserNey(np.r_[train[:3], train[6:9]], prepared.vocab_size, prepared.eos_id, 2)
    log_prob = model.log_prob(valid)
    assert row["counted_tokens"] == 6
    assert row["perplexity"] == pytest.approx(np.exp(-log_prob.mean()))
    known = log_prob[valid != prepared.unk_id]
    assert (len(known), len(valid)) == (5, 6)
    assert row["perplexity_excluding_oov"] == pytest.approx(np.exp(-known.mean()))
    done = run_benchmark("kneser_ney", prepared.folder, "--split=valid", "--order=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("--order must be at least 2, got 1\n")
