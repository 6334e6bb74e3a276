"""Validation: the perplexity of the split and, of independent sequences, how high items rank.

Items are ranked as `lm evaluate --ranking` does by default, but of a sample of the users.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from data_prep.errors import UserError
from data_prep.prepared import Prepared
from data_prep.sequences import Exclude, Sequences
from lm.config import Config, Criterion
from lm.model.language_model import LanguageModel
from lm.model.reader import read_lines
from lm.scoring.ranking import best_items

RANKED_USERS = 4_000
"""Most users whose items are ranked: evenly spread over the split, the same each time."""
K = 10
BLOCK_ITEMS = 1 << 22
"""Most items of histories in memory at once."""


class Validation(NamedTuple):
    """The figures of a validation; hit rate and NDCG are those of `K` items, None if not ranked."""

    perplexity: float
    hit_rate: float | None = None
    ndcg: float | None = None

    def score(self, criterion: Criterion) -> float:
        """By what the best model is chosen: the higher, the better; -∞ if it is not known."""
        if criterion == "perplexity":
            return -self.perplexity
        return -np.inf if self.ndcg is None else self.ndcg


def check_validation(config: Config, prepared: Prepared) -> None:
    """UserError if the validation of independent sequences would have nothing to predict."""
    if prepared.is_independent and "valid" in prepared.splits:
        sequences = prepared.sequences("valid", items_alone=config.ranks_items)
        if not sequences.num_predicted.any():
            num = int(sequences.num_left_out.sum())
            raise UserError(f"valid: {num} items to predict, of which the training split has none")


@torch.no_grad()
def rank(
    model: LanguageModel,
    sequences: Sequences,
    special: tuple[int, int],
    exclude: Exclude,
    check: Callable[[], None] = lambda: None,
) -> tuple[float, float]:
    """HR and NDCG at `K` of the items to predict of a sample of users, see `lm.scoring.ranking`.

    Items outside the catalogue are missed; `special` are `<eos>` and `<unk>`. The model is in
    evaluation mode. `check` is called after each block of users, to raise an error that ends it.
    """
    per_user = sequences.num_targets
    users = np.flatnonzero(per_user)
    num_ranked = min(len(users), RANKED_USERS)
    users = users[np.arange(num_ranked) * len(users) // max(1, num_ranked)]
    sample = Sequences(sequences.tokens, *(each[users] for each in sequences[1:]))
    k, lines = min(K, model.vocab_size - len(set(special))), sample.lines()
    figures = torch.zeros(2, dtype=torch.float64, device=model.device)
    gain = 1 / torch.log2(2 + torch.arange(k, dtype=torch.float64, device=model.device))
    weights = torch.stack([torch.ones_like(gain), gain], dim=1)
    for hidden, target, index, place in read_lines(model, lines, special[0], sample.num_known):
        step = max(1, BLOCK_ITEMS // (2 + int(place.max(initial=0))))
        for first in range(0, len(index), step):
            block, seen = slice(first, first + step), None
            if exclude == "seen":
                pairs = zip(index[block], place[block], strict=True)
                seen = [lines[number][:end] for number, end in pairs]
            best = best_items(model, hidden[block], k, special=special, seen=seen)
            figures += ((best.word == target[block, None]).double() @ weights).sum(0)
            check()
    hit_rate, ndcg = (figures / int(per_user[users].sum())).tolist()
    return hit_rate, ndcg
