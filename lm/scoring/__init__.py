"""Scores of text by models, n-grams and both; comparisons of models; ranks of items."""

from lm.scoring.scorer import LineScore, Scorer, TokenScores

__all__ = ["LineScore", "Scorer", "TokenScores"]
