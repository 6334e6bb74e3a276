"""Adaptation to a text while it is read: a cache of its words, and dynamic evaluation.

A cache of the last `window` positions adds the words that followed similar hidden vectors h:

    P(w | h_t) = λ P_model(w | h_t) + (1 - λ) Σ_{i: w_i = w} exp(θ h_i·h_t) / Σ_i exp(θ h_i·h_t) (1)

Dynamic evaluation takes a step of gradient descent after every segment of the text: it changes the
backbone and the rows that the segment visits, where a full softmax changes all of its rows.

Every token is predicted before it is learned from. θ, λ and the learning rate are those of the
lowest perplexity at the beginning of the validation split.

Source: Grave, Joulin & Usunier 2017; Krause et al. 2018.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import compress, starmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_prep.errors import UserError
from data_prep.settings import Strict
from data_prep.storage import read_json, write_json_atomically
from lm.evaluation import TextLosses
from lm.figures import table_of
from lm.model.files import load_model
from lm.model.language_model import LanguageModel
from lm.model.reader import Ints, read_text
from lm.output.rowwise import RowSGD
from lm.run import TrainedRun
from lm.scoring.mixture import mixed, tuned_weight

WINDOW = 2000
"""Positions of a cache."""
THETAS = tuple(0.01 * 2**k for k in range(9))
SEGMENT = 20
"""Tokens between two steps of a backbone that carries a state; else half a window."""
NUM_TUNED = 50_000, 20_000
"""Tokens of the validation split that a cache and a learning rate are tuned on."""
Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
FILE, FORMAT_VERSION = "adaptation.json", 1
_log = logging.getLogger(__name__)
SCORES_AT_ONCE = 1 << 20
"""Products of hidden vectors that are computed at once."""


class Cache:
    """The words after the last `window` hidden vectors of a text."""

    def __init__(self, window: int, thetas: Sequence[float]) -> None:
        self._window, self._thetas = window, thetas
        self._hidden: Tensor | None = None
        self._words = torch.zeros(0, dtype=torch.int64)

    @torch.no_grad()
    def log_prob(self, hidden: Tensor, words: Tensor) -> Tensor:
        """Log-probabilities [θs, P] of the next words [P] of the text after hidden vectors [P, H].

        The sum of equation (1); NaN if there is no position before.
        """
        hidden = hidden.float()
        begin = 0 if self._hidden is None else len(self._hidden)
        keys = hidden if self._hidden is None else torch.cat([self._hidden, hidden])
        all_words = torch.cat([self._words.to(words.device), words])
        position = torch.arange(len(keys), device=keys.device)
        parts = []
        at_once = max(1, SCORES_AT_ONCE // (self._window + len(words)))
        for rows in torch.split(position[begin:], at_once):
            first = max(0, int(rows[0]) - self._window)
            columns = position[first : int(rows[-1])]
            age = rows[:, None] - columns
            outside = (age < 1) | (age > self._window)
            scores = (keys[rows] @ keys[columns].T).masked_fill_(outside, -math.inf)
            other = all_words[columns] != all_words[rows][:, None]
            found = []
            for theta in self._thetas:
                weighted = scores * theta
                total = weighted.logsumexp(1)
                found.append(weighted.masked_fill_(other, -math.inf).logsumexp(1) - total)
            parts.append(torch.stack(found))
        self._hidden, self._words = keys[-self._window :], all_words[-self._window :]
        return torch.cat(parts, 1).double()


def read_dynamic(
    model: LanguageModel, parts: Iterable[NDArray[Any]], eos_id: int, context: int, lr: float | None
) -> Iterator[tuple[Tensor, Tensor, Ints]]:
    """Read a text as `lm.model.reader.read_text`; with an lr, learn from every segment after it.

    The weights change when the segment after the one that was yielded is asked for. A Transformer
    that learns reads windows of `context` tokens, of which it predicts the second half.
    """
    if not lr:
        yield from read_text(model, parts, eos_id, context)
        return
    table = {id(parameter) for parameter in model.table}
    dense = [p for p in model.parameters() if id(p) not in table]
    optimizers = [torch.optim.SGD(dense, lr), RowSGD(model.table, lr)]
    carries_state = model.backbone.carries_state
    size = SEGMENT if carries_state else max(1, context // 2)
    state, tokens, num_read = None, np.array([eos_id]), 0
    for segment in _segments(parts, size):
        tokens = np.append(tokens[-(1 if carries_state else max(1, context - size + 1)) :], segment)
        words = torch.from_numpy(tokens).to(model.device)
        with torch.enable_grad():
            hidden, state = model(words[:-1, None], state)
            hidden, targets = hidden[-len(segment) :, 0], words[-len(segment) :]
        state = tuple(each.detach() for each in state) if carries_state and state else None
        before = np.arange(len(tokens) - len(segment), len(tokens))
        yield hidden.detach(), targets, before + (num_read if carries_state else 0)
        num_read += len(segment)
        with torch.enable_grad():
            torch.autograd.backward(model.output.loss(hidden, targets))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _segments(parts: Iterable[NDArray[Any]], size: int) -> Iterator[Ints]:
    """The tokens of parts in segments, of which the last may be shorter."""
    rest = np.zeros(0, np.int64)
    for part in parts:
        rest = np.append(rest, part)
        whole = len(rest) // size * size
        yield from rest[:whole].reshape(-1, size)
        rest = rest[whole:]
    if len(rest):
        yield rest


@dataclass(frozen=True, kw_only=True)
class Adaptation(Strict):
    """What a run's validation split has chosen, the content of `adaptation.json`."""

    format_version: int = FORMAT_VERSION
    weights_sha256: str  # of the model
    theta: float | None = None
    weight: float | None = None  # λ
    lr: float | None = None

    @classmethod
    def tuned(cls, run: TrainedRun, *, cache: bool, dynamic: bool) -> "Adaptation | None":
        """Read what is asked for, tuned for the weights of a run; tune and write what is missing.

        Raises:
            UserError: if the run is of independent sequences, or there is no validation split.
        """
        if not (cache or dynamic):
            return None
        run.check_text("an adaptation")
        path, sha256 = run.folder / FILE, run.description.weights_sha256
        found = cls(weights_sha256=sha256)
        if run.checkpoint is None and path.exists():
            read = read_json(path, cls, FORMAT_VERSION)
            found = read if read.weights_sha256 == sha256 else found
        missing = (cache and found.theta is None, dynamic and found.lr is None)
        if not any(missing):
            return found.only(cache=cache, dynamic=dynamic)
        if "valid" not in run.prepared.splits:
            raise UserError(f"{run.folder} has no validation split to tune an adaptation on")
        valid = run.prepared.tokens("valid")
        kinds = " and ".join(compress(("--cache", "--dynamic"), missing))
        _log.info("tuning %s on the validation split, once for these weights: minutes", kinds)
        if missing[0]:
            theta, weight = _tuned_cache(run, valid[: NUM_TUNED[0]])
            found = replace(found, theta=theta, weight=weight)
        if missing[1]:
            found = replace(found, lr=_tuned_lr(run, valid[: NUM_TUNED[1]]))
        if run.checkpoint is None:
            try:
                write_json_atomically(path, asdict(found))
            except UserError as error:
                _log.warning("tuned for this command alone: %s", error)
        return found.only(cache=cache, dynamic=dynamic)

    def only(self, *, cache: bool, dynamic: bool) -> "Adaptation":
        """The settings of what is asked for."""
        theta, weight = (self.theta, self.weight) if cache else (None, None)
        return replace(self, theta=theta, weight=weight, lr=self.lr if dynamic else None)

    def mixer(self) -> Mix:
        """A function that computes equation (1) for a text, part by part, from an empty cache.

        It is given hidden vectors [P, H], targets [P] and their log-probabilities [P] by the model.
        """
        assert self.theta is not None
        assert self.weight is not None
        cache, shares = Cache(WINDOW, [self.theta]), (self.weight, 1 - self.weight)

        def mix(hidden: Tensor, targets: Tensor, log_prob: Tensor) -> Tensor:
            cached, (model, rest) = cache.log_prob(hidden, targets)[0], log_prob.new_tensor(shares)
            both = torch.logaddexp(log_prob + model.log(), cached + rest.log())
            return torch.where(cached.isnan(), log_prob, both)

        return mix


