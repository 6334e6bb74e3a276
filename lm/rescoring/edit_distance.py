"""The edit distance between two sequences, compiled."""

import numpy as np
from numpy.typing import NDArray

from data_prep.compiled import compiled


def edit_distance(reference: NDArray[np.int64], hypothesis: NDArray[np.int64]) -> tuple[int, int]:
    """The fewest errors, and of several ways the fewest substitutions and deletions among them.

    With row i for the first i words of the reference, K > the number of its words, and
    D_i0 = i (K + 1), D_0j = j K:

        D_ij = min(D_i-1,j-1 + (K + 1) [r_i ≠ h_j], D_i-1,j + K + 1, D_i,j-1 + K)

    D / K is the number of errors, and the remainder that of substitutions and deletions. The fewer
    there are, the more words are equal.

    Source: Wagner & Fischer 1974.
    """
    total, missed = divmod(int(_distance(reference, hypothesis)), len(reference) + 1)
    return total, missed


@compiled
def _distance(reference: NDArray[np.int64], hypothesis: NDArray[np.int64]) -> int:
    error = len(reference) + 1  # K
    distance = np.arange(len(hypothesis) + 1) * error
    for i in range(len(reference)):
        word, above_left, left = reference[i], distance[0], distance[0] + error + 1
        distance[0] = left
        for j in range(len(hypothesis)):
            above = distance[j + 1]
            substituted = above_left if word == hypothesis[j] else above_left + error + 1
            left = min(substituted, above + error + 1, left + error)
            distance[j + 1] = left
            above_left = above
    return int(distance[-1])
