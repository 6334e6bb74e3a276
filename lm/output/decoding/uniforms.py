"""Uniform random numbers that are functions of a seed and a counter: SplitMix64.

Number j of seed s is mix(s + (j + 1) γ). It depends neither on the device nor on what else is
drawn, so that positions with seeds of their own are independent of each other.

Source: Steele, Lea & Flood 2014, figure 16.
"""

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def derive_seeds(seeds: Tensor, index: Tensor | int) -> Tensor:
    """Seed number `index` of each seed: int64 of the broadcast shape of both.

    Example:
        >>> derive_seeds(torch.tensor(0), torch.arange(2)).tolist()
        [-2152535657050944081, 7960286522194355700]
    """
    number = torch.as_tensor(index, device=seeds.device) + 1
    bits = seeds + number * _GAMMA  # 64-bit products wrap around
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        bits = (bits ^ _shift_right(bits, shift)) * factor
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """The 64 bits shifted, with zeros from the left."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


class Uniforms:
    """Uniform random numbers in [0, 1), fp64: a sequence for each position's seed, [P] int64."""

    def __init__(self, seeds: Tensor) -> None:
        self.seeds = seeds
        self._num_used = torch.zeros_like(seeds)

    def draw(self, position: Tensor) -> Tensor:
        """The next number [V] for each of V distinct positions [V] int64."""
        used = self._num_used[position]
        self._num_used[position] += 1
        bits = derive_seeds(self.seeds[position], used)
        return _shift_right(bits, 11).double() * 2.0**-53  # the upper 53 bits
