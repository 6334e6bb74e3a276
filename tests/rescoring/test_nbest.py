"""Word errors are those of the definition."""

import random
from collections.abc import Sequence
from functools import cache

from lm.rescoring.nbest import word_errors


def definition(reference: Sequence[str], hypothesis: Sequence[str]) -> int:
    """The edit distance as a recursion over the last words."""

    @cache
    def distance(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return i + j
        differs = reference[i - 1] != hypothesis[j - 1]
        return min(distance(i - 1, j - 1) + differs, distance(i - 1, j) + 1, distance(i, j - 1) + 1)

    return distance(len(reference), len(hypothesis))


def test_word_errors_are_the_edit_distance() -> None:
    rng = random.Random(1)
    for _ in range(300):
        first, second = (rng.choices("abcd", k=rng.randrange(8)) for _ in range(2))
        assert word_errors(first, second) == definition(first, second)
