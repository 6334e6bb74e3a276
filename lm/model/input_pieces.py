"""Input vectors of the pieces of words, such as stems and endings, which words share."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm.config import Config

if TYPE_CHECKING:
    from data_prep.prepared import Prepared

PIECES = "input_pieces.pieces"
"""Name of the pieces of words in a model's state."""


def pieces_of_words(config: Config, prepared: "Prepared") -> Tensor | None:
    """The pieces of each word as `InputPieces` takes them; None without `model.input_pieces`."""
    if config.model.input_pieces is None:
        return None
    from data_prep.tokenizer.pieces import find_pieces

    tokenizer = prepared.tokenizer
    words = [tokenizer.token(word) for word in range(prepared.vocab_size)]
    without = (prepared.eos_id, prepared.unk_id)
    counts, num_pieces = prepared.counts(), config.model.input_pieces
    return torch.from_numpy(find_pieces(words, counts, num_pieces, without))


class InputPieces(nn.Module):
    """Σ_p v_p / √n of the vectors of a word's n pieces p, and 0 if n = 0.

    Sums of independent vectors then are as large as one, whatever n is.

    Args:
        pieces: [N, L] int32, the pieces of each word, then -1; saved with the model.
        num_pieces: P, number of vectors.
        size: E, size of a vector.

    Source: vectors of a word's parts: Botha & Blunsom 2014, Bojanowski et al. 2017.
    """

    pieces: Tensor

    def __init__(self, pieces: Tensor, num_pieces: int, size: int) -> None:
        super().__init__()
        self.register_buffer("pieces", pieces)
        self.weight = nn.Parameter(torch.empty(num_pieces, size))
        nn.init.normal_(self.weight, std=1 / math.sqrt(size))

    def forward(self, tokens: Tensor) -> Tensor:
        """The vectors [..., E] of words [...]."""
        pieces = self.pieces[tokens.flatten()]
        used = (pieces >= 0).to(self.weight.dtype)
        scale = used.sum(1, keepdim=True).clamp(min=1).rsqrt()
        pieces, weights = pieces.clamp(min=0), used * scale
        summed = F.embedding_bag(pieces, self.weight, per_sample_weights=weights, mode="sum")
        return summed.view(*tokens.shape, -1)
