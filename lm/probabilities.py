"""Methods of `lm.loaded.LoadedModel` that tabulate probabilities, for analysis and decoders."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from operator import eq
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lm.generation.completion import Completions
from lm.generation.items import Catalogue
from lm.generation.text import checked_text, encode_text
from lm.model.reader import read_lines
from lm.run import TrainedRun
from lm.scoring import Scorer
from lm.scoring.surprisal import surprisal_table
from lm.states import Prefix, State, listed

if TYPE_CHECKING:
    import pandas


class ContinuationScore(NamedTuple):
    """A text after a context."""

    log_prob: float  # nats, the sum over its tokens
    is_greedy: bool  # whether each of its tokens is the most probable one but `<unk>`
    num_unknown: int  # tokens that are `<unk>`
    context: int  # tokens that the first is predicted from; 1: `<eos>`, which precedes every text


class Probabilities(ABC):
    """Probabilities of texts by the model of a trained run."""

    _run: TrainedRun
    _scorer: Scorer

    @abstractmethod
    def _state(self, prefix: Prefix) -> State:
        """The state after a prefix."""

    def _topk(self, state: State, k: int, excluded: list[int]) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids of the k most probable tokens."""
        return self._run.model.output.topk(state.hidden, k, excluded=excluded)

    def _candidates(self, states: list[State], words: Tensor) -> Tensor:
        """Log-probabilities [S, K] of tokens [1, K]."""
        hidden = torch.stack([state.hidden for state in states])
        return self._run.model.output.candidate_log_prob(hidden, words.expand(len(states), -1))

    @cached_property
    def _catalogue(self) -> Catalogue | None:
        """The items of a model of independent sequences."""
        return Catalogue(self._run) if self._run.is_independent else None

    def _name(self, token: int) -> str:
        """The word or item with a token id."""
        return (self._catalogue.item if self._catalogue else self._run.tokenizer.token)(token)

    def _beginning(self, text: str) -> str:
        """The beginning of a word or item, as the vocabulary has it."""
        return self._catalogue.word(checked_text(text)) if self._catalogue else text

    def surprisal(self, sentences: Iterable[str], *, eos: bool = False) -> "pandas.DataFrame":
        """A row for each word; see `lm.scoring.surprisal.surprisal_table` for its columns."""
        if eos:
            self._run.check_end()
        return surprisal_table(self._run, self._scorer, self._lines(sentences), eos=eos)

    def _lines(self, sentences: Iterable[str]) -> list[str]:
        lines = [checked_text(each).removesuffix("\n") for each in listed("sentences", sentences)]
        if several := [line for line in lines if "\n" in line]:
            raise ValueError(f"expected sentences of one line each, got {several[0][:40]!r}")
        return lines

    @torch.no_grad()
    def continuation_log_prob(self, pairs: Iterable[tuple[str, str]]) -> list[ContinuationScore]:
        """Scores of the second text of each pair after the first, which may be empty, in batches.

        Lines are separated by `<eos>`. The space between two words may be in either text; a word
        that begins in the context and goes on in the continuation is predicted as a whole.
        """
        self._run.check_text("a continuation")
        scorer, pairs = self._scorer, listed("pairs of texts", pairs)
        model, tokenizer = scorer.model, scorer.tokenizer
        if wrong := [pair for pair in pairs if isinstance(pair, str) or len(pair) != 2]:
            raise ValueError(f"expected pairs of texts, got {wrong[0]!r:.60}")
        texts = [checked_text(context) + checked_text(after) for context, after in pairs]
        ids, num_known = [encode_text(tokenizer, text)[1:] for text in texts], list[int]()
        for whole, (context, after) in zip(ids, pairs, strict=True):
            before = encode_text(tokenizer, context)[1:]
            num = [*map(eq, whole, before), False].index(False)
            if before[-1:] == [tokenizer.unk_id] and num == len(before) and after[:1].strip():
                longer = encode_text(tokenizer, context + after[0])[1:]
                num -= longer == before  # an unknown word that goes on
            num_known.append(num)
        log_prob, is_greedy = np.zeros(len(ids)), np.ones(len(ids), bool)
        known = np.array(num_known)
        for hidden, target, index, _ in read_lines(model, ids, tokenizer.eos_id, known):
            nll = model.output.nll_by_level(hidden, target).double().sum(0)
            np.subtract.at(log_prob, index, nll.cpu().numpy())
            best = model.output.topk(hidden, 1, excluded=self._run.never_drawn()).word[:, 0]
            is_greedy[index[(best != target).cpu().numpy()]] = False
        unk_id, limit = tokenizer.unk_id, model.backbone.receptive_field or math.inf
        shares = iter(scorer.unknown_log_prob(texts, sum(line.count(unk_id) for line in ids)))
        scores = []
        for i, (line, start) in enumerate(zip(ids, num_known, strict=True)):
            of_unknown = [next(shares) for token in line if token == unk_id]
            num = line[start:].count(unk_id)
            total = float(log_prob[i] + sum(of_unknown[len(of_unknown) - num :]))
            num_before = int(min(start + 1, limit))
            scores.append(ContinuationScore(total, bool(is_greedy[i]), num, num_before))
        return scores

    @torch.no_grad()
    def complete(self, prefix: Prefix, beginning: str, k: int = 3) -> list[tuple[str, float]]:
        """The k most probable next words that begin with a text, as `topk`, or all if fewer do.

        Of words in the vocabulary, in alphabetical lists that the first call makes.
        """
        state = self._state(prefix)
        word, log_prob = self._completions.best(
            self._beginning(beginning),
            k,
            self._run.model.output,
            search=lambda number: self._topk(state, number, []),
            evaluate=lambda ids: self._candidates([state], ids.to(state.hidden.device)[None])[0],
        )
        return list(zip(map(self._name, word), log_prob, strict=True))

    @torch.no_grad()
    def prefix_log_prob(self, prefix: Prefix, beginning: str) -> float:
        """Log-probability that the next word begins with a text: log Σ P(word), -∞ if none does."""
        state, ids = self._state(prefix), self._completions.ids(self._beginning(beginning))
        log_prob = self._candidates([state], ids.to(state.hidden.device)[None])
        return float(log_prob.logsumexp(1))

    def has_beginning(self, beginning: str) -> bool:
        """Whether a word of the vocabulary begins with a text."""
        return len(self._completions.ids(self._beginning(beginning))) > 0

    @cached_property
    def _completions(self) -> Completions:
        return Completions(self._run.tokenizer)