@dataclass(frozen=True, kw_only=True)
class AdaptedEvaluation:
    """Perplexities of a text without and with adaptation; None: not asked for."""

    tokens: int
    adaptation: Adaptation
    perplexity_model: float
    perplexity_cache: float | None
    perplexity_dynamic: float | None

    def table(self) -> str:
        """The figures as lines of text."""
        found, rows = self.adaptation, {"without adaptation": f"{self.perplexity_model:.2f}"}
        if self.perplexity_cache is not None:
            how = f"its share {1 - (found.weight or 0):.3f}, θ {found.theta:.2f}"
            rows[f"with a cache of {WINDOW:,} positions"] = f"{self.perplexity_cache:.2f}  {how}"
        if self.perplexity_dynamic is not None:
            rate = f"learning rate {found.lr:g}"
            rows["with dynamic evaluation"] = f"{self.perplexity_dynamic:.2f}  {rate}"
        tuned = "settings tuned on the validation split"
        return table_of(f"perplexity of the model alone as it adapts to the text, {tuned}", rows)


def evaluate_adaptation(found: Adaptation, losses: TextLosses) -> AdaptedEvaluation:
    """Perplexities of a text by a run that adapts to it."""
    cached = learned = None
    if found.theta is not None:
        mix = found.mixer()
        cached = losses.perplexity(torch.cat(list(starmap(mix, _read(losses.run, losses.tokens)))))
    if found.lr is not None:
        read = _read(losses.run, losses.tokens, found.lr)
        learned = losses.perplexity(torch.cat([log_prob for *_, log_prob in read]))
    return AdaptedEvaluation(
        tokens=len(losses.tokens),
        adaptation=found,
        perplexity_model=losses.perplexity(-losses.nats),
        perplexity_cache=cached,
        perplexity_dynamic=learned,
    )


