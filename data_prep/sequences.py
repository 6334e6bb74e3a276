"""Independent sequences of a split: where each begins, and which of its items are predicted.

An item of a table is one word of its line. `item_word` writes white space and `%` in it as URLs do,
`%20`; `word_item` restores it.
"""

import re
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Exclude = Literal["nothing", "seen"]
"""Items that are left out of a ranking: none, or those that the user has had."""
RARE_REPEATS = 0.01
"""`seen` is proposed where a smaller share of a user's events in training repeat an item."""
_ESCAPED = re.compile(r"^<(?:unk|eos)>$|[%\s\x00-\x1f\x7f-\xa0\ufeff]")
"""What is written as in URLs: special words too, which no item is."""


def item_word(item: str | int) -> str:
    """The word that stands for an item.

    >>> item_word("Heat (1995)"), item_word(12), word_item(item_word("5 % off"))
    ('Heat%20(1995)', '12', '5 % off')
    """
    return _ESCAPED.sub(lambda found: quote(found[0], safe=""), str(item))


def word_item(word: str) -> str:
    """The item that a word stands for, as text."""
    return unquote(word)


class Sequences(NamedTuple):
    """S sequences of items of the vocabulary; those that it lacks are left out."""

    tokens: NDArray[Any]  # [n], of which each sequence is a part
    begin: Ints  # [S]
    end: Ints  # [S]
    num_known: Ints  # [S], items at the beginning that are not predicted
    num_left_out: Ints  # [S], items to predict that are not in the vocabulary

    @property
    def num_predicted(self) -> Ints:
        """Items to predict [S] that are in the vocabulary."""
        return self.end - self.begin - self.num_known

    @property
    def num_targets(self) -> Ints:
        """Items to predict [S], in the vocabulary or not."""
        return self.num_predicted + self.num_left_out

    @property
    def repeated_share(self) -> float:
        """Share of the items to predict that are also earlier in their sequence.

        It is the mean over sequences, so that none with many repeated items decides.

        >>> find_sequences(np.array([4, 3, 4, 4, 0, 4, 0]), eos_id=0, unk_id=1).repeated_share
        0.25
        """
        length, size = self.end - self.begin, self.num_predicted
        end = np.cumsum(length)
        sequence = np.repeat(np.arange(len(length)), length)
        items = self.tokens[np.arange(len(sequence)) + (self.end - end)[sequence]]
        order = np.lexsort((items, sequence))  # stable: in the order of a sequence where equal
        items, sequence = items[order], sequence[order]
        is_repeated = np.zeros(len(items) + 1, bool)
        is_repeated[order[1:]] = (items[1:] == items[:-1]) & (sequence[1:] == sequence[:-1])
        before = np.append(0, np.cumsum(is_repeated))
        shares = (before[end] - before[end - size])[size > 0] / size[size > 0]
        return float(shares.mean()) if len(shares) else 0.0

    def lines(self) -> list[NDArray[Any]]:
        """The tokens of each sequence."""
        pairs = zip(self.begin.tolist(), self.end.tolist(), strict=True)
        return [self.tokens[begin:end] for begin, end in pairs]


def find_sequences(
    tokens: NDArray[Any],
    *,
    eos_id: int,
    unk_id: int,
    num_known: Ints | None = None,
    predict_eos: bool = False,
) -> Sequences:
    """Find the sequences of a token file [n], which has `<eos>` after each.

    Items outside the vocabulary have `unk_id`. The first `num_known` [S] of each sequence are not
    predicted (None: 0), `<eos>` is its last item with `predict_eos`.

    Example:
        >>> found = find_sequences(np.array([4, 1, 3, 0, 2, 0]), eos_id=0, unk_id=1)
        >>> [line.tolist() for line in found.lines()], found.num_left_out.tolist()
        ([[4, 3], [2]], [1, 0])
    """
    end = np.flatnonzero(tokens == eos_id)
    begin = np.append(0, end[:-1] + 1)
    end = end + predict_eos
    first = begin + (0 if num_known is None else num_known)
    is_left_out = tokens == unk_id
    if not is_left_out.any():
        return Sequences(tokens, begin, end, first - begin, np.zeros_like(begin))
    place = np.append(0, np.cumsum(~is_left_out))  # of each token among those that stay
    num_left_out = (end - first) - (place[end] - place[first])
    begin, first, end = place[begin], place[first], place[end]
    return Sequences(tokens[~is_left_out], begin, end, first - begin, num_left_out)
