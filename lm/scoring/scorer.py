"""Scores of text: log P(word | words before it), its rank and the entropy of its distribution.

Lines are scored as independent sentences, each predicted from `<eos>` alone, or as one stream,
where a token is predicted from the text before it as in `lm evaluate`. In both, `<eos>` is
predicted at the end of each line. A *unit* is a word of the line or its `<eos>`; words are
separated by whitespace, whatever the tokens, and the score of a unit is the sum over its tokens.
Items that the catalogue of a model of independent sequences lacks are left out.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_prep.errors import UserError
from data_prep.tokenizer.tokenizer import AlignedLine, WordTokenizer, line_batches
from lm.evaluation import check_finite
from lm.model.reader import read_lines
from lm.run import TrainedRun
from lm.scoring.adaptation import Adaptation, Mix, model_for, read_dynamic
from lm.scoring.mixture import RunNGram
from lm.scoring.ngram_tree import Floats, Ints
from lm.scoring.unknown import UnknownRule

MAX_LOG_PROBS = 1 << 23
"""Largest number of log-probabilities [positions, N] that ranks and entropies are computed from."""


class TokenScores(NamedTuple):
    """Figures of n tokens; rank and entropy are None unless asked for."""

    id: Ints  # [n]
    context: Ints  # [n], how many tokens predict each, `<eos>` at the start included
    log_prob: Floats  # [n] nats
    class_log_prob: Floats  # [n] nats, that of the root's child: the class, or a word without one
    rank: Ints | None = None  # [n], 1 + the number of more probable words
    entropy: Floats | None = None  # [n] nats, of the distribution over all words


@dataclass(frozen=True, kw_only=True)
class LineScore:
    """Figures of a line with n units, its words and `<eos>`, and t tokens.

    Leave out units with `is_oov` unless unknown words are told apart, by `vocabulary_size` or
    `open_vocabulary`: their log-probability is that of *any* unknown word, which is often above
    that of a known one, or 0 of an item that is left out.

    Attributes:
        words: [n - 1], separated by whitespace.
        log_prob: [n] nats, sums over the tokens of each unit.
        is_oov: [n], whether a token of the unit is `<unk>`, or it is left out.
        is_unk: [t], whether each token is `<unk>`.
        context: [n], that of the unit's first token.
        word_id: [n], the first token of each unit; -1 for a word without a token of its own.
        unit_of_token: [t], the unit of each token.
        tokens: figures of the t tokens.
    """

    words: list[str]
    log_prob: Floats
    is_oov: NDArray[np.bool_]
    is_unk: NDArray[np.bool_]
    context: Ints
    word_id: Ints
    unit_of_token: Ints
    tokens: TokenScores

    @property
    def total(self) -> float:
        """Log-probability of the line and its `<eos>`, in nats."""
        return float(self.log_prob.sum())


class Scorer:
    """Scores lines of text with a trained model.

    Args:
        run: has the model.
        vocabulary_size: V, number of words that share all probability, with `<eos>` and without
            `<unk>`, as for `UnknownRule`.
        open_vocabulary: whether unknown words have the probabilities of their spellings instead.
            Pieces with bytes leave no word unknown.
        cache: whether streams add a cache of their words.
        dynamic: whether the model, a copy, learns from streams.
        ngram: whether to mix with the n-gram model of the run.

    Attributes:
        unknown: the probability of each unknown word given `<unk>`.
        ngram: the n-gram model, if any.

    Raises:
        UserError: if V is out of range, or given for pieces of words or with an open vocabulary; or
            as `Adaptation.tuned`, `RunNGram.open` and `TrainedRun.speller`.

    Source: V: Heafield, KenLM issue 67; rank and entropy: Misra 2022, minicons.
    """

    def __init__(
        self,
        run: TrainedRun,
        *,
        vocabulary_size: int | None = None,
        open_vocabulary: bool = False,
        cache: bool = False,
        dynamic: bool = False,
        ngram: bool = False,
    ) -> None:
        adaptation = Adaptation.tuned(run, cache=cache, dynamic=dynamic)
        self._adaptation = adaptation or Adaptation(weights_sha256="")  # which is none
        self.ngram = RunNGram.open(run) if ngram else None
        speller = run.speller if open_vocabulary and not run.tokenizer.has_bytes else None
        self.model, self.tokenizer = model_for(run, self._adaptation.lr), run.tokenizer
        self.context = run.description.context
        if vocabulary_size is not None and self.tokenizer.kind != "words":
            raise UserError("a vocabulary size applies to models of words, not of pieces of words")
        known, leave_out = self.model.vocab_size - 1, run.is_independent
        self.unknown = UnknownRule(known, vocabulary_size, speller, leave_out=leave_out)

    def unknown_log_prob(self, lines: Sequence[str], num_unknown: int) -> Floats:
        """Nats of log P(word | `<unk>`) of the `num_unknown` unknown tokens of lines, in order."""
        tokenizer = cast(WordTokenizer, self.tokenizer)  # if the words are read
        return self.unknown.log_prob(num_unknown, lambda: tokenizer.unknown_occurrences(lines))

    def sentences(
        self, lines: Iterable[str], *, details: bool = False, at_once: int | None = None
    ) -> Iterator[LineScore]:
        """Score independent lines in their order; `details`: rank and entropy as well.

        They are computed in batches of similar length, among `at_once` lines that are read before
        the first is scored. The figures of a line do not depend on the others, except for rounding.
        """
        eos_id, limit = self.tokenizer.eos_id, self.model.backbone.receptive_field
        for batch in line_batches(lines, at_once):
            aligned = list(map(self._aligned, batch))
            ids = [np.append(line.ids, eos_id).astype(np.int32) for line in aligned]
            figures, index_of_line = [], []
            for hidden, targets, index, place in read_lines(self.model, ids, eos_id):
                context = place + 1 if limit is None else np.minimum(place + 1, limit)
                figures.append([context, *self._figures(hidden, targets, details)])
                index_of_line.append(index)
            by_line = np.concatenate(index_of_line).argsort(kind="stable")
            columns = [np.concatenate(column)[by_line] for column in zip(*figures, strict=True)]
            yield from self._line_scores(batch, aligned, ids, columns)

    def _aligned(self, line: str) -> AlignedLine:
        words, ids, word_of_id = self.tokenizer.align(line)
        kept = ids != self.tokenizer.unk_id if self.unknown.leaves_out else slice(None)
        return AlignedLine(words, ids[kept], word_of_id[kept])

    def stream(
        self, lines: Iterable[str], *, details: bool = False, at_once: int | None = None
    ) -> Iterator[LineScore]:
        """Score lines as one text, each token from the text before it, as `lm evaluate`.

        A Transformer, whose windows depend on the length of the text, reads all lines first.
        """
        batches: deque[tuple[int, list[str], list[AlignedLine], list[NDArray[Any]]]] = deque()

        def parts() -> Iterator[NDArray[Any]]:
            for batch in line_batches(lines, at_once):
                aligned = list(map(self.tokenizer.align, batch))
                ids = [np.append(line.ids, self.tokenizer.eos_id) for line in aligned]
                part = np.concatenate(ids)
                batches.append((len(part), batch, aligned, ids))
                yield part

        figures, num_tokens = list[list[NDArray[Any]]](), 0
        mix = None if self._adaptation.theta is None else self._adaptation.mixer()
        where = self.tokenizer.eos_id, self.context
        text = read_dynamic(self.model, parts(), *where, self._adaptation.lr)
        for hidden, targets, context in text:
            columns = self._figures(hidden, targets, details, mix)
            figures.append([context, *columns])
            num_tokens += len(context)
            while batches and batches[0][0] <= num_tokens:
                size, batch, aligned, ids = batches.popleft()
                columns = [np.concatenate(column) for column in zip(*figures, strict=True)]
                yield from self._line_scores(batch, aligned, ids, [c[:size] for c in columns])
                figures, num_tokens = [[c[size:] for c in columns]], num_tokens - size

    @torch.no_grad()
    def _figures(
        self, hidden: Tensor, targets: Tensor, details: bool, mix: Mix | None = None
    ) -> list[NDArray[Any]]:
        """Columns of `TokenScores`, from log_prob on, of hidden [P, H] and targets [P]."""
        by_level = -self.model.output.nll_by_level(hidden, targets).double()
        log_prob = by_level.sum(0)
        columns = [mix(hidden, targets, log_prob) if mix else log_prob, by_level[0]]
        check_finite(columns[0], "the text")
        if details:
            at_once = max(1, MAX_LOG_PROBS // self.model.vocab_size)
            parts = map(self._details, torch.split(hidden, at_once), torch.split(targets, at_once))
            columns += map(torch.cat, zip(*parts, strict=True))
        return [column.cpu().numpy() for column in columns]

    def _details(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Rank and entropy [P]; the words that share P(<unk>) count as single words."""
        unk_id, log_share = self.tokenizer.unk_id, self.unknown.log_share
        log_prob = self.model.output.log_prob(hidden)
        unk = log_prob[:, unk_id].exp().double()
        entropy = -log_prob.exp().mul_(log_prob.clamp(min=-1e4)).sum(-1, dtype=torch.float64)
        log_prob[:, unk_id] += log_share
        higher = log_prob > log_prob.gather(1, targets[:, None])
        rank = 1 + higher.sum(1) + (self.unknown.num_unseen - 1) * higher[:, unk_id]
        return rank, entropy - unk * log_share if self.unknown.is_shared else entropy

    def _line_scores(
        self,
        lines: Sequence[str],
        aligned: Iterable[AlignedLine],
        all_ids: list[NDArray[Any]],
        columns: list[NDArray[Any]],
    ) -> Iterator[LineScore]:
        """The scores of lines, from columns of their tokens, one line after another."""
        begin = 0
        columns = [np.concatenate(all_ids).astype(np.int64), *columns]
        is_unk, log_prob = columns[0] == self.tokenizer.unk_id, columns[2]
        if self.ngram is not None:
            log_prob[:] = self.ngram.mixed(columns[0], log_prob)
        log_prob[is_unk] += self.unknown_log_prob(lines, int(is_unk.sum()))
        for line, ids in zip(aligned, all_ids, strict=True):
            num_units, part = len(line.words) + 1, slice(begin, begin + len(ids))
            begin = part.stop
            tokens = TokenScores(*(column[part] for column in columns))
            unit = np.append(line.word_of_id, len(line.words))
            first = np.searchsorted(unit, np.arange(num_units))
            is_left_out = self.unknown.leaves_out & (np.bincount(unit, minlength=num_units) == 0)
            yield LineScore(
                words=line.words,
                log_prob=np.bincount(unit, tokens.log_prob, num_units).astype(np.float64),
                is_oov=is_left_out | (np.bincount(unit, is_unk[part], num_units) > 0),
                is_unk=is_unk[part],
                context=tokens.context[first],
                word_id=np.where(unit[first] == np.arange(num_units), ids[first], -1),
                unit_of_token=unit,
                tokens=tokens,
            )
