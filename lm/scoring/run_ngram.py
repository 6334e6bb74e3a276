"""N-gram models that a run is mixed with: that of its folder, or an ARPA file.

    P = λ P_model + (1 - λ) P_ngram                                                              (1)

λ depends on the number of words of the n-gram model's context, which the history alone determines,
so that the probabilities of all words add up to 1; that of an ARPA file is one number. Both models
predict the same tokens. `ngram.npy` has the nodes of the run's own n-gram model, and is mapped into
memory; `ngram.json` describes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import DataError, UserError
from data_prep.settings import NonNegative, Positive, Strict
from data_prep.storage import ArrayInfo, map_array, read_json, write_array, write_json_atomically
from lm.figures import perplexity
from lm.run import TrainedRun
from lm.scoring.arpa import ArpaModel
from lm.scoring.kneser_ney import estimate
from lm.scoring.mixture import check_weight, mixed, token_log_probs, tuned_weight
from lm.scoring.ngram_tree import Arrays, Floats, Ints, NGramTree

NODES, DESCRIPTION, FORMAT_VERSION = "ngram.npy", "ngram.json", 1
FEWEST = 100
"""Fewest tokens of the validation split that a λ of a context's length is tuned on."""


@dataclass(frozen=True, kw_only=True)
class Description(Strict):
    """The content of `ngram.json`."""

    format_version: int = FORMAT_VERSION
    tokenizer_sha256: str  # of the tokenizer that the words' ids belong to
    eos_id: NonNegative
    prune: list[NonNegative]  # thresholds, as given
    sizes: list[Positive]  # number of n-grams of each order
    nodes: ArrayInfo  # of `ngram.npy`
    weights_sha256: str  # of the network that λ is tuned for
    weights: list[float]  # λ by the length of the context, from 0
    valid_perplexity: float | None  # of the mixture; None if λ was given


class RunNGram:
    """An n-gram model of a run's tokens, with the λ of each length of a context.

    Attributes:
        tree: the n-gram model.
        weights: λ by the length of the context; the last one is that of longer ones too.
        valid_perplexity: that of the mixture on the validation split, if λ was tuned there.
        sha256: checksum of `ngram.npy`.
    """

    def __init__(
        self,
        tree: NGramTree,
        weights: Sequence[float],
        valid_perplexity: float | None = None,
        sha256: str = "",
        ids: Callable[[NDArray[Any]], NDArray[Any]] = np.asarray,
    ) -> None:
        self.tree, self.weights = tree, np.array(weights, np.float64)
        self.valid_perplexity, self.sha256, self._ids = valid_perplexity, sha256, ids

    @classmethod
    def of_arpa(cls, run: TrainedRun, path: Path) -> "RunNGram":
        """The model of an ARPA file, without a λ."""
        model = ArpaModel(path)
        return cls(model, [0.0], ids=partial(model.token_ids, run.tokenizer))

    @classmethod
    def count(
        cls, run: TrainedRun, order: int, prune: Sequence[int], weight: float | None
    ) -> "RunNGram":
        """Estimate the model on the training split of a run, and write its files; λ None: `tune`.

        Raises:
            UserError: if there is no text to count, no such split, or λ is out of range.
        """
        run.check_text("an n-gram model")
        check_weight(run, weight)
        prepared = run.prepared
        tokens = prepared.tokens("train")
        tree = estimate(tokens, prepared.vocab_size, prepared.eos_id, order, prune)
        found = cls(tree, [weight or 0.0] * order)
        if weight is None:
            found.tune(run)
        description, folder = run.description, run.folder
        (folder / DESCRIPTION).unlink(missing_ok=True)  # of other nodes
        content = Description(
            tokenizer_sha256=description.tokenizer_sha256,
            eos_id=tree.eos_id,
            prune=list(prune),
            sizes=tree.sizes,
            nodes=write_array(
                folder / NODES, (each.view(np.uint32) for each in tree.arrays), "uint32"
            ),
            weights_sha256=description.weights_sha256,
            weights=found.weights.tolist(),
            valid_perplexity=found.valid_perplexity,
        )
        write_json_atomically(folder / DESCRIPTION, asdict(content))
        return found

    @classmethod
    def open(cls, run: TrainedRun) -> "RunNGram":
        """The model in the folder of a run.

        Raises:
            UserError: if there is none, a file is damaged, or it belongs to another tokenizer or to
                other weights.
        """
        run.check_text("an n-gram model")
        if run.checkpoint is not None:
            raise UserError("--checkpoint excludes --ngram: λ is tuned for the model that is kept")
        path, again = run.folder / DESCRIPTION, f"run `lm ngram {run.folder}`"
        if not path.exists():
            raise DataError(f"{run.folder} has no n-gram model: {again}")
        found: Description = read_json(path, Description, FORMAT_VERSION)
        if found.tokenizer_sha256 != run.description.tokenizer_sha256:
            raise DataError(f"{path} was made for another vocabulary: {again} again")
        if found.weights_sha256 != run.description.weights_sha256:
            raise DataError(f"{path} was tuned for other weights of the run: {again} again")
        counts = 1 + sum(found.sizes), 1 + sum(found.sizes[:-1])
        order, expected = len(found.sizes), 2 * counts[0] + 3 * counts[1] + 1
        if found.nodes.length != expected or len(found.weights) != order or order < 2:
            raise DataError(f"{path} is damaged: its sizes do not belong together")
        values = map_array(run.folder / NODES, found.nodes, verify=True)
        tree = NGramTree(Arrays.of(values, *counts), found.sizes, found.eos_id)
        return cls(tree, found.weights, found.valid_perplexity, found.nodes.sha256)

    def tune(self, run: TrainedRun) -> None:
        """Set the λ of the lowest perplexity on the validation split of a run.

        There is one for each length of a context with `FEWEST` tokens, else that of all tokens.
        """
        valid = run.prepared.tokens("valid")
        model, (ngram, length) = token_log_probs(run, valid), self.read(valid)
        self.weights[:] = tuned_weight(model, ngram)
        for n in range(len(self.weights)):
            if (chosen := length == n).sum() >= FEWEST:
                self.weights[n] = tuned_weight(model[chosen], ngram[chosen])
        total = mixed(model, ngram, self.weights[length]).sum()
        self.valid_perplexity = perplexity(-float(total), len(valid))

    def read(self, tokens: NDArray[Any]) -> tuple[Floats, Ints]:
        """Log-probabilities [n] of the n-gram model for a text, and the place of each λ."""
        log_prob, contexts = self.tree.read(self._ids(tokens))
        return log_prob, np.minimum(self.tree.length(contexts), len(self.weights) - 1)

    def mixed(self, tokens: NDArray[Any], log_prob: Floats) -> Floats:
        """Equation (1) of a text of lines [n], given log P_model."""
        ngram, place = self.read(tokens)
        return mixed(log_prob, ngram, self.weights[place])

    def mixed_after(self, contexts: Ints, ngram: Floats, log_prob: Floats) -> Floats:
        """Equation (1) in contexts [S], given log P_ngram and log P_model [S, …]."""
        weights = self.weights[self.tree.length(contexts)]
        return mixed(log_prob, ngram, weights.reshape(-1, *[1] * (log_prob.ndim - 1)))
