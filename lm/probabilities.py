"""Methods of `lm.loaded.LoadedModel` that tabulate probabilities, for analysis and decoders."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from lm.generation.text import checked_text, encode_prompt
from lm.model.reader import read_lines
from lm.run import TrainedRun
from lm.scoring import Scorer
from lm.scoring.surprisal import surprisal_table
from lm.states import listed

if TYPE_CHECKING:
    import pandas


class ContinuationScore(NamedTuple):
    """A text after a context."""

    log_prob: float  # nats, the sum over its tokens
    is_greedy: bool  # whether each of its tokens is the most probable one but `<unk>`
    num_unknown: int  # tokens that are `<unk>`
    context: int  # tokens that the first is predicted from; 1: `<eos>`, which precedes every text


class Probabilities:
    """Probabilities of texts by the model of a trained run."""

    _run: TrainedRun
    _scorer: Scorer

    def surprisal(self, sentences: Iterable[str], *, eos: bool = False) -> "pandas.DataFrame":
        """A row for each word; see `lm.scoring.surprisal.surprisal_table` for its columns."""
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
        if self._run.is_independent:
            raise ValueError("continuations: the model is of independent sequences")
        scorer, pairs = self._scorer, listed("pairs of texts", pairs)
        model, tokenizer = scorer.model, scorer.tokenizer
        texts = [checked_text(context) + checked_text(after) for context, after in pairs]
        ids, before = (
            [encode_prompt(tokenizer, text)[1:] for text in side]
            for side in (texts, [context for context, _ in pairs])
        )
        num_known = np.zeros(len(ids), np.int64)
        for i, (whole, start) in enumerate(zip(ids, before, strict=True)):
            differs = [a != b for a, b in zip(whole, start, strict=False)]
            num_known[i] = [*differs, True].index(True)
        log_prob, is_greedy = np.zeros(len(ids)), np.ones(len(ids), bool)
        for hidden, target, index, _ in read_lines(model, ids, tokenizer.eos_id, num_known):
            nll = model.output.nll_by_level(hidden, target).double().sum(0)
            np.subtract.at(log_prob, index, nll.cpu().numpy())
            best = model.output.topk(hidden, 1, excluded=self._run.never_drawn()).word[:, 0]
            is_greedy[index[(best != target).cpu().numpy()]] = False
        place = [
            (i, k)
            for i, line in enumerate(ids)
            for k, id in enumerate(line)
            if id == tokenizer.unk_id
        ]
        line, k = np.array(place, np.int64).reshape(-1, 2).T
        of_unknown = scorer.unknown_log_prob(texts, len(line))
        is_new = k >= num_known[line]
        log_prob += np.bincount(line[is_new], of_unknown[is_new], len(ids))
        num_unknown = np.bincount(line[is_new], minlength=len(ids))
        limit = model.backbone.receptive_field or max(map(len, ids), default=0) + 1
        context = np.minimum(num_known + 1, limit)
        columns = (each.tolist() for each in (log_prob, is_greedy, num_unknown, context))
        return [ContinuationScore(*each) for each in zip(*columns, strict=True)]
