"""Rates over units drawn with replacement, whose spread is that of rates over other units."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_DRAWN = 1 << 20
"""Most numbers of samples in memory at once."""


def resampled_rates(
    sums: NDArray[Any], sizes: NDArray[Any], num_samples: int, seed: int = 0
) -> NDArray[np.float64]:
    """Σ sums / Σ sizes [num_samples, ...] over samples of U units, for sums [..., U] and sizes [U].

    A rate is NaN if all of its units have size 0.

    Source: Efron 1979.
    """
    generator, num_units = np.random.default_rng(seed), len(sizes)
    rates = np.full((num_samples, *sums.shape[:-1]), np.nan)
    at_once = max(1, MAX_DRAWN // max(1, sums.size))
    for begin in range(0, num_samples, at_once):
        shape = min(at_once, num_samples - begin), num_units
        drawn = generator.integers(num_units, size=shape)
        size, total = sizes[drawn].sum(-1), np.moveaxis(sums[..., drawn].sum(-1), -1, 0)
        rates[begin : begin + at_once][size > 0] = (total[size > 0].T / size[size > 0]).T
    return rates
