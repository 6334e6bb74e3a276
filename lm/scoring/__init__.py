"""Scores of text: log-probabilities, ranks and entropies of words; `layouts` prints them."""

from lm.scoring.scorer import LineScore, Scorer, TokenScores

__all__ = ["LineScore", "Scorer", "TokenScores"]
