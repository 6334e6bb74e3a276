"""Recommending: the most probable next items of sequences, exact over the whole catalogue."""

import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from data_prep.errors import DataError
from data_prep.sequences import item_word, word_item
from data_prep.tokenizer.punctuation import UNK
from data_prep.tokenizer.tokenizer import Tokenizer
from lm.generation.text import checked_text
from lm.model.language_model import LanguageModel
from lm.model.reader import Ints, read_lines
from lm.output.decoding.search import TopK
from lm.run import TrainedRun
from lm.scoring.ranking import best_items
from lm.scoring.unknown import UnknownWords
from lm.states import warn_caller


class Catalogue:
    """The items of a run on independent sequences, and their token ids.

    Attributes:
        special: token ids that are no items.
    """

    def __init__(self, run: TrainedRun) -> None:
        self._tokenizer: Tokenizer = run.tokenizer
        self._is_escaped = run.config.data.user_field is not None
        self.special = (run.tokenizer.eos_id, run.tokenizer.unk_id)

    def find(self, items: Sequence[str | int]) -> tuple[list[int], list[str | int]]:
        """The token ids of the items that are in the catalogue, and the items that are not."""
        encoded = list(self._tokenizer.encode_lines([self.word(item) for item in items]))
        known = [len(ids) == 1 and ids[0] not in self.special for ids in encoded]
        ids = [ids[0] for ids, is_known in zip(encoded, known, strict=True) if is_known]
        return ids, [item for item, is_known in zip(items, known, strict=True) if not is_known]

    def ids(self, items: Sequence[str | int]) -> list[int]:
        """The token ids of items; warns of those it leaves out."""
        ids, unknown = self.find(items)
        if unknown:
            warn_caller(f"not in the catalogue and left out: {list(dict.fromkeys(unknown))}")
        return ids

    def known(self, text: str) -> str:
        """A text of the words of items without those it lacks; warns of these."""
        if unknown := UnknownWords(self._tokenizer, [checked_text(text)]).types:
            warn_caller(f"not in the catalogue and left out: {unknown}")
        lines, others = text.split("\n"), {*unknown, UNK}
        return "\n".join(" ".join(w for w in line.split() if w not in others) for line in lines)

    def word(self, item: str | int) -> str:
        """The word that stands for an item, or for the beginning of one."""
        return item_word(item) if self._is_escaped else str(item)

    def item(self, id: int) -> str:
        """The item with a token id, as text."""
        word = self._tokenizer.token(id)
        return word_item(word) if self._is_escaped else word


def recommend(
    model: LanguageModel,
    histories: Sequence[Sequence[int]],
    k: int,
    *,
    excluded: Sequence[int],
    exclude: Literal["nothing", "seen"] = "nothing",
) -> TopK:
    """The k most probable next items of each of some histories, [L, k].

    A history that leaves fewer than k items has these, then -1 with the log-probability -∞.

    Args:
        model: in evaluation mode.
        histories: the token ids of L sequences, which may be empty.
        k: number of items of each, at most those that are not `excluded`.
        excluded: token ids that are recommended to nobody, the first of which is `<eos>`.
        exclude: `seen` leaves out the items of its history.

    Raises:
        ValueError: if k is out of range.
    """
    eos_id = excluded[0]
    num_known: Ints = np.array(list(map(len, histories)), np.int64)
    lines = [[*history, eos_id] for history in histories]
    chunks = read_lines(model, lines, eos_id, num_known)
    read = [(vectors, index) for vectors, _, index, _ in chunks]
    order = np.concatenate([index for _, index in read]).argsort()
    hidden = torch.cat([vectors for vectors, _ in read])[torch.from_numpy(order).to(model.device)]
    seen = histories if exclude == "seen" else None
    return best_items(model, hidden, k, special=excluded, seen=seen)


def parse_items(line: str, name: str) -> list[Any]:
    """The items of a line: separated by white space, or a JSON list; DataError if it is none."""
    if not line.lstrip().startswith("["):
        return line.split()
    try:
        items = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not JSON: {error}") from error
    if not all(isinstance(item, str | int) for item in items):
        raise DataError(f"{name}: expected items that are text or integers")
    return list(items)
