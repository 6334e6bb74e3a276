"""A table of words for statistics: surprisal, frequency and length of each and of the one before.

Surprisal is that of `lm score`, but pieces of words are corrected: a word has ended once the next
token begins another word, as pieces with a leading space do, or ends the line. With B(context) the
probability of all such tokens,

    P(word | context) = P(pieces of the word | context) · B(context, word) / B(context),

without the division at the beginning of a line, which every word there begins. The probabilities of
all words add up to at most 1, and those of a line, with its `<eos>`, have the same product as those
of its tokens. `<unk>` counts as the beginning of a word.

Source: Pimentel & Meister 2024, equation 7; Oh & Schuler 2024.
"""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from data_prep.errors import UserError
from data_prep.tokenizer.punctuation import EOS, UNK
from data_prep.tokenizer.serialization import load_counts
from data_prep.tokenizer.tokenizer import SENTENCEPIECE_SPACE
from lm.model.reader import read_lines
from lm.run import TrainedRun
from lm.scoring.ngram_tree import Floats
from lm.scoring.scorer import MAX_LOG_PROBS, LineScore, Scorer

if TYPE_CHECKING:
    import pandas

_log = logging.getLogger(__name__)
PREVIOUS = ("surprisal", "frequency", "log10_frequency", "length")
"""Columns that a row also has of the word before."""
TOKENS_AT_ONCE = 1 << 20


def surprisal_table(
    run: TrainedRun, scorer: Scorer, lines: Sequence[str], *, eos: bool = False
) -> "pandas.DataFrame":
    """A row for each word of lines that are independent sentences.

    Returns:
        `sentence` and `position`, from 1; `word`; `surprisal` in bits, NaN of an unknown word that
        is not told apart; `frequency`, occurrences per million words of the training split, and
        `log10_frequency`, with one occurrence more of every type; `length` in characters;
        `unknown`; and `previous_…`, figures of the word before in the sentence, or NaN. With `eos`,
        a row for the end of each line as well, without frequency and length.

        A word of several tokens, as with punctuation, has the frequency of the only one with a
        letter or digit, or NaN. Unknown words have NaN, and so have all words of a model of
        pieces unless its prepared data are in place.
    """
    import pandas

    scores = list(scorer.sentences(lines))
    nats = [score.log_prob for score in scores]
    if scorer.tokenizer.kind != "words":
        nats = _corrected(scorer, scores)
    count, total, num_types = _occurrences(run, scores)
    unknown = np.concatenate([*(score.is_oov for score in scores), np.zeros(0, bool)])
    bits = np.concatenate([*nats, np.zeros(0)]) / -math.log(2)
    units = [
        (sentence, position, word)
        for sentence, score in enumerate(scores, 1)
        for position, word in enumerate([*score.words, EOS], 1)
    ]
    table = pandas.DataFrame(units, columns=["sentence", "position", "word"])
    is_eos = ~table.duplicated("sentence", keep="last")
    table["surprisal"] = np.where(unknown & (not scorer.unknown.tells_apart), np.nan, bits)
    table["frequency"] = 1e6 * count / total
    table["log10_frequency"] = np.log10(1e6 * (count + 1) / (total + num_types))
    table["length"] = table["word"].str.len().astype(float).mask(is_eos)
    table["unknown"] = unknown
    for name in PREVIOUS:
        table[f"previous_{name}"] = table.groupby("sentence")[name].shift()
    return table if eos else table[~is_eos].astype({"length": int}).reset_index(drop=True)


@torch.no_grad()
def _corrected(scorer: Scorer, scores: list[LineScore]) -> list[Floats]:
    """Log-probabilities of the units of lines that are read in pieces."""
    if scorer.ngram is not None:
        raise ValueError("surprisal: pieces of words are not corrected for an n-gram model")
    model, tokenizer = scorer.model, scorer.tokenizer
    pieces = map(tokenizer.token, range(tokenizer.vocab_size))
    begins_word = [piece.startswith(SENTENCEPIECE_SPACE) for piece in pieces]
    begins_word[tokenizer.eos_id] = begins_word[tokenizer.unk_id] = True
    begins = torch.tensor(begins_word, device=model.device)
    log_boundary = [np.zeros(len(score.tokens.id)) for score in scores]
    ids = [score.tokens.id for score in scores]
    for hidden, _, index, place in read_lines(model, ids, tokenizer.eos_id):
        parts = map(
            model.output.log_prob, torch.split(hidden, max(1, MAX_LOG_PROBS // len(begins)))
        )
        values = torch.cat([part[:, begins].logsumexp(1) for part in parts])
        for line, k, value in zip(index, place, values.tolist(), strict=True):
            log_boundary[line][k] = value if k else 0
    corrected = []
    for score, each in zip(scores, log_boundary, strict=True):
        first = np.searchsorted(score.unit_of_token, np.arange(len(score.log_prob)))
        corrected.append(score.log_prob + np.diff(each[first], append=0))
    return corrected


def _occurrences(run: TrainedRun, scores: list[LineScore]) -> tuple[Floats, int, int]:
    """Occurrences of each unit of lines in the training split, its numbers of words and types."""
    tokenizer, counts, space = run.tokenizer, Counter[str](), ""
    if tokenizer.kind == "words":
        pieces: Any = {id: tokenizer.token(id) for each in scores for id in each.tokens.id.tolist()}
        every = load_counts(run.folder)
        every[tokenizer.eos_id] = 0
        counts.update({word: int(every[id]) for id, word in pieces.items()})
        total, num_types = int(every.sum()), len(every) - 1
    else:
        pieces = [tokenizer.token(id) for id in range(tokenizer.vocab_size)]
        pieces[tokenizer.eos_id] = space = SENTENCEPIECE_SPACE
        pieces[tokenizer.unk_id] = space + UNK
        try:
            tokens, rest = run.prepared.tokens("train"), ""
        except UserError as error:
            _log.warning("%s: the words have no frequencies", error)
            return np.full(sum(len(score.log_prob) for score in scores), np.nan), 1, 0
        for begin in range(0, len(tokens), TOKENS_AT_ONCE):
            part = tokens[begin : begin + TOKENS_AT_ONCE].tolist()
            text = rest + "".join(map(pieces.__getitem__, part))
            *words, rest = text.split(space)
            counts.update(words)
        del counts[""]
        total, num_types = counts.total(), len(counts)
    count = []
    for score in scores:
        end = np.searchsorted(score.unit_of_token, np.arange(len(score.words)), side="right")
        for begin, stop in pairwise([0, *end.tolist()]):
            ids = score.tokens.id[begin:stop].tolist()
            parts, is_unknown = [pieces[id] for id in ids], not ids or tokenizer.unk_id in ids
            if tokenizer.kind == "words" and len(ids) > 1:
                parts = [part for part in parts if any(map(str.isalnum, part))]
                is_unknown |= len(parts) != 1
            key = "".join(parts).lstrip(space)
            count.append(np.nan if is_unknown else counts[key])
        count.append(np.nan)
    return np.array(count), total, num_types
