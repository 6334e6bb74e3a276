"""A model mixed with an n-gram model, token by token.

    P = λ P_model + (1 - λ) P_ngram                                                              (1)

Both predict the same tokens: `</s>` is `<eos>`, and a word outside the model's vocabulary `<unk>`.
The model reads on over lines in a text, as in `lm evaluate`; the n-gram model begins each line at
`<s>`.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data_prep.errors import UserError
from lm.evaluation import check_finite
from lm.model.reader import read_text
from lm.run import TrainedRun
from lm.scoring.ngram_tree import Floats


def check_weight(run: TrainedRun, weight: float | None) -> None:
    """UserError if λ is out of range, or None without a validation split to tune it on."""
    if weight is not None and not 0 <= weight <= 1:
        raise UserError("--mixture must be within 0 … 1")
    if weight is None and "valid" not in run.prepared.splits:
        raise UserError(f"{run.folder} has no validation split to tune on: give --mixture")


def mixed(model: Floats, ngram: Floats, weight: float | Floats) -> Floats:
    """Equation (1), log-probabilities [n] in nats; λ is one number, or one for each."""
    with np.errstate(divide="ignore"):
        shares = np.log(weight), np.log(1 - np.asarray(weight))
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
    for hidden, targets, _ in read_text(model, [tokens], description.eos_id, description.context):
        each.append(-model.output.nll_by_level(hidden, targets).double().sum(0).cpu())
    log_prob = torch.cat(each)
    check_finite(log_prob, str(run.folder))
    return log_prob.numpy()
