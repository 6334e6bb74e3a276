"""Perplexities of a model, of an n-gram model and of their mixture, on the same tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.figures import perplexity, table_of
from lm.run import TrainedRun
from lm.scoring.mixture import check_weight, mixed, token_log_probs
from lm.scoring.run_ngram import RunNGram


@dataclass(frozen=True, kw_only=True)
class MixtureEvaluation:
    """Perplexities of the two models and of their mixture, on the same tokens."""

    weight: float  # λ, the share of the model; its mean over the tokens if there are several
    weights: list[float]  # by the length of the n-gram model's context, or one for all
    valid_perplexity: float | None  # of the mixture on the validation split, if λ was tuned there
    tokens: int
    perplexity_model: float
    perplexity_ngram: float
    perplexity: float  # of the mixture

    def table(self, model: Path, ngram: Path) -> str:
        """The figures as lines of text, for the paths of both models."""
        origin = "as given"
        if self.valid_perplexity is not None:
            perplexity = f"perplexity {self.valid_perplexity:.2f} there"
            origin = f"tuned on the validation split, {perplexity}"
        shares = f"{self.weight:.4f} of {model}, {1 - self.weight:.4f} of {ngram}"
        if len(set(self.weights)) > 1:
            shares += f" (of the former after 0, 1, … known words {_listed(self.weights)})"
        rows = {
            "tokens predicted": f"{self.tokens:,}",
            "perplexity of the model alone": f"{self.perplexity_model:.2f}",
            "perplexity of the n-gram model alone": f"{self.perplexity_ngram:.2f}",
            "perplexity of the mixture": f"{self.perplexity:.2f}",
        }
        return table_of(
            f"mixture: {shares}: {origin}; the n-gram model starts each line at <s>", rows
        )


def _listed(weights: list[float]) -> str:
    return ", ".join(map("{:.2f}".format, weights))


def evaluate_mixture(
    run: TrainedRun, path: Path | None, weight: float | None, tokens: NDArray[Any]
) -> MixtureEvaluation:
    """Perplexities of a text of tokens [n] by a run and an ARPA file, or the run's n-gram model.

    λ None: the one of the lowest perplexity on the validation split, by the length of the context
    for the run's n-gram model.

    Raises:
        UserError: if the file cannot be used, λ is out of range, or there is no such split.
    """
    if path is not None or weight is not None:
        check_weight(run, weight)
    found = RunNGram.open(run) if path is None else RunNGram.of_arpa(run, path)
    if weight is not None:
        found.weights, found.valid_perplexity = np.array([weight]), None
    elif path is not None:
        found.tune(run)
    model, (ngram, place) = token_log_probs(run, tokens), found.read(tokens)
    weights = found.weights
    mixture = mixed(model, ngram, weights[place])
    perplexities = [perplexity(-float(each.sum()), len(tokens)) for each in (model, ngram, mixture)]
    return MixtureEvaluation(
        weight=float(weights[place].mean() if len(weights) > 1 else weights[0]),
        weights=weights.tolist(),
        valid_perplexity=found.valid_perplexity,
        tokens=len(tokens),
        perplexity_model=perplexities[0],
        perplexity_ngram=perplexities[1],
        perplexity=perplexities[2],
    )
