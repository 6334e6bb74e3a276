"""A run mixed with an n-gram model, token by token: that of its folder, or an ARPA file.

    P = λ P_model + (1 - λ) P_ngram                                                              (1)

Both predict the same tokens: `</s>` is `<eos>`, and a word outside the model's vocabulary `<unk>`.
The model reads on over lines in a text, as in `lm evaluate`; the n-gram model begins each line at
`<s>`. λ depends on the number of words of the n-gram model's context, which the history alone
determines, so that the probabilities of all words add up to 1; that of an ARPA file is one number.
`ngram.npy` has the nodes of the run's own n-gram model, and is mapped into memory; `ngram.json`
describes it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import DataError, UserError
from data_prep.settings import NonNegative, Strict
from data_prep.storage import ArrayInfo, map_array, read_json, write_array, write_json_atomically
from lm.evaluation import TextLosses, token_nats
from lm.figures import perplexity, table_of
from lm.run import TrainedRun
from lm.scoring.arpa import ArpaModel
from lm.scoring.kneser_ney import estimate
from lm.scoring.ngram_tree import Arrays, Floats, Ints, NGramTree

NODES, DESCRIPTION, FORMAT_VERSION = "ngram.npy", "ngram.json", 1
FEWEST = 100
"""Fewest tokens of the validation split that a λ of a context's length is tuned on."""


def mixed(model: Floats, ngram: Floats, weight: float | Floats) -> Floats:
    """Equation (1), log-probabilities [n] in nats; λ is one number, or one for each."""
    with np.errstate(divide="ignore"):
        shares = np.log(weight), np.log(1 - np.asarray(weight))
    both: Floats = np.logaddexp(model + shares[0], ngram + shares[1])
    return both


def tuned_weight(model: Floats, ngram: Floats) -> float:
    """The λ of the lowest perplexity, by bisection: log P of equation (1) is concave in λ.

    Example:
        >>> tuned_weight(np.log([0.5, 0.1]), np.log([0.1, 0.5]))
        0.5
    """
    higher = np.maximum(model, ngram)
    p, q = np.exp(model - higher), np.exp(ngram - higher)
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        slope = ((p - q) / (middle * p + (1 - middle) * q)).sum()
        if slope == 0:
            return middle
        low, high = (middle, high) if slope > 0 else (low, middle)
    return round((low + high) / 2, 10)


@dataclass(frozen=True, kw_only=True)
class Description(Strict):
    """The content of `ngram.json`."""

    format_version: int = FORMAT_VERSION
    tokenizer_sha256: str  # of the tokenizer that the words' ids belong to
    eos_id: NonNegative
    prune: list[NonNegative]  # thresholds, as given
    sizes: list[NonNegative]  # number of n-grams of each order, 0 if all are pruned
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
    def chosen(cls, run: TrainedRun, path: Path | None, weight: float | None) -> "RunNGram":
        """The model of an ARPA file, or the run's n-gram model, with one λ for all contexts.

        λ None: the one of the lowest perplexity on the validation split, by the length of the
        context for the run's n-gram model.

        Raises:
            UserError: if the file cannot be used, λ is out of range, or there is no such split.
        """
        if path is not None or weight is not None:
            _check_weight(run, weight)
        if path is None:
            found = cls.open(run)
        else:
            model = ArpaModel(path)
            found = cls(model, [0.0], ids=partial(model.token_ids, run.tokenizer))
        if weight is not None:
            found.weights, found.valid_perplexity = np.array([weight]), None
        elif path is not None:
            found.tune(run)
        return found

    @classmethod
    def count(
        cls, run: TrainedRun, order: int, prune: Sequence[int], weight: float | None
    ) -> "RunNGram":
        """Estimate the model on the training split of a run, and write its files; λ None: `tune`.

        Raises:
            UserError: if there is no text to count, no such split, or λ is out of range.
        """
        run.check_text("an n-gram model")
        _check_weight(run, weight)
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
        model, (ngram, length) = -token_nats(run, valid), self.read(valid)
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


def _check_weight(run: TrainedRun, weight: float | None) -> None:
    """UserError if λ is out of range, or None without a validation split to tune it on."""
    if weight is not None and not 0 <= weight <= 1:
        raise UserError("--mixture must be within 0 … 1")
    if weight is None and "valid" not in run.prepared.splits:
        raise UserError(f"{run.folder} has no validation split to tune on: give --mixture")


@dataclass(frozen=True, kw_only=True)
class MixtureEvaluation:
    """Perplexities of the two models and of their mixture, on the same tokens."""

    weight: float  # λ, the share of the model; its mean over the tokens if there are several
    weights: list[float]  # by the length of the n-gram model's context, or one for all
    valid_perplexity: float | None  # of the mixture on the validation split, if λ was tuned there
    tokens: int
    perplexity_model: float
    perplexity_ngram: float
    perplexity: float  # of the mixture
    bits_per_byte: float | None  # of the mixture; None: the tokens do not determine every byte

    def table(self, model: Path, ngram: Path) -> str:
        """The figures as lines of text, for the paths of both models."""
        origin = "as given"
        if self.valid_perplexity is not None:
            perplexity = f"perplexity {self.valid_perplexity:.2f} there (unknown words as <unk>)"
            origin = f"tuned on the validation split, {perplexity}"
        shares = f"{self.weight:.4f} of {model}, {1 - self.weight:.4f} of {ngram}"
        if len(set(self.weights)) > 1:
            listed = ", ".join(map("{:.2f}".format, self.weights))
            shares += f" (of the former after 0, 1, … known words {listed})"
        rows = {
            "tokens predicted": f"{self.tokens:,}",
            "perplexity of the model alone": f"{self.perplexity_model:.2f}",
            "perplexity of the n-gram model alone": f"{self.perplexity_ngram:.2f}",
            "perplexity of the mixture": f"{self.perplexity:.2f}",
        }
        if self.bits_per_byte is not None:
            rows["bits per byte of the mixture"] = f"{self.bits_per_byte:.4f}"
        return table_of(
            f"mixture: {shares}: {origin}; the n-gram model starts each line at <s>", rows
        )


def evaluate_mixture(
    ngram: RunNGram, losses: TextLosses, num_bytes: int | None = None
) -> MixtureEvaluation:
    """Perplexities of a text by a run, an n-gram model and their mixture.

    With the number of the text's bytes, which tokens and spellings must determine, bits per byte.
    """
    model, (log_prob, place) = -losses.nats, ngram.read(losses.tokens)
    mixture, weights = mixed(model, log_prob, ngram.weights[place]), ngram.weights
    together, size = losses.perplexity(mixture), len(losses.tokens)
    return MixtureEvaluation(
        weight=float(weights[place].mean() if len(weights) > 1 else weights[0]),
        weights=weights.tolist(),
        valid_perplexity=ngram.valid_perplexity,
        tokens=size,
        perplexity_model=losses.perplexity(model),
        perplexity_ngram=losses.perplexity(log_prob),
        perplexity=together,
        bits_per_byte=size * math.log2(together) / num_bytes if num_bytes else None,
    )