def model_for(run: TrainedRun, lr: float | None) -> LanguageModel:
    """The model of a run; with an lr, one to be trained on, without dropout, by visited rows."""
    if not lr:
        return run.model
    kept, description = run.description, run.description
    model = replace(kept.model, dropout=0.0, dropout_weight=0.0, count_word_dropout=0.0)
    description = replace(kept, model=model, output=replace(kept.output, tail_dropout=0.0))
    state = None
    if run.checkpoint is not None:
        state = {name: value.clone() for name, value in run.model.state_dict().items()}
    row_wise = kept.output.tree != "adaptive"
    adaptable, _ = load_model(run.folder, description, state, row_wise=row_wise)
    return adaptable.to(run.device).train()


def _tuned_cache(run: TrainedRun, tokens: NDArray[Any]) -> tuple[float, float]:
    """θ and λ of the lowest perplexity of tokens."""
    cache, parts, cached_parts = Cache(WINDOW, THETAS), [], []
    for hidden, targets, log_prob in _read(run, tokens):
        parts.append(log_prob)
        cached_parts.append(cache.log_prob(hidden, targets))
    model, by_theta = torch.cat(parts).cpu().numpy(), torch.cat(cached_parts, 1).cpu().numpy()
    found = []
    for theta, cached in zip(THETAS, np.where(np.isnan(by_theta), model, by_theta), strict=True):
        weight = tuned_weight(model, cached)
        found.append((float(mixed(model, cached, weight).sum()), theta, weight))
    return max(found)[1:]


def _tuned_lr(run: TrainedRun, tokens: NDArray[Any]) -> float:
    """The learning rate of the lowest perplexity of tokens, a power of 2; 0 if none is lower."""
    found: dict[int, float] = {}

    def log_prob(k: int) -> float:
        if k not in found:
            value = sum(float(each.sum()) for *_, each in _read(run, tokens, 2.0**k))
            found[k] = value if math.isfinite(value) else -math.inf
        return found[k]

    best = -4
    for step in (4, 2, 1):
        while log_prob(side := max(best - step, best + step, key=log_prob)) > log_prob(best):
            best = side
    static = sum(float(each.sum()) for *_, each in _read(run, tokens))
    return 2.0**best if log_prob(best) > static else 0.0


def _read(
    run: TrainedRun, tokens: NDArray[Any], lr: float | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Hidden vectors, targets and log-probabilities [P] in nats; `lr` of dynamic evaluation."""
    model, where = model_for(run, lr), (run.description.eos_id, run.description.context)
    for hidden, targets, _ in read_dynamic(model, [tokens], *where, lr):
        yield hidden, targets, -model.output.nll_by_level(hidden, targets).double().sum(0)
