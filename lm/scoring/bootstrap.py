"""Rates over units drawn with replacement, whose spread is that of rates over other units."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def resampled_rates(
    sums: NDArray[Any], sizes: NDArray[Any], num_samples: int, seed: int = 0
) -> NDArray[np.float64]:
    """Σ sums / Σ sizes [num_samples, ...] over samples of U units, for sums [..., U] and sizes [U].

    A rate is NaN if all of its units have size 0.

    Source: Efron 1979.
    """
    generator, num_units = np.random.default_rng(seed), len(sizes)
    rates = np.full((num_samples, *sums.shape[:-1]), np.nan)
    for sample in range(num_samples):
        drawn = generator.integers(num_units, size=num_units)
        if size := sizes[drawn].sum():
            rates[sample] = sums[..., drawn].sum(-1) / size
    return rates
