"""A trained model mixed with the n-gram model of its run, in a user's program."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from lm.evaluation import TextLosses, encode_text
from lm.generation.text import checked_text
from lm.loaded import LoadedModel
from lm.run import TrainedRun
from lm.scoring.mixture import evaluate_mixture
from lm.states import Prefix, State, Step


def _refused(name: str, advice: str = "load the model without ngram=True") -> Any:
    """A method that has no meaning for a mixture."""

    def method(*_: Any, **__: Any) -> NoReturn:
        raise ValueError(f"{name}: {advice}")

    return method


class MixedModel(LoadedModel):
    """The mixture of `lm.scoring.mixture`, made by `lm.load(…, ngram=True)`.

    Probabilities, scores and perplexities are those of the mixture, in which unknown words share
    P(`<unk>`) as in the model alone. `topk` computes those of all words. Texts are not generated,
    and `evaluate` and the details of `score` have no meaning for a mixture: a ValueError says so.
    """

    def __init__(self, run: TrainedRun, **settings: Any) -> None:
        super().__init__(run, ngram=True, **settings)
        assert self._scorer.ngram is not None
        self._ngram = self._scorer.ngram
        self._sha256 += self._ngram.sha256

    def _start(self, ids: list[int]) -> State:
        lines = np.array(ids, np.int64)
        return replace(super()._start(ids), ngram=self._ngram.tree.context(lines))

    def _advanced(self, steps: list[Step], tokens: list[int]) -> list[Step]:
        contexts = self._contexts([step.state for step in steps])
        ngram, after = self._ngram.tree.extend(contexts, np.array(tokens))
        alone = super()._advanced([Step(0.0, step.state) for step in steps], tokens)
        log_prob = np.array([step.log_prob for step in alone])
        mixed = self._ngram.mixed_after(contexts, ngram, log_prob)
        states = [
            replace(step.state, ngram=context)
            for step, context in zip(alone, after.tolist(), strict=True)
        ]
        each = zip(steps, mixed.tolist(), states, strict=True)
        return [Step(before.log_prob + value, state) for before, value, state in each]

    def log_prob(self, prefix: Prefix = "") -> Tensor:
        """Log-probabilities [N] of all next tokens."""
        state = self._state(prefix)
        ngram = self._ngram.tree.log_prob(int(state.ngram or 0))
        if self.unknown.is_shared:
            ngram[self.unk_id] += self.unknown.log_share
        return self._mixed([state], ngram[None], super().log_prob(state)[None])[0]

    def _candidates(self, states: list[State], words: Tensor) -> Tensor:
        ids = words.flatten().cpu().numpy()
        ngram = self._ngram.tree.extend_each(self._contexts(states), ids)
        return self._mixed(states, ngram, super()._candidates(states, words))

    @torch.no_grad()
    def _topk(self, state: State, k: int, excluded: Sequence[int]) -> tuple[Tensor, Tensor]:
        most = self.vocab_size - len(set(excluded))
        if not 1 <= k <= most:
            raise ValueError(f"k must be within 1 … {most}, got {k}")
        log_prob = self.log_prob(state)
        log_prob[list(excluded)] = -torch.inf
        values, words = log_prob.topk(k)
        return values, words

    def _mixed(self, states: list[State], ngram: Any, log_prob: Tensor) -> Tensor:
        """The mixture [S, K] of log-probabilities of both models."""
        model = log_prob.double().cpu().numpy()
        return log_prob.new_tensor(self._ngram.mixed_after(self._contexts(states), ngram, model))

    def _contexts(self, states: list[State]) -> Any:
        return np.array([state.ngram for state in states], np.int64)

    def score(self, sentences: Any, *, stream: bool = False, details: bool = False) -> Any:
        """`LoadedModel.score` by the mixture, without `details`."""
        if details:
            raise ValueError("details: those of a mixture with an n-gram model are not known")
        return super().score(sentences, stream=stream)

    def perplexity(self, text: str) -> float:
        """As that of `LoadedModel`, which `vocabulary_size` does not change."""
        lines = text.removesuffix("\n").split("\n") if checked_text(text) else []
        tokens, _ = encode_text(self._run, lines)
        losses = TextLosses.of(self._run, tokens, lines if self._open_vocabulary else None)
        return evaluate_mixture(self._ngram, losses).perplexity

    evaluate = _refused("evaluate", "use perplexity, or lm evaluate --ngram")
    generate, search, continuation_log_prob = map(
        _refused, ("generate", "search", "continuation_log_prob")
    )
