"""A model mixed with an n-gram model, token by token.

    P = λ P_model + (1 - λ) P_ngram                                                              (1)

Both predict the same tokens. The model reads on over lines in a text, as in `lm evaluate`; the
n-gram model begins each line at `<s>`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data_prep.errors import UserError
from lm.figures import perplexity, table_of
from lm.model.reader import read_text
from lm.run import TrainedRun
from lm.scoring.arpa import Floats
from lm.scoring.ngram import NGramModel

CONTEXT = "the n-gram model starts each line at <s>"


@dataclass(frozen=True)
class Mixture:
    """An n-gram model and its share."""

    ngram: NGramModel
    weight: float  # λ in [0, 1], the share of the other model
    valid_perplexity: float | None = None  # of the mixture, if λ was tuned there

    @classmethod
    def open(cls, run: TrainedRun, path: Path, weight: float | None) -> "Mixture":
        """Read an ARPA file; λ None: the one of the lowest perplexity on the validation split.

        Raises:
            UserError: if the file cannot be used, λ is out of range, or there is no such split.
        """
        if weight is not None and not 0 <= weight <= 1:
            raise UserError("--mixture must be within 0 … 1")
        if weight is None and "valid" not in run.prepared.splits:
            raise UserError(f"{run.folder} has no validation split to tune on: give --mixture")
        ngram = NGramModel(path, run.tokenizer)
        if weight is not None:
            return cls(ngram, weight)
        tokens = run.prepared.tokens("valid")
        each = token_log_probs(run, tokens), ngram.log_prob(tokens)
        weight = tuned_weight(*each)
        nll = -float(mixed(*each, weight).sum())
        return cls(ngram, weight, perplexity(nll, len(tokens)))

    def describe(self, run: TrainedRun) -> str:
        """The weight and where it is from, in one line."""
        origin = "as given"
        if self.valid_perplexity is not None:
            origin = f"tuned on the validation split, perplexity {self.valid_perplexity:.2f} there"
        shares = f"{self.weight:.4f} of {run.folder}, {1 - self.weight:.4f} of {self.ngram.path}"
        return f"{shares}: {origin}; {CONTEXT}"


@dataclass(frozen=True, kw_only=True)
class MixtureEvaluation:
    """Perplexities of the two models and of their mixture, on the same tokens."""

    weight: float  # λ
    valid_perplexity: float | None  # of the mixture, where λ was tuned
    tokens: int
    perplexity_model: float
    perplexity_ngram: float
    perplexity: float  # of the mixture

    def table(self, title: str) -> str:
        """The figures as lines of text below a title."""
        rows = {
            "tokens predicted": f"{self.tokens:,}",
            "perplexity of the model alone": f"{self.perplexity_model:.2f}",
            "perplexity of the n-gram model alone": f"{self.perplexity_ngram:.2f}",
            "perplexity of the mixture": f"{self.perplexity:.2f}",
        }
        return table_of(title, rows)


def evaluate_mixture(run: TrainedRun, mixture: Mixture, tokens: NDArray[Any]) -> MixtureEvaluation:
    """Perplexities of a text of tokens [n]."""
    model = token_log_probs(run, tokens)
    ngram = mixture.ngram.log_prob(tokens)
    both = mixed(model, ngram, mixture.weight)
    return MixtureEvaluation(
        weight=mixture.weight,
        valid_perplexity=mixture.valid_perplexity,
        tokens=len(tokens),
        perplexity_model=perplexity(-float(model.sum()), len(tokens)),
        perplexity_ngram=perplexity(-float(ngram.sum()), len(tokens)),
        perplexity=perplexity(-float(both.sum()), len(tokens)),
    )


def mixed(model: Floats, ngram: Floats, weight: float) -> Floats:
    """Equation (1), log-probabilities [n] in nats."""
    with np.errstate(divide="ignore"):
        shares = np.log([weight, 1 - weight])
    both: Floats = np.logaddexp(model + shares[0], ngram + shares[1])
    return both


def tuned_weight(model: Floats, ngram: Floats) -> float:
    """The λ of the lowest perplexity, by bisection: log P of equation (1) is concave in λ.

    Example:
        >>> tuned_weight(np.log([0.5, 0.1]), np.log([0.1, 0.5]))
        0.5
    """
    higher = np.maximum(model, ngram)
    p, q = np.exp(model - higher), np.exp(ngram - higher)
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        slope = ((p - q) / (middle * p + (1 - middle) * q)).sum()
        if slope == 0:
            return middle
        low, high = (middle, high) if slope > 0 else (low, middle)
    return round((low + high) / 2, 10)


@torch.no_grad()
def token_log_probs(run: TrainedRun, tokens: NDArray[Any]) -> Floats:
    """Log-probabilities [n] in nats of a text of tokens [n], from the contexts of `lm evaluate`."""
    model, description = run.model, run.description
    each = []
    for hidden, targets, _ in read_text(model, tokens, description.eos_id, description.context):
        hidden = hidden.transpose(0, 1).flatten(0, 1)  # in the order of the text
        each.append(-model.output.nll_by_level(hidden, targets.T.flatten()).double().sum(0).cpu())
    return torch.cat(each).numpy()
