"""The contexts of new words: hidden vectors of the training split of newer data."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from data_prep.corpus.reader import read_lines as read_corpus
from data_prep.tokenizer.tokenizer import WordTokenizer
from lm.config import Config
from lm.model.language_model import LanguageModel
from lm.model.reader import read_lines

LINES = 128
"""Lines that are read at once."""
Lines = list[NDArray[np.int64]]


class Contexts(NamedTuple):
    """The lines of the training split, in which new words have the last ids."""

    tokenizer: WordTokenizer
    config: Config
    num_old: int
    context: int  # longest part of a text's line that is read, unless the backbone carries a state
    progress: bool

    def occurrences(self, model: LanguageModel, ids: range) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the hidden vectors [P, H] before new words with some ids, and places [P] there.

        The model is that without them.
        """
        num_old, eos_id, unk_id = self.num_old, self.tokenizer.eos_id, self.tokenizer.unk_id
        for chunk in self._chunks(model, "classes"):
            of_line: Any = [(line, (ids.start <= line) & (line < ids.stop)) for line in chunk]
            if not (of_line := [each for each in of_line if each[1].any()]):
                continue
            lines, is_among = zip(*of_line, strict=True)
            if self.are_items:
                known = [np.append(line[line < num_old], eos_id) for line in lines]
                before = [np.cumsum(a < num_old)[b] for a, b in of_line]
            else:
                known = [np.where(line < num_old, line, unk_id) for line in lines]
                before = [np.flatnonzero(each) for each in is_among]
            read = [(hidden, index) for hidden, _, index, _ in read_lines(model, known, eos_id)]
            order = np.concatenate([index for _, index in read]).argsort(kind="stable")
            first = np.cumsum([0, *map(len, known)])[:-1]  # of each line in this order
            place = np.concatenate([a + b for a, b in zip(first, before, strict=True)])
            number = np.concatenate(lines)[np.concatenate(is_among)] - ids.start
            hidden = torch.cat([hidden for hidden, _ in read])[torch.from_numpy(order[place])]
            yield hidden.float(), torch.from_numpy(number).to(hidden.device)

    def events(self, model: LanguageModel) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield hidden vectors [P, H] and the words [P] after them, by the model with new words."""
        for lines in self._chunks(model, "rows"):
            for hidden, target, *_ in read_lines(model, lines, self.tokenizer.eos_id):
                yield hidden, target

    @property
    def are_items(self) -> bool:
        """Whether a line is a sequence of items."""
        return self.config.data.sequences == "independent"

    def _chunks(self, model: LanguageModel, purpose: str) -> Iterator[Lines]:
        """Yield the ids of some lines after others: of items the known ones, of a text all."""
        disable = None if self.progress else True
        lines = iter(tqdm(read_corpus(self.config.data, "train"), purpose, disable=disable))
        while chunk := list(islice(lines, LINES)):
            ids: Any = map(np.array, self.tokenizer.encode_lines(chunk))
            if self.are_items:
                ids = (line[line != self.tokenizer.unk_id] for line in ids)
            else:
                ids = (np.append(line, self.tokenizer.eos_id).astype(np.int64) for line in ids)
            if not self.are_items and not model.backbone.carries_state:
                size = self.context
                ids = (line[at : at + size] for line in ids for at in range(0, len(line), size))
            yield [line for line in ids if len(line)]
