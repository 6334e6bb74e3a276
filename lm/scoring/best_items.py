"""The most probable items of positions, by search, without those that their users have had."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lm.model.language_model import LanguageModel
from lm.output.decoding.search import TopK


@torch.no_grad()
def best_items(
    model: LanguageModel,
    hidden: Tensor,
    k: int,
    *,
    special: Sequence[int],
    seen: Sequence[Sequence[int] | NDArray[Any]] | None = None,
) -> TopK:
    """The k most probable items of positions [P, H], [P, k].

    A position that has fewer than k has these, then -1 with the log-probability -∞.

    Args:
        model: in evaluation mode.
        hidden: its vectors.
        k: number of items of each, at most those that are not `special`.
        special: token ids that are no items.
        seen: token ids that are left out of each position too.

    Raises:
        ValueError: if k is out of range, or a log-probability is not finite.
    """
    if seen is None or k > model.vocab_size - len(set(special)):
        return model.output.topk(hidden, k, excluded=special)
    rows = [torch.from_numpy(np.unique([*special, *each])) for each in seen]
    left_out = pad_sequence(rows, batch_first=True, padding_value=-1).to(hidden.device)
    sizes = np.array([min(k, model.vocab_size - len(row)) for row in rows])
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    log_prob = hidden.new_full((len(sizes), k), -torch.inf, dtype=dtype)
    best = TopK(log_prob, torch.full_like(log_prob, -1, dtype=torch.int64))
    for size in set(sizes.tolist()) - {0}:
        users = np.flatnonzero(sizes == size)
        found = model.output.topk(hidden[users], size, excluded=left_out[users])
        best.log_prob[users, :size], best.word[users, :size] = found.log_prob, found.word
    return best
