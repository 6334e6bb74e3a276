"""Scores: the definition in fp64, sums over levels, independence of batches; unknown words."""

import math
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from data_prep.tokenizer.tokenizer import SentencePieceTokenizer, WordTokenizer
from lm.model import reader
from lm.output import ClassTree
from lm.scoring import LineScore, Scorer
from lm.scoring import scorer as scorer_module
from lm.scoring.layouts import Layout
from lm.scoring.unknown import UnknownWords, noted_words
from tests.conftest import toy_sentences
from tests.data_prep.conftest import trained_pieces
from tests.models import log_probs, run_of, small_model

WORDS = ["<eos>", "<unk>", "a", "b", "c", "d", "e"]
TEXT = ["a b c", "", "e zebra a a b", "d", "b c d e a b c d e a b c", "zebra zebra"]
BACKBONES = pytest.mark.parametrize("backbone", ["lstm", "transformer"])
KNOWN = WordTokenizer(["<eos>", "<unk>", "the", "cat", "sees", "do", "n't", "well", "-", "known"])


def make(
    backbone: str, tokenizer: Any = None, context: int = 6, layers: int = 1, **options: Any
) -> Scorer:
    tokenizer = tokenizer or WordTokenizer(WORDS)
    tree = ClassTree.two_level(torch.arange(tokenizer.vocab_size) % 3)
    model = small_model(tree, backbone, context, layers=layers)
    return Scorer(run_of(model, tokenizer, context), **options)


@pytest.fixture(scope="module")
def pieces() -> SentencePieceTokenizer:
    return trained_pieces(toy_sentences(0, 200), 36)


@BACKBONES
@pytest.mark.parametrize("has_pieces", [False, True])
def test_tokens_have_the_log_prob_rank_and_entropy_of_the_definition_and_words_have_sums(
    backbone: str, has_pieces: bool, pieces: SentencePieceTokenizer
) -> None:
    scorer = make(backbone, pieces if has_pieces else None)
    tokenizer, model = scorer.tokenizer, scorer.model
    lines = [*TEXT, "the cat sees", "  a  horse\u00e9 x ", "the <unk> fish <unk>", " "]
    for line, score in zip(lines, scorer.sentences(lines, details=True), strict=True):
        words, ids, word_of_id = tokenizer.align(line)
        targets = np.append(ids, tokenizer.eos_id).astype(np.int64)
        unit = np.append(word_of_id, len(words))
        log_prob = log_probs(model, [tokenizer.eos_id, *ids.tolist()])
        target = log_prob.gather(1, torch.from_numpy(targets)[:, None])
        entropy = -(log_prob.exp() * log_prob).sum(1)
        assert score.tokens.id.tolist() == targets.tolist()
        assert score.tokens.log_prob == pytest.approx(target[:, 0].numpy(), rel=1e-12)
        members = torch.arange(tokenizer.vocab_size) % 3  # the classes of `make`
        same = members[None, :] == members[torch.from_numpy(targets)][:, None]
        of_class = log_prob.exp().where(same, 0.0).sum(1).log()
        assert score.tokens.class_log_prob == pytest.approx(of_class.numpy(), rel=1e-9)
        assert score.tokens.rank is not None
        assert score.tokens.rank.tolist() == (1 + (log_prob > target).sum(1)).tolist()
        assert score.tokens.entropy == pytest.approx(entropy.numpy(), rel=1e-12)
        assert score.words == line.split()
        sums = np.bincount(unit, target[:, 0].numpy(), len(words) + 1)
        assert score.log_prob == pytest.approx(sums, rel=1e-12)
        assert set(np.flatnonzero(score.is_oov)) == set(unit[targets == tokenizer.unk_id])


def all_figures(scores: list[LineScore]) -> np.ndarray[Any, Any]:
    tokens = [score.tokens for score in scores]
    columns: Any = [(each.log_prob, each.rank, each.entropy) for each in tokens]
    return np.concatenate([np.stack(each, 1) for each in columns])


