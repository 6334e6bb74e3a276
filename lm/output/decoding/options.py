"""Sampling: the options of a draw, and their ranges."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The distribution that words are drawn from, made of P(w) in this order.

    1. The repetition penalty θ replaces P(w) by P(w)^θ for words w that occurred before (each
       counts once), and renormalises.
    2. The temperature T replaces P(w) by P(w)^(1/T) and renormalises.
    3. `top_k` restricts the draw to the k most probable words.
    4. `top_p` restricts it to the smallest set of most probable words, among those left, with this
       share of their probability.
    5. `min_p` restricts it to words with P(w) ≥ min_p · max P.

    Example:
        >>> Sampling(temperature=0.8, min_p=0.05).top_k is None
        True

    Attributes:
        temperature: T ≥ 0; 0 gives the most probable word of step 1.
        top_k: at least 1; N or more, or None, restricts nothing.
        top_p: within (0, 1]; 1 or None restricts nothing.
        min_p: within [0, 1]; 0 or None restricts nothing.
        repetition_penalty: θ ≥ 1; 1 changes nothing.

    Raises:
        ValueError: if an option is out of range.

    Source: repetition penalty: Keskar et al. 2019, section 4.1, with log-probabilities as scores;
    top-k: Fan, Lewis & Dauphin 2018; top-p: Holtzman et al. 2020; min-p: Nguyen et al. 2024.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be within (0, 1], got {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be within [0, 1], got {self.min_p}")
        if not 1 <= self.repetition_penalty < math.inf:
            raise ValueError(
                f"repetition_penalty must be finite and at least 1, got {self.repetition_penalty}"
            )
