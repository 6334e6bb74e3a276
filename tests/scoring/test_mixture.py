"""Mixtures with n-gram models: one mixture in every command and in Python; files, mistakes."""

import json
import math
from itertools import product
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

import lm
from data_prep.tokenizer.tokenizer import WordTokenizer
from lm.cli import main
from lm.mixed import MixedModel
from lm.run import TrainedRun
from lm.scoring import Scorer
from lm.scoring.mixture import RunNGram, mixed, tuned_weight
from tests.conftest import Printed, flip_bit
from tests.scoring.arpa_files import NGrams, definition, write

PREFIXES = ["", "the", "the old cat", "the zebra sees", "a dog sees the cat\nthe old"]


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


@pytest.fixture(scope="module")
def counted(
    lstm_run: Path, transformer_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Runs with n-gram models."""
    folders = {}
    for name, run in (("lstm", lstm_run), ("transformer", transformer_run)):
        folders[name] = copytree(run, tmp_path_factory.mktemp("counted") / name)
        assert main(["ngram", str(folders[name]), "--order=3"]) == 0
    return folders


def mixed_model(folder: Path, **settings: Any) -> MixedModel:
    model = lm.load(folder, device="cpu", ngram=True, **settings)
    assert isinstance(model, MixedModel)
    return model


@pytest.mark.parametrize("kind", ["arpa", "ngram"])
@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_perplexities_are_those_of_the_definition(
    name: str, kind: str, counted: dict[str, Path], printed: Printed, corpus: Path, tmp_path: Path
) -> None:
    folder, run = counted[name], TrainedRun(counted[name], "cpu")
    words, ngram, how = words_of(run), RunNGram.open(run), "--ngram"
    if kind == "arpa":
        how = f"--arpa={write_arpa(tmp_path / 'bigram.arpa', words)}"
    both: dict[str, list[Any]] = {}
    for split in ("valid", "test"):
        lines = (corpus / f"{split}.txt").read_text().splitlines()
        model = np.concatenate([score.log_prob for score in Scorer(run).stream(lines)])
        if kind == "arpa":
            both[split] = [np.exp(model), np.array(by_hand(words, lines)), model.astype(int) * 0]
        else:
            both[split] = [np.exp(model), *ngram.read(run.prepared.tokens(split))]

    def perplexity(split: str, weights: Any) -> float:
        p, log_q, length = both[split]
        share = weights[length]
        return math.exp(-np.log(share * p + (1 - share) * np.exp(log_q)).mean())

    def figures(*options: str) -> Any:
        values = json.loads(printed("evaluate", folder, "--json", how, *options))
        assert values["perplexity"] == pytest.approx(values["mixture"]["perplexity_model"])
        return values["mixture"]

    found = figures("--mixture=0.3")
    assert (found["weight"], found["valid_perplexity"]) == (0.3, None)
    for key, weight in (("", 0.3), ("_model", 1.0), ("_ngram", 0.0)):
        expected = perplexity("test", np.full(3, weight))
        assert found[f"perplexity{key}"] == pytest.approx(expected, rel=1e-5)
    tuned = figures(f"--text={corpus / 'test.txt'}")
    weights = np.array(tuned["weights"])
    assert len(weights) == (3 if kind == "ngram" else 1)
    best = perplexity("valid", weights)
    assert tuned["valid_perplexity"] == pytest.approx(best, rel=1e-5)
    assert tuned["perplexity"] == pytest.approx(perplexity("test", weights), rel=1e-5)
    for n, change in product(range(len(weights)), (-0.002, 0.002)):
        if (both["valid"][2] == n).sum() >= 100:  # else it is that of all tokens
            other = np.clip(weights + change * (np.arange(len(weights)) == n), 0, 1)
            assert perplexity("valid", other) >= best - 1e-9
    out = printed("evaluate", folder, how)
    assert "tuned on the validation split, perplexity" in out
    assert f"perplexity of the mixture             {tuned['perplexity']:.2f}" in out
    opened, text = figures("--open-vocabulary"), (corpus / "test.txt").read_text()
    spelling = float(-run.speller.log_prob(["zebra"]).sum()) / opened["tokens"]
    for key in ("", "_model", "_ngram"):
        expected = tuned[f"perplexity{key}"] * math.exp(spelling)
        assert opened[f"perplexity{key}"] == pytest.approx(expected, rel=1e-5)
    bits = opened["tokens"] * math.log2(opened["perplexity"]) / len(text.encode())
    assert (tuned["bits_per_byte"], opened["bits_per_byte"]) == (None, pytest.approx(bits))
    for each in (tuned, opened) if kind == "ngram" else ():
        loaded = mixed_model(folder, open_vocabulary=each is opened)
        assert loaded.perplexity(text) == pytest.approx(each["perplexity"], rel=1e-5)


def test_perplexity_takes_unk_for_a_word_unless_the_vocabulary_is_open(
    counted: dict[str, Path],
) -> None:
    text = "the zebra sees a gnu\n\nthe cat\n"
    sizes = [mixed_model(counted["lstm"], vocabulary_size=n).perplexity(text) for n in (None, 999)]
    assert sizes[0] == sizes[1] < 100
    model = mixed_model(counted["lstm"], open_vocabulary=True)
    scores = [each.tokens.log_prob for each in model.score(text.splitlines(), stream=True)]
    log_prob = np.concatenate(scores)
    assert model.perplexity(text) == pytest.approx(math.exp(-log_prob.mean()), rel=1e-5)


def test_the_tuned_weight_is_the_best_one_also_at_the_ends() -> None:
    p, q = np.log(np.random.default_rng(2).uniform(size=(2, 300)))
    weight = tuned_weight(p, q)
    totals = [mixed(p, q, each).sum() for each in (weight - 1e-3, weight, weight + 1e-3)]
    assert totals[1] == max(totals)
    assert tuned_weight(p, p - 1) == pytest.approx(1, abs=1e-9)
    assert tuned_weight(p - 1, p) == pytest.approx(0, abs=1e-9)
    assert tuned_weight(p, np.full(300, -np.inf)) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("size", [None, 1000])
@pytest.mark.parametrize("name", ["lstm", "transformer"])
@pytest.mark.filterwarnings("ignore:.* is given the probability of all unknown words")
def test_probabilities_add_up_to_1_and_agree_in_all_methods(
    name: str, size: int | None, counted: dict[str, Path]
) -> None:
    model = mixed_model(counted[name], vocabulary_size=size)
    words = [model.word(id) for id in range(model.vocab_size)]
    for prefix in PREFIXES:
        log_prob = model.log_prob(prefix).double()
        every = log_prob.exp()
        every[model.unk_id] *= model.unknown.num_unseen
        assert float(every.sum()) == pytest.approx(1, abs=1e-5)
        ids = [*range(model.vocab_size)]
        of_ids = model.candidate_log_prob(prefix, ids).tolist()
        assert of_ids == pytest.approx(log_prob.tolist(), abs=1e-5)
        state = model.start(prefix)
        steps = model.step_many([state] * len(ids), ids)
        assert [step.log_prob for step in steps] == pytest.approx(log_prob.tolist(), abs=1e-5)
        log_prob[model.unk_id] = -math.inf
        best = model.topk(prefix, 5)
        assert best[0][0] == words[int(log_prob.argmax())]
        assert [p for _, p in best] == pytest.approx(log_prob.topk(5)[0].tolist(), abs=1e-6)
        of_c = log_prob[[id for id, word in enumerate(words) if word.startswith("c")]]
        found = model.prefix_log_prob(prefix, "c"), model.complete(prefix, "c", 1)[0][1]
        assert found == pytest.approx((float(of_c.logsumexp(0)), float(of_c.max())), abs=1e-5)
    with pytest.raises(ValueError, match="without ngram=True"):
        model.continuation_log_prob([("the", " cat")])
    lines = ["the old cat sees a zebra", "a dog", ""]
    bits = model.surprisal(lines[1:], eos=True)["surprisal"]
    nats = sum(score.total for score in model.score(lines[1:]))
    assert -math.log(2) * bits.sum() == pytest.approx(nats, abs=1e-4)
    for line, score in zip(lines, model.score(lines), strict=True):
        state, total = model.start(), 0.0
        units: list[str | int] = [*line.split(), model.eos_id]
        for word in units:
            before, state = model.step(state, word)
            total += before
        assert score.log_prob.sum() == pytest.approx(total, abs=1e-4)
        assert state.ngram == model.start(line + "\n").ngram == model._ngram.tree.start


def test_the_mixture_is_that_of_the_commands(
    counted: dict[str, Path], printed: Printed, tmp_path: Path
) -> None:
    text, nbest = tmp_path / "text", tmp_path / "nbest"
    lines = ["the old cat sees a dog", "the the zebra"]
    text.write_text("\n".join(lines) + "\n")
    nbest.write_text("".join(f"u\t0\t{line}\n" for line in lines))
    folder = counted["lstm"]
    model = mixed_model(folder, vocabulary_size=2000)
    expected = [score.log_prob.sum() for score in model.score(lines)]
    options = ["--ngram", "--vocabulary-size=2000", "--unit=nats", "--format=json"]
    rows = printed("score", folder, text, *options).splitlines()
    assert [json.loads(row)["log_prob"] for row in rows[:-1]] == pytest.approx(expected, abs=1e-3)
    options = ["--ngram", "--vocabulary-size=2000", "--lm-weight=1", "--all"]
    rows = printed("rescore", folder, nbest, *options).splitlines()
    found = {row.split("\t")[3]: float(row.split("\t")[2]) for row in rows}
    assert [found[line] for line in lines] == pytest.approx(expected, abs=1e-3)


def test_what_a_mixture_has_not_is_refused(counted: dict[str, Path]) -> None:
    model, alone = mixed_model(counted["lstm"]), lm.load(counted["lstm"], device="cpu")
    for wrong in (
        model.generate,
        model.search,
        lambda: model.evaluate("the cat"),
        lambda: model.score(["the"], details=True),
        lambda: model.step(alone.start(), "the"),
        lambda: alone.step(model.start(), "the"),
        lambda: model.topk("the", 0),
        lambda: model.topk("the", model.vocab_size),
        lambda: model.perplexity(""),
    ):
        with pytest.raises(ValueError, match=r"."):
            wrong()


def test_files_are_refused_unless_they_belong_to_the_run(
    counted: dict[str, Path], tmp_path: Path, complaint: Printed
) -> None:
    good, number = (counted["lstm"] / "ngram.json").read_text(), 0
    content = json.loads(good)
    for changes, error in (
        ({"tokenizer_sha256": "0"}, "was made for another vocabulary: run `lm ngram"),
        ({"weights_sha256": "0"}, "was tuned for other weights of the run: run `lm ngram"),
        ({"sizes": content["sizes"][:2]}, "its sizes do not belong together"),
        ({"weights": [0.5]}, "its sizes do not belong together"),
        ({"order": 3}, "unknown key order"),
        ({"format_version": 9}, "has format version 9"),
        ({}, "ngram.npy is damaged: its SHA-256"),
    ):
        folder = copytree(counted["lstm"], tmp_path / str(number := number + 1))
        (folder / "ngram.json").write_text(json.dumps(content | changes))
        if not changes:
            flip_bit(folder / "ngram.npy")
        assert error in complaint("evaluate", folder, "--ngram")


def test_items_are_refused_and_pieces_are_not(
    items_run: Path, pieces_run: Path, tmp_path: Path, complaint: Printed, printed: Printed
) -> None:
    for command in (["ngram"], ["evaluate", "--ngram"]):
        assert "requires a text" in complaint(command[0], items_run, *command[1:])
    folder = copytree(pieces_run, tmp_path / "run")
    options = ["--order=3", "--mixture=0.25", "--json", f"--arpa={tmp_path / 'arpa'}"]
    values = json.loads(printed("ngram", folder, *options, "--prune", 0, 0, 999))
    assert (values["weights"], values["valid_perplexity"]) == ([0.25] * 3, None)
    assert values["ngrams"][2] == 0  # the trigrams are pruned
    model = mixed_model(folder)
    assert float(model.log_prob("the ca").double().exp().sum()) == pytest.approx(1, abs=1e-5)
    each = [
        json.loads(printed("evaluate", folder, "--json", *how))["mixture"]["perplexity"]
        for how in (["--mixture=0.25", f"--arpa={tmp_path / 'arpa'}"], ["--ngram"])
    ]
    assert each[0] == pytest.approx(each[1], rel=1e-5)