@BACKBONES
@pytest.mark.parametrize(("dtype", "digits"), [(torch.float64, 1e-13), (torch.float32, 3e-6)])
def test_scores_depend_on_batches_by_rounding_only(
    backbone: str, dtype: torch.dtype, digits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = make(backbone)
    scorer.model.to(dtype)
    expected = all_figures([next(scorer.sentences([line], details=True)) for line in TEXT])
    for size in (1, 4, 11, 1000):
        monkeypatch.setattr(reader, "BATCH_TOKENS", size)
        monkeypatch.setattr(scorer_module, "MAX_LOG_PROBS", 3 * size)
        for order in (range(6), [5, 2, 0, 1, 4, 3]):
            lines = [TEXT[k] for k in order]
            scores = dict(zip(order, scorer.sentences(lines, details=True), strict=True))
            assert all_figures([scores[k] for k in range(6)]) == pytest.approx(expected, rel=digits)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_stated_context_of_a_sentence_is_what_its_figures_depend_on(layers: int) -> None:
    scorer, words = make("transformer", context=3, layers=layers), list("abcdeedcbaabcde")
    (score,) = scorer.sentences([" ".join(words)])
    for changed in range(len(words)):
        (after,) = scorer.sentences([" ".join([*words[:changed], "zebra", *words[changed + 1 :]])])
        for unit in range(changed + 1, len(words) + 1):
            is_seen = changed >= unit - score.context[unit]
            assert (abs(after.log_prob[unit] - score.log_prob[unit]) > 1e-13) == is_seen


@pytest.mark.parametrize(
    ("backbone", "context"), [("lstm", 6), *(("transformer", context) for context in (2, 5, 6, 99))]
)
@pytest.mark.parametrize(("num_lines", "at_once"), [(1, None), (3, 1), (6, None), (6, 4)])
def test_a_token_of_a_stream_is_predicted_from_the_stated_context(
    backbone: str, context: int, num_lines: int, at_once: int | None
) -> None:
    scorer, lines = make(backbone, context=context), TEXT[:num_lines]
    ids = [0, *(id for line in lines for id in [*scorer.tokenizer.encode(line), 0])]
    scores = list(scorer.stream(lines, at_once=at_once))
    assert [len(score.log_prob) for score in scores] == [len(line.split()) + 1 for line in lines]
    place = 0
    for score in scores:
        for log_prob, before in zip(score.log_prob, score.context, strict=True):
            seen = ids[place + 1 - before : place + 1]
            expected = log_probs(scorer.model, seen)[-1, ids[place + 1]]
            assert log_prob == pytest.approx(float(expected), rel=1e-12)
            place += 1
    assert place == len(ids) - 1


@pytest.mark.parametrize("text", ["line", "all", "id"])
def test_a_line_is_answered_before_the_next_is_read(text: str) -> None:
    num_read = 0

    def lines() -> Iterator[str]:
        nonlocal num_read
        for num_read, line in enumerate(TEXT, 1):
            yield f"{num_read // 2}\t{line}"

    settings: dict[str, Any] = {"level": "sentence", "name": "json", "unit": "nats", "at_once": 1}
    layout = Layout(scorer=make("lstm"), has_ids=True, text=text, **settings)
    for number, _ in enumerate(islice(layout.rows(lines()), len(TEXT)), 1):
        assert num_read == number


def test_unseen_words_share_the_mass_of_unk() -> None:
    plain = make("lstm")
    shared = Scorer(run_of(plain.model, plain.tokenizer), vocabulary_size=16)
    num_unseen = 16 - 6  # 6 words are known, <eos> counted
    scores = (each.sentences(TEXT, details=True) for each in (plain, shared))
    for line, before, after in zip(TEXT, *scores, strict=True):
        lower = np.where(before.is_oov, math.log(num_unseen), 0)
        assert after.log_prob == pytest.approx(before.log_prob - lower, rel=1e-12)
        log_prob = log_probs(plain.model, [0, *plain.tokenizer.encode(line)])
        spread = log_prob[:, 1:2] - math.log(num_unseen)
        whole = torch.cat([log_prob[:, :1], log_prob[:, 2:], spread.expand(-1, num_unseen)], 1)
        assert whole.exp().sum(1).numpy() == pytest.approx(1, rel=1e-12)
        entropy = -(whole.exp() * whole).sum(1).numpy()
        assert after.tokens.entropy == pytest.approx(entropy, rel=1e-12)
        rank = 1 + (whole > torch.from_numpy(after.log_prob)[:, None] + 1e-12).sum(1)
        assert after.tokens.rank is not None
        assert after.tokens.rank.tolist() == rank.tolist()


def test_a_word_without_a_token_of_its_own_has_no_id(pieces: SentencePieceTokenizer) -> None:
    settings: Any = {"level": "word", "name": "kenlm", "unit": "nats", "has_ids": False}
    row = next(Layout(scorer=make("lstm", pieces), **settings).rows(["\u2603\t\u2603 the"]))
    assert [unit.split()[0] for unit in row.split("\t")[:2]] == ["\u2603=0", "\u2603=0"]


@pytest.mark.parametrize("byte_fallback", [False, True])
def test_pieces_are_aligned_with_the_word_that_they_spell(byte_fallback: bool) -> None:
    size = 36 + 256 * byte_fallback
    tokenizer = trained_pieces(toy_sentences(0, 200), size, byte_fallback=byte_fallback)
    lines = "the cat", "caf\u00e9\u2603x \u2603 the\u2603", " a   dog  ", "the <unk>cat <unk>", ""
    for line in lines:
        words, ids, word_of_id = tokenizer.align(line)
        assert ids.tolist() == tokenizer.encode(line)
        assert words == line.split()
        assert (np.diff(word_of_id) >= 0).all()
        for place, word in enumerate(words):
            spelled = tokenizer.decode(ids[word_of_id == place].tolist()).strip()
            pattern = re.escape(spelled.replace(" <unk>", "<unk>")).replace("<unk>", ".+")
            assert re.fullmatch(pattern, word), (spelled, word)


def test_words_with_punctuation_have_several_ids() -> None:
    words = ["<eos>", "<unk>", "no", ",", "it", "'", "."]
    tokenizer = WordTokenizer(words, lowercase=True, split_punctuation=True)
    words, ids, word_of_id = tokenizer.align("No, it.")
    assert (words, [*ids], [*word_of_id]) == (["No,", "it."], [2, 3, 4, 6], [0, 0, 1, 1])


def test_more_than_a_fifth_of_unknown_words_are_named() -> None:
    warning = UnknownWords(KNOWN, ["THE CAT sees", "THE a\u200bb"]).warning("references")
    assert warning is not None
    expected = "80 % of the words of the references are unknown, most often 'THE', 'CAT', "
    assert warning.startswith(expected + r"'a\u200bb': write them as in the training text (case,")
    text = ["このファイル -option -other", "ファイル -option", "開く 閉じる"]
    warning = UnknownWords(KNOWN, text).warning("text")
    assert "the text are unknown, as 'このファイル', 'ファイル', '開く', '閉じる': sep" in str(
        warning
    )
    for texts in (["the cat", "sees the ZEBRA"], ["", " "]):  # a fifth, and none
        assert UnknownWords(KNOWN, texts).warning("hypotheses") is None


def test_many_unknown_words_of_first_lines_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    lines = ["THE cat"] * 300
    assert list(noted_words(KNOWN, lines, "a.txt")) == lines
    (message,) = caplog.messages
    assert message.startswith("a.txt, first lines: 50 % of the words of the text are unknown, ")
    assert list(noted_words(KNOWN, ["the cat"] * 300, "a.txt")) == ["the cat"] * 300
    assert len(caplog.messages) == 1


def test_a_word_with_an_unknown_part_is_unknown(pieces: SentencePieceTokenizer) -> None:
    assert UnknownWords(pieces, ["the c\u2603t", "the cat \u2603"]).num_unknown == 2
    separated = WordTokenizer(["<eos>", "<unk>", "cat", "."], split_punctuation=True)
    assert UnknownWords(separated, ["cat. dog. cat"]).num_unknown == 1
    assert separated.unknown_occurrences(["dog. dog, cat"]) == ["dog", "dog", ","]
