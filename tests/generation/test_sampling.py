"""Sampling: what a sample depends on, and the distribution of continuations."""

from itertools import product

import pytest
import torch
from scipy.stats import chi2

from lm.generation import Sampler, Sampling, generate
from lm.generation.sampling import PLAIN

from .models import random_model


def continuations(
    num_samples: int, seed: int = 1, first: int = 0, sampling: Sampling = PLAIN
) -> list[list[int]]:
    """Samples of six tokens after the prompt 0, 2."""
    sampler = Sampler(
        random_model("two_level"),
        torch.tensor([[0], [2]]),
        num_samples=num_samples,
        first_sample=first,
        seed=seed,
        sampling=sampling,
    )
    tokens: list[list[int]] = torch.stack([sampler.draw() for _ in range(6)], dim=1).tolist()
    return tokens


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.5), Sampling(repetition_penalty=2.0)], ids=str
)
def test_a_sample_depends_on_its_number_and_not_on_the_others(sampling: Sampling) -> None:
    def seeded(num_samples: int, seed: int = 1, first: int = 0) -> list[list[int]]:
        torch.manual_seed(0)  # of the model's parameters
        return continuations(num_samples, seed, first, sampling)

    many = seeded(50)
    assert seeded(7) == many[:7]
    assert seeded(10, 1, 20) == many[20:30]
    assert seeded(50, 2) != many


def test_sequences_that_are_left_out_change_no_others() -> None:
    model = random_model("two_level")
    prompts, kept = torch.tensor([[0, 1], [2, 3]]), torch.tensor([5, 1, 2])
    options = Sampling(temperature=1.2, repetition_penalty=1.5)
    whole, part = (Sampler(model, prompts, num_samples=3, sampling=options) for _ in range(2))
    for _ in range(3):
        assert torch.equal(whole.draw(), part.draw())
    part.select(kept)
    for _ in range(5):
        assert torch.equal(whole.draw()[kept], part.draw())


@pytest.mark.parametrize("penalty", [1.0, 2.5])
def test_frequencies_of_continuations_match_the_product_of_stated_distributions(
    penalty: float,
) -> None:
    """The penalty applies to the words of the prompt and those drawn, but not to word 3."""
    model, prompt = random_model("huffman"), [1, 3]
    tokens = generate(
        model,
        prompt,
        num_tokens=3,
        num_samples=20_000,
        sampling=Sampling(repetition_penalty=penalty),
        eos_id=3,
    )
    drawn = torch.stack(list(tokens), dim=1) @ torch.tensor([16, 4, 1])
    probs = []
    for words in product(range(4), repeat=3):
        with torch.no_grad():
            hidden, _ = model(torch.tensor([*prompt, *words[:-1]])[:, None])
            log_prob = model.output.log_prob(hidden[1:, 0])
        total = 0.0
        for step, word in enumerate(words):
            known = sorted({*prompt, *words[:step]} - {3})
            log_prob[step, known] *= penalty
            total += float(log_prob[step].log_softmax(0)[word])
        probs.append(total)
    expected = 20_000 * torch.tensor(probs, dtype=torch.float64).exp()
    assert float(expected.sum()) == pytest.approx(20_000)
    counts = torch.bincount(drawn, minlength=64)
    often = expected > 5
    statistic = float(((counts - expected) ** 2 / expected)[often].sum())
    assert chi2.sf(statistic, int(often.sum()) - 1) > 1e-4


@pytest.mark.parametrize("seed", [1 << 64, -(1 << 63) - 1])
def test_seeds_beyond_64_bits_raise(seed: int) -> None:
    with pytest.raises(ValueError, match=r"seed must be within -2\^63 … 2\^64 - 1, got"):
        continuations(1, seed)


def test_empty_prompt_raises() -> None:
    with pytest.raises(ValueError, match=r"^the prompt must have at least one token$"):
        next(generate(random_model("full"), [], num_tokens=1))
