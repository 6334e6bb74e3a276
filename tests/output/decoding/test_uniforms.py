"""Random numbers: the published values of SplitMix64, and sequences of their own."""

import torch

from lm.output.decoding.uniforms import Uniforms, derive_seeds


def test_seeds_are_the_published_sequence() -> None:
    """The first outputs for seed 1234567, as listed with Vigna's splitmix64.c."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    seeds = derive_seeds(torch.tensor(1234567), torch.arange(5))
    assert [seed % (1 << 64) for seed in seeds.tolist()] == expected


def test_numbers_are_uniform_and_each_position_has_its_own() -> None:
    seeds = derive_seeds(torch.tensor(5), torch.arange(1000))
    uniforms = Uniforms(seeds)
    everywhere = torch.arange(1000)
    rows = torch.stack([uniforms.draw(everywhere) for _ in range(40)])
    assert 0 <= float(rows.min()) <= float(rows.max()) < 1
    counts = torch.histc(rows, bins=50, min=0, max=1)
    statistic = float(((counts - 800) ** 2 / 800).sum())
    assert 15 < statistic < 100  # chi-square of 49 degrees of freedom
    assert abs(float(torch.corrcoef(rows)[0, 1:].abs().max())) < 0.13  # four deviations
    again = Uniforms(seeds[[7, 3]])
    again.draw(torch.tensor([1]))
    assert torch.equal(again.draw(torch.tensor([0, 1])), torch.stack([rows[0, 7], rows[1, 3]]))
