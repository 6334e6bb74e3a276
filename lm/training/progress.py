"""How far a run has come: batches, times, and which of its validations is the best so far."""

import math
from dataclasses import dataclass

from lm.config import Criterion
from lm.training.validation import Validation


@dataclass
class Progress:
    """How far a run has come."""

    batches_done: int = 0
    tokens_done: int = 0  # over all devices
    best_perplexity: float = math.inf  # the lowest of all validations
    best_ndcg: float = -math.inf  # the highest
    num_bad_validations: int = 0  # that did not improve on the best by `train.keep`
    num_since_best: int = 0  # of them since the best
    awaits_validation: bool = False  # that of the last step, which a signal ended
    judged_batches: int = 0  # `batches_done` at the last validation, or without one at the end
    learning_rate: float = 0.0  # of the last step
    skipped_steps: int = 0  # whose gradient was not finite
    nll: float = 0.0  # nats summed over the tokens of the next `Metrics.train_perplexity`
    num_tokens: int = 0  # number of these tokens
    logged_tokens: int = 0  # `tokens_done` before the last line of `metrics.csv`
    seconds: float = 0.0  # training time, without validation and checkpoints
    logged_seconds: float = 0.0  # the same before the last line of `metrics.csv`
    elapsed_seconds: float = 0.0  # of the training loop, with validations and checkpoints
    validation_seconds: float = 0.0  # of the last validation and checkpoint; 0 before the first

    def is_patience_spent(self, patience: int | None) -> bool:
        """Whether the last `patience` validations brought no improvement."""
        return patience is not None and self.num_since_best >= patience

    def record_validation(self, found: Validation, criterion: Criterion) -> bool:
        """Record a validation; returns whether it is the best so far, by the criterion."""
        before = Validation(self.best_perplexity, ndcg=self.best_ndcg)
        improved = found.score(criterion) > before.score(criterion)
        self.num_bad_validations += not improved
        self.num_since_best = 0 if improved else self.num_since_best + 1
        self.best_perplexity = min(found.perplexity, self.best_perplexity)
        self.best_ndcg = max(found.score("ndcg"), self.best_ndcg)
        return improved
