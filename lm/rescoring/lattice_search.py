"""Beam search for the best paths of word lattices, by equation (1) of `weights`.

The search is exact for its beam: it keeps, at each node, the hypotheses with the highest totals,
one for each sequence of words. With a beam as large as the number of paths it finds the best path.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import numpy as np

from lm.rescoring.lattice import Lattice
from lm.rescoring.nbest import Floats, NBest
from lm.rescoring.weights import Weights, combined

Words = tuple[str, ...]
NUM_FIRST_PASS = 100
"""Hypotheses of each lattice by its own scores, to tune weights on and to compare with."""


class WordModel(Protocol):
    """A language model with states that never change, as `lm.load` returns it."""

    @property
    def eos_id(self) -> int:
        """Token id of the end of a line."""

    def start(self) -> Any:
        """The state before the first word."""

    def step_many(self, states: Sequence[Any], words: Sequence[Any]) -> Sequence[Any]:
        """A step, with its `state`, for each pair of a state and a word."""

    def candidate_log_probs(self, states: Sequence[Any], words: Sequence[Any]) -> Any:
        """Log-probabilities [S, K] of some next words after each state, in nats."""


class Path(NamedTuple):
    """What a lattice says about some words; of several alignments, the best."""

    acoustic: float
    first_pass: float


class Prefix:
    """The begin of a line; equal ones are one object as long as a beam has it.

    It does not hold longer ones, and a shorter one only until its own states are known: what no
    beam has any more is freed.
    """

    __slots__ = ("__weakref__", "before", "log_prob", "longer", "spelled", "states")

    def __init__(self, before: "Prefix | None" = None, word: str = "") -> None:
        self.before = before
        self.spelled: Any = None if before is None else (before.spelled, word)
        self.states: list[Any] | None = None  # of each model
        self.log_prob: dict[str | None, float] = {}
        self.longer: WeakValueDictionary[str, Prefix] | None = None

    def extended(self, word: str) -> "Prefix":
        """The prefix with a word more."""
        if self.longer is None:
            self.longer = WeakValueDictionary()
        longer = self.longer.get(word)
        if longer is None:
            self.longer[word] = longer = Prefix(self, word)
        return longer

    @property
    def words(self) -> Words:
        """The words."""
        words, rest = [], self.spelled
        while rest is not None:
            rest, word = rest
            words.append(word)
        return tuple(reversed(words))


class PrefixScores:
    """The part of up to two models in equation (1) of `weights`, computed once for each prefix.

    `lm_weight` is the weight of equation (2); without models this part is 0.
    """

    def __init__(self, models: Sequence[WordModel], weights: Weights, lm_weight: float) -> None:
        self._models, self._weights, self._lm_weight = models, weights, lm_weight

    def extend(self, prefixes: Sequence[Prefix], words: Sequence[str | None]) -> Floats:
        """Weighted log-probabilities [P, W] of words after prefixes; None is the end of the line.

        A prefix is empty, or a word longer than one of an earlier call.
        """
        if not self._models:
            for prefix in prefixes:
                prefix.before = None
            return np.zeros((len(prefixes), len(words)))
        every = set(words)
        needed = [prefix for prefix in prefixes if not prefix.log_prob.keys() >= every]
        if needed and words:
            self._add_states([prefix for prefix in needed if prefix.states is None])
            each = []
            for k, model in enumerate(self._models):
                states = [prefix.states[k] for prefix in needed if prefix.states]
                tokens = [model.eos_id if word is None else word for word in words]
                each.append(np.array(model.candidate_log_probs(states, tokens).tolist()))
            rows = self._lm_weight * combined(each, self._weights.mixture)
            for prefix, row in zip(needed, rows.tolist(), strict=True):
                prefix.log_prob.update(zip(words, row, strict=True))
        return np.array([[prefix.log_prob[word] for word in words] for prefix in prefixes])

    def _add_states(self, prefixes: Sequence[Prefix]) -> None:
        longer: list[tuple[Prefix, Prefix]] = []
        for prefix in prefixes:
            if prefix.before is None:
                prefix.states = [model.start() for model in self._models]
            else:
                longer.append((prefix, prefix.before))
        if not longer:
            return
        words = [prefix.spelled[1] for prefix, _ in longer]
        steps = [
            model.step_many([before.states[k] for _, before in longer if before.states], words)
            for k, model in enumerate(self._models)
        ]
        for (prefix, _), *each in zip(longer, *steps, strict=True):
            prefix.states, prefix.before = [step.state for step in each], None


def search(
    lattice: Lattice, weights: Weights, num_beams: int, models: Sequence[WordModel] = ()
) -> list[tuple[Words, Path]]:
    """The best hypotheses of a lattice, best first, at most `num_beams`, as many as at a node.

    Without models the first pass has the whole weight.
    """
    share = weights.first_pass_share if lattice.has_first_pass else 0.0
    first_pass_weight = weights.lm_weight * share if models else weights.lm_weight
    scores = PrefixScores(models, weights, weights.lm_weight * (1 - share))
    penalty = weights.insertion_penalty
    beams: list[dict[Prefix, tuple[float, float, float]]] = [{} for _ in lattice.leaving]
    beams[0][Prefix()] = (0.0, 0.0, 0.0)  # total, acoustic, first pass
    for node, arcs in enumerate(lattice.leaving[:-1]):
        beam = sorted(beams[node].items(), key=lambda item: -item[1][0])[:num_beams]
        beams[node].clear()
        leaving: list[str | None] = list(dict.fromkeys(arc.word for arc in arcs if arc.word))
        added = scores.extend([prefix for prefix, _ in beam], leaving)
        column = {word: k for k, word in enumerate(leaving)}
        steps = [
            (
                arc,
                column.get(arc.word, -1),
                arc.acoustic + first_pass_weight * arc.first_pass - (penalty if arc.word else 0.0),
            )
            for arc in arcs
        ]
        for (prefix, (total, acoustic, first_pass)), row in zip(beam, added.tolist(), strict=True):
            row.append(0.0)  # of arcs without a word
            for arc, place, score in steps:
                after = prefix if arc.word is None else prefix.extended(arc.word)
                value = total + score + row[place]
                known = beams[arc.target].get(after)
                if known is None or known[0] < value:
                    new = (value, acoustic + arc.acoustic, first_pass + arc.first_pass)
                    beams[arc.target][after] = new
    beam = sorted(beams[-1].items(), key=lambda item: -item[1][0])[:num_beams]
    added = scores.extend([prefix for prefix, _ in beam], [None])
    ends = zip(beam, added[:, 0].tolist(), strict=True)
    totals = [(total + end, prefix, Path(*path)) for (prefix, (total, *path)), end in ends]
    return [(prefix.words, path) for _, prefix, path in sorted(totals, key=lambda each: -each[0])]


def to_nbest(
    name: str,
    lattices: Sequence[Lattice],
    weights: Weights | None = None,
    models: Sequence[WordModel] = (),
    num_beams: int = 0,
) -> NBest:
    """An n-best list of lattices: the hypotheses of their first pass, then those of a search.

    Without models there is no search.
    """
    found = []
    for lattice in lattices:
        own = Weights(lm_weight=lattice.lm_scale, insertion_penalty=lattice.word_penalty)
        paths = dict(search(lattice, own, NUM_FIRST_PASS))
        if models and weights is not None:
            for words, path in search(lattice, weights, num_beams, models):
                paths[words] = path  # the best alignment by these weights
        found.append(paths)
    num_scores = 2 if lattices[0].has_first_pass else 1
    every = [item for paths in found for item in paths.items()]
    return NBest(
        name=name,
        separator="\t",
        ids=[lattice.id for lattice in lattices],
        first=np.cumsum([0, *map(len, found)])[:-1],
        texts=[" ".join(words) for words, _ in every],
        scores=np.array([path[:num_scores] for _, path in every]),
    )
