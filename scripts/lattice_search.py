"""Example: beam search over a word lattice with a trained model.

    model = lm.load("runs/mine", vocabulary_size=1_000_000)
    arcs = {0: [("the", 1, -2.0)], 1: [("cat", 2, -3.0), ("hat", 2, -2.5)]}
    words, score = search(model, arcs, start=0, final=2, lm_weight=0.8)

What a decoder needs of a model: `start()`, `candidate_log_probs(states, words)`, which computes the
words of all hypotheses at a node in one batch and makes no state, and `step_many(states, words)`
for those that remain in the beam. A state never changes, so hypotheses share it freely. Lattices in
files, with several models and weights: `lm rescore`, whose search is lm/rescoring/lattice_search.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from lm.loaded import LoadedModel, State

Arc = tuple[str, int, float]
"""Word, node that it leads to, acoustic log-probability in nats."""
Hypothesis = tuple[float, list[str], State]
"""Its score, its words, and the state before the last of them."""


def search(
    model: LoadedModel,
    arcs: Mapping[int, Sequence[Arc]],
    *,
    start: int,
    final: int,
    lm_weight: float,
    num_beams: int = 8,
) -> tuple[list[str], float]:
    """The path with the highest sum of acoustic and weighted language-model log-probabilities.

    Args:
        model: the language model.
        arcs: the arcs that leave each node, all to nodes of larger numbers.
        start: the first node.
        final: the last node, where a line ends.
        lm_weight: weight of the model's log-probabilities, that of `<eos>` included.
        num_beams: largest number of hypotheses at a node; with enough of them the search is exact.

    Returns:
        The words and the sum in nats.

    Raises:
        ValueError: if no path leads to the last node.
    """
    beams: dict[int, list[Hypothesis]] = defaultdict(list)
    beams[start] = [(0.0, [], model.start())]
    for node in sorted({*arcs, final}):
        beam = sorted(beams.pop(node, []), key=lambda each: -each[0])[:num_beams]
        leaving = arcs.get(node, [])
        if not beam or (node != final and not leaving):
            continue
        states = [state for _, _, state in beam]
        if node != start:  # only the hypotheses in the beam need the state after their last word
            steps = model.step_many(states, [words[-1] for _, words, _ in beam])
            states = [step.state for step in steps]
        if node == final:
            ends = model.candidate_log_probs(states, [model.eos_id])[:, 0].tolist()
            pairs = zip(beam, ends, strict=True)
            total, words = max((each[0] + lm_weight * end, each[1]) for each, end in pairs)
            return words, total
        rows = model.candidate_log_probs(states, [word for word, _, _ in leaving]).tolist()
        for (total, words, _), state, row in zip(beam, states, rows, strict=True):
            for (word, target, acoustic), log_prob in zip(leaving, row, strict=True):
                score = total + acoustic + lm_weight * log_prob
                beams[target].append((score, [*words, word], state))
    raise ValueError(f"no path leads from node {start} to node {final}")
