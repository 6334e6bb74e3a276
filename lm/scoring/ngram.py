"""An n-gram model of an ARPA file, over the tokens of another model.

    log P(w | h) = log p(h w)                   if the file has the n-gram h w,
                   log b(h) + log P(w | h')     else, where h' is h without its first word    (1)

and b(h) = 1 if the file has no back-off weight of h. A line begins with `<s>`, and `</s>` is the
token `<eos>`. A word outside the other model's vocabulary is `<unk>` here too: its own n-grams are
not read.
"""

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.corpus.lines import read_text
from data_prep.errors import UserError
from data_prep.tokenizer.tokenizer import EOS, UNK, Tokenizer, WordTokenizer
from lm.evaluation import token_unit

Floats = NDArray[np.float64]
BEGIN = -1
"""Id of `<s>`, which is no token."""
NATS_PER_LOG10 = math.log(10)


class NGramModel:
    """The n-grams of an ARPA file whose words are all tokens of a tokenizer.

    Args:
        path: the file; it may be compressed.
        tokenizer: determines ids.

    Attributes:
        order: the largest n.

    Raises:
        UserError: if the file cannot be read or is no complete ARPA file.

    Source: Katz 1987; the format: Stolcke 2002, SRILM, ngram-format(5).
    """

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self.path, self._tokenizer = path, tokenizer
        self._log_prob: dict[tuple[int, ...], float] = {}
        self._backoff: dict[tuple[int, ...], float] = {}
        self.order = self._read(_id_of(tokenizer))

    def _read(self, id_of: Callable[[str], int | None]) -> int:
        """Read the file; returns the order."""
        expected: dict[int, int] = {}
        found: dict[int, int] = {}
        ids: dict[str, int | None] = {}
        order, has_begun, is_complete = 0, False, False
        for number, line in enumerate(read_text(str(self.path)), 1):
            line = line.strip(" \t\r")
            if not has_begun or not line:
                has_begun = has_begun or line == "\\data\\"
            elif line == "\\end\\":
                is_complete = True
                break
            elif match := re.fullmatch(r"ngram +(\d+) *= *(\d+)", line):
                expected[int(match[1])] = int(match[2])
            elif match := re.fullmatch(r"\\(\d+)-grams:", line):
                order = int(match[1])
            else:
                log_prob, words, backoff = self._entry(line, order, f"{self.path}, line {number}")
                found[order] = found.get(order, 0) + 1
                if order == 1:
                    ids[words[0]] = id_of(words[0])
                ngram = tuple(ids.get(word) for word in words)
                known = tuple(id for id in ngram if id is not None)
                if len(known) == order:
                    self._log_prob[known], self._backoff[known] = log_prob, backoff
        if not has_begun:
            raise UserError(f"{self.path} is not an ARPA file: it has no line \\data\\")
        if not is_complete or found != {n: count for n, count in expected.items() if count}:
            raise UserError(f"{self.path} is not complete: it has fewer n-grams than it states")
        return max(found, default=1)

    @staticmethod
    def _entry(line: str, order: int, place: str) -> tuple[float, list[str], float]:
        """Log-probability in nats, words, and back-off weight in nats of a line."""
        first, *words = re.split("[ \t]+", line)
        backoff = words[order:] or ["0"]
        try:
            if not order or len(words) < order or len(backoff) > 1:
                raise ValueError
            values = [float(value) * NATS_PER_LOG10 for value in (first, backoff[0])]
        except ValueError as error:
            expected = f"expected log10 P, {order} words and perhaps a back-off weight"
            raise UserError(f"{place}: {expected}") from error
        return values[0], words[:order], values[1]

    def log_prob(self, tokens: Iterable[int]) -> Floats:
        """Equation (1) for each token of a text [n], `<eos>` at the end of each line, in nats.

        Raises:
            UserError: if the file has no unigram of a token.
        """
        before: tuple[int, ...] = (BEGIN,)
        values = []
        for token in map(int, tokens):
            if (token,) not in self._log_prob:
                raise UserError(self._absent(token))
            before = before[max(0, len(before) - self.order + 1) :]
            value = 0.0
            for begin in range(len(before) + 1):
                history = before[begin:]
                if (log_prob := self._log_prob.get((*history, token))) is not None:
                    values.append(value + log_prob)
                    break
                value += self._backoff.get(history, 0.0)
            before = (BEGIN,) if token == self._tokenizer.eos_id else (*before, token)
        return np.array(values)

    def _absent(self, token: int) -> str:
        """Why a token cannot be scored."""
        if token == self._tokenizer.unk_id:
            return f"{self.path} has no {UNK}, and the text has a word outside the vocabulary"
        if token == self._tokenizer.eos_id:
            return f"{self.path} has no </s>"
        unit = token_unit(self._tokenizer)
        return (
            f"{self.path} has no unigram {self._tokenizer.token(token)!r}, a {unit} that the model"
            f" has: estimate the n-gram model on the model's own training text, a token for each"
            f" {unit}"
        )


def _id_of(tokenizer: Tokenizer) -> Callable[[str], int | None]:
    """The id of a word of an ARPA file; None if the tokenizer lacks it."""
    special: dict[str, int | None] = {"<s>": BEGIN, "</s>": tokenizer.eos_id, EOS: None}
    special |= {UNK: tokenizer.unk_id, "<UNK>": tokenizer.unk_id}
    if isinstance(tokenizer, WordTokenizer):
        words = tokenizer.words

        def id_of(word: str) -> int | None:
            if word in special:
                return special[word]
            return None if (id := words.id(word)) < 0 else id

        return id_of
    pieces: dict[str, Any] = {tokenizer.token(id): id for id in range(tokenizer.vocab_size)}
    return (pieces | special).get
