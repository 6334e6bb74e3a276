"""Words by their beginnings, for text that is typed or recognised letter by letter."""

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from data_prep.errors import UserError
from data_prep.tokenizer.punctuation import lowercased
from data_prep.tokenizer.tokenizer import Tokenizer, WordTokenizer
from lm.generation.text import checked_count, checked_text
from lm.model.language_model import OutputLayer
from lm.output import HierarchicalSoftmax

Search = Callable[[int], tuple[Tensor, Tensor]]
"""Log-probabilities and ids of this many most probable words."""
Evaluate = Callable[[Tensor], Tensor]
"""Log-probabilities [K] of some words [K]."""
SEARCHED = 256
"""Most probable words among which completions are looked for first."""
FEW_ROWS = 1 / 4
"""Share of the rows of the output layer up to which all words with a beginning are computed."""


class Completions:
    """The words of a model in alphabetical order, without `<eos>` and `<unk>`.

    Raises:
        UserError: if the model is of pieces of words.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not isinstance(tokenizer, WordTokenizer):
            raise UserError("completions require a model of words, not of pieces of words")
        self._words, self._lowercase = tokenizer.words, tokenizer.lowercase
        encoded = [word.encode() for word in self._words]
        ids = sorted(range(len(encoded)), key=encoded.__getitem__)
        special = tokenizer.eos_id, tokenizer.unk_id
        self._id = torch.tensor([id for id in ids if id not in special], dtype=torch.int64)
        self._place = torch.full((tokenizer.vocab_size,), -1)
        self._place[self._id] = torch.arange(len(self._id))

    def interval(self, beginning: str) -> slice:
        """The places of the words that begin with a text, which may be such a word itself."""
        text = checked_text(beginning)
        first = (lowercased(text) if self._lowercase else text).encode()
        ids, key = self._id.numpy(), lambda id: self._words[id].encode()
        return slice(*(bisect_left(ids, end, key=key) for end in (first, first + b"\xff")))

    def ids(self, beginning: str) -> Tensor:
        """The ids [K] of the words that begin with a text."""
        return self._id[self.interval(beginning)]

    def best(
        self, beginning: str, k: int, output: OutputLayer, search: Search, evaluate: Evaluate
    ) -> tuple[list[int], list[float]]:
        """The k most probable words with a beginning, and log-probabilities; all if they are fewer.

        They are exact. Where such words are spread over many classes, a search for the most
        probable of all words, which opens few classes, mostly has k of them.
        """
        checked_count("words", k)
        found, ids = self.interval(beginning), self.ids(beginning)
        k = min(k, len(ids))
        if isinstance(output, HierarchicalSoftmax) and k:
            arrays = output.tree.arrays
            nodes = torch.unique(
                arrays.node_of_row[arrays.row_of_word[ids.to(output.weight.device)]]
            )
            if arrays.num_children[nodes].sum() > FEW_ROWS * output.tree.num_rows:
                searched = search(min(SEARCHED, output.vocab_size))
                log_prob, word = (each.cpu() for each in searched)
                place = self._place[word]
                chosen = ((found.start <= place) & (place < found.stop)).nonzero()[:k, 0]
                if len(chosen) == k:
                    return word[chosen].tolist(), log_prob[chosen].tolist()
        log_prob, place = evaluate(ids).cpu().topk(k)
        return ids[place].tolist(), log_prob.tolist()
