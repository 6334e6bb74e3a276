"""Beam search for the best paths of word lattices, by equation (1) of `weights`.

The search is exact for its beam: it keeps, at each node, the hypotheses with the highest totals,
one for each sequence of words. With a beam as large as the number of paths it finds the best path.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from lm.rescoring.lattice import Lattice
from lm.rescoring.nbest import Floats, NBest
from lm.rescoring.weights import Weights
from lm.scoring.mixture import mixed

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


class PrefixScores:
    """Equation (2) of `weights` for the begins of lines, each computed once.

    Args:
        models: one or two models.
        mixture: λ, the share of the first one.
    """

    def __init__(self, models: Sequence[WordModel], mixture: float) -> None:
        self._models, self._mixture = models, mixture
        self._states: dict[Words, list[Any]] = {(): [model.start() for model in models]}
        self._log_prob: dict[Words, dict[str | None, float]] = defaultdict(dict)

    def extend(self, prefixes: Sequence[Words], words: Sequence[str | None]) -> Floats:
        """Log-probabilities [P, W] of words after prefixes; None is the end of the line.

        A prefix is empty, or a word longer than one of an earlier call.
        """
        known = self._log_prob
        needed = [p for p in prefixes if not known[p].keys() >= set(words)]
        if needed and words:
            self._add_states([prefix for prefix in needed if prefix not in self._states])
            each = []
            for k, model in enumerate(self._models):
                states = [self._states[prefix][k] for prefix in needed]
                tokens = [model.eos_id if word is None else word for word in words]
                each.append(np.array(model.candidate_log_probs(states, tokens).tolist()))
            rows = mixed(each[0], each[1], self._mixture) if len(each) > 1 else each[0]
            for prefix, row in zip(needed, rows.tolist(), strict=True):
                known[prefix].update(zip(words, row, strict=True))
        return np.array([[known[p][word] for word in words] for p in prefixes])

    def _add_states(self, prefixes: Sequence[Words]) -> None:
        if not prefixes:
            return
        steps = [
            model.step_many([self._states[p[:-1]][k] for p in prefixes], [p[-1] for p in prefixes])
            for k, model in enumerate(self._models)
        ]
        for prefix, *each in zip(prefixes, *steps, strict=True):
            self._states[prefix] = [step.state for step in each]


def search(
    lattice: Lattice, weights: Weights, num_beams: int, models: Sequence[WordModel] = ()
) -> list[tuple[Words, Path]]:
    """The best hypotheses of a lattice, best first, at most `num_beams`.

    Args:
        lattice: the lattice.
        weights: the weights; without models, those of the first pass.
        num_beams: largest number of hypotheses at a node.
        models: one or two models; none: the first pass has the whole weight.
    """
    scores = PrefixScores(models, weights.mixture) if models else None
    share = weights.first_pass_share if lattice.has_first_pass else 0.0
    first_pass_weight = weights.lm_weight * share if models else weights.lm_weight
    lm_weight, penalty = weights.lm_weight * (1 - share), weights.insertion_penalty
    beams: list[dict[Words, tuple[float, float, float]]] = [{} for _ in lattice.leaving]
    beams[0][()] = (0.0, 0.0, 0.0)  # total, acoustic, first pass
    for node, arcs in enumerate(lattice.leaving):
        beam = sorted(beams[node].items(), key=lambda item: -item[1][0])[:num_beams]
        beams[node].clear()
        is_end = node == lattice.num_nodes - 1
        leaving: list[str | None] = [None]
        if not is_end:
            leaving = list(dict.fromkeys(arc.word for arc in arcs if arc.word is not None))
        added = np.zeros((len(beam), len(leaving)))
        if scores is not None:
            added = lm_weight * scores.extend([words for words, _ in beam], leaving)
        if is_end:
            break
        column = {word: k for k, word in enumerate(leaving)}
        steps = [
            (
                arc,
                (arc.word,) if arc.word is not None else (),
                column.get(arc.word, -1),
                arc.acoustic + first_pass_weight * arc.first_pass - (penalty if arc.word else 0.0),
            )
            for arc in arcs
        ]
        for (words, (total, acoustic, first_pass)), row in zip(beam, added.tolist(), strict=True):
            row.append(0.0)  # of arcs without a word
            for arc, word, place, score in steps:
                after, value = words + word, total + score + row[place]
                known = beams[arc.target].get(after)
                if known is None or known[0] < value:
                    new = (value, acoustic + arc.acoustic, first_pass + arc.first_pass)
                    beams[arc.target][after] = new
    ends = zip(beam, added[:, 0].tolist(), strict=True)
    totals = [(total + end, words, Path(*path)) for (words, (total, *path)), end in ends]
    return [(words, path) for _, words, path in sorted(totals, key=lambda each: -each[0])]


def first_pass_paths(lattice: Lattice) -> list[tuple[Words, Path]]:
    """The best `NUM_FIRST_PASS` hypotheses by the scores of a lattice alone."""
    weights = Weights(lm_weight=lattice.lm_scale, insertion_penalty=lattice.word_penalty)
    return search(lattice, weights, NUM_FIRST_PASS)


def to_nbest(
    name: str,
    lattices: Sequence[Lattice],
    weights: Weights | None = None,
    models: Sequence[WordModel] = (),
    num_beams: int = 0,
) -> NBest:
    """An n-best list of lattices: the hypotheses of their first pass, then those of a search.

    Args:
        name: of the list.
        lattices: the lattices.
        weights, models, num_beams: of the search; no models: the first pass alone.
    """
    found = []
    for lattice in lattices:
        paths = dict(first_pass_paths(lattice))
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
