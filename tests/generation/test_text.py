"""Text: what a sample depends on, its distribution, where it stops, and how prompts are read."""

import random
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chi2

import lm
from data_prep.tokenizer.tokenizer import WordTokenizer
from lm.generation import Sampling, generate_text, text
from lm.generation.text import Continuation, encode_prompt
from lm.output import ClassTree
from tests.models import log_probs, run_of, small_model

TOKENIZER = WordTokenizer(["<eos>", "<unk>", "a", "b"])
TWO_LEVEL = ClassTree.two_level([0, 1, 1, 0])


def test_text_before_the_first_stop_string_is_kept_however_it_is_cut_into_pieces() -> None:
    rng = random.Random(0)
    for _ in range(5000):
        whole = "".join(rng.choices("ab", k=rng.randrange(12)))
        stop = ["".join(rng.choices("ab", k=rng.randrange(1, 5))) for _ in range(rng.randrange(3))]
        cuts = sorted(rng.choices(range(len(whole) + 1), k=4))
        pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        ends = [whole.find(each) for each in stop if each in whole]
        decoder: Any = SimpleNamespace(eos_id=0, stream_decode=partial(map, pieces.__getitem__))
        grows = Continuation(decoder, "", len(pieces), stop)
        while not grows.is_complete:
            grows.append(len(grows.tokens))
        assert "".join(grows.pieces) == whole[: min(ends, default=len(whole))]


def drawn(num_samples: int, seed: int = 1, **options: Any) -> list[list[int]]:
    """Samples of eight tokens after the prompts `b` and `a`, by a random model."""
    torch.manual_seed(0)
    options |= {"num_tokens": 8, "num_samples": num_samples, "seed": seed, "allow_unk": True}
    results = generate_text(run_of(small_model(TWO_LEVEL), TOKENIZER), ["b", "a"], **options)
    return [sample.tokens for sample in list(results)[1]]


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.5), Sampling(repetition_penalty=2.0)], ids=str
)
def test_a_sample_depends_on_its_number_and_not_on_the_others(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = drawn(50, sampling=sampling)
    assert drawn(7, sampling=sampling) == many[:7]
    assert drawn(50, 2, sampling=sampling) != many
    ended = drawn(50, sampling=sampling, stop=["\n"])
    ends = [sample.index(0) + 1 if 0 in sample else 8 for sample in many]
    assert len(set(ends)) > 3
    assert ended == [sample[:end] for sample, end in zip(many, ends, strict=True)]
    monkeypatch.setattr(text, "STATE_BYTES", 20 * text.state_bytes(small_model(TWO_LEVEL), 0))
    assert drawn(50, sampling=sampling) == many


@pytest.mark.parametrize("penalty", [1.0, 2.5])
def test_frequencies_of_continuations_match_products_of_stated_distributions(
    penalty: float,
) -> None:
    """The penalty applies to the words of the prompt and those drawn, but not to `<eos>`, 3."""
    model = small_model(ClassTree.huffman([5, 3, 1, 1]))
    tokenizer = WordTokenizer(["<unk>", "a", "b", "<eos>"])
    options: dict[str, Any] = {"sampling": Sampling(repetition_penalty=penalty)}
    options |= {"num_tokens": 3, "num_samples": 20_000, "allow_unk": True}
    (samples,) = generate_text(run_of(model, tokenizer), ["a"], **options)
    tokens = torch.tensor([sample.tokens for sample in samples]) @ torch.tensor([16, 4, 1])
    probs, prompt = [], [3, 1]
    for words in product(range(4), repeat=3):
        log_prob = log_probs(model, [*prompt, *words[:-1]])[1:]
        total = 0.0
        for step, word in enumerate(words):
            log_prob[step, sorted({*prompt, *words[:step]} - {3})] *= penalty
            total += float(log_prob[step].log_softmax(0)[word])
        probs.append(total)
    expected = 20_000 * torch.tensor(probs, dtype=torch.float64).exp()
    assert float(expected.sum()) == pytest.approx(20_000)
    counts = torch.bincount(tokens, minlength=64)
    often = expected > 5
    statistic = float(((counts - expected) ** 2 / expected)[often].sum())
    assert chi2.sf(statistic, int(often.sum()) - 1) > 1e-4


def test_lines_of_prompts_are_separated_by_eos() -> None:
    assert encode_prompt(TOKENIZER, "") == [0]
    assert encode_prompt(TOKENIZER, "a b\n\na") == [0, 2, 3, 0, 0, 2]


def test_a_space_at_the_end_of_a_prompt_begins_the_next_piece(pieces_run: Path) -> None:
    model = lm.load(pieces_run)
    assert model.encode("the ") != model.encode("the") == model.encode("the ")[:-1]
    assert model.topk("the ", 5) == model.topk("the", 5)
    spaced, plain = ([*model.generate(text, num_samples=30)] for text in ("the ", "the"))
    assert spaced == [text.removeprefix(" ") for text in plain]
    assert model.search("the ")[0].text == model.search("the")[0].text.removeprefix(" ")
