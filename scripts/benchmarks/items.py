"""Ways to rank the items of a catalogue, side by side: one backbone, one split, one search.

  python -m scripts.benchmarks.items CONFIG --runs DIR --json FILE [--section.key=value …]

CONFIG is a recipe on independent sequences with classes, such as configs/items.yaml. Every way is
measured as `lm evaluate --ranking --exclude seen` does, over the whole catalogue. Declared before
the first run, and equal for all that are trained:

- Backbone, batches, length, dropout and input vectors (those of a word and of its class) are those
  of CONFIG and of the overrides. Only the loss differs, and for class methods the classes.
- Search: each of `POINTS` is trained once, with seed 1, at full length. The point of the highest
  NDCG@10 on the validation split is trained again with the other seeds. Only the runs of that point
  are measured on the test split, each once. item-kNN chooses among `RECENT` in the same way.

Ways:

- `exchange`, `embedding`, `uniform`: classes of these methods. `file` and `vectors`: classes from
  the file that the override `classes.file` or `classes.vectors` names.
- `full`: cross-entropy over all items.
- `sampled`: cross-entropy over the target and S = 256 items that are drawn in proportion to
  1 + count, once for each batch, with the correction of their logits by log(S · Q).
- `gbce`: generalized binary cross-entropy (gSASRec) of the target and S = 256 items that are drawn
  uniformly, once for each batch. With σ the logistic function, z the logits, α = S / (N - 1), and
  β = α · (t · (1 - 1/α) + 1/α), t = 0.75, the loss is -β log σ(z_target) - Σ log(1 - σ(z_item)).
- `popularity`: the number of events of training.
- `item-knn`: Σ cosine(i, j) over the last n items j of the user, where cosine is that of the items'
  sets of users in the training split.

Source: gSASRec: Petrov & Macdonald 2023, equations 10 and 17; item-kNN: Sarwar et al. 2001.
"""

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from scipy import sparse
from torch import Tensor
from torch.nn import functional as F

from lm.device import set_num_threads
from lm.figures import as_json
from lm.model.reader import Ints
from lm.model.sampled import SampledSoftmax
from lm.output import ClassTree
from lm.run import Run, TrainedRun
from lm.scoring.ranking import Ranked, Scores, popularity, rank_by
from lm.training.loop import train
from lm.training.run_folder import prepare_run
from scripts import run
from scripts.benchmarks.reporting import Table, benchmark_parser

SEEDS = (1, 2, 3)
POINTS = {
    "sgd": ["optim.optimizer=sgd", "optim.lr=20", "optim.clip=0.25"],
    "adamw": ["optim.optimizer=adamw", "optim.lr=0.002", "optim.clip=1"],
}
FULL = ["output.tree=full", "model.input_tree=two_level"]
TRAINED = {
    "exchange": ["classes.method=exchange"],
    "full": FULL,
    "sampled": [*FULL, "output.num_samples=256"],
    "gbce": [*FULL, "output.num_samples=256"],
    "embedding": ["classes.method=embedding"],
    "vectors": ["classes.method=embedding"],
    "uniform": ["classes.method=uniform"],
    "file": ["classes.method=file"],
}
"""Ways that are trained, and the keys that they change."""
RECENT = (1, 10, 100)
"""Numbers n of last items of item-kNN."""
CONFIDENCE = 0.75
"""t of gBCE."""
K = 10
SECONDS = "cpu_seconds.json"
"""File of a complete run: processor seconds of its training; null if it resumed."""
COLUMNS = {
    "way": "{way}",
    "point": "{point}",
    "seed": "{seed}",
    "split": "{split}",
    "HR@10": "{hit_rate:.4f}",
    "NDCG@10": "{ndcg:.4f}",
    "expected": "{expected_hit_rate:.4f}",
    "coverage": "{coverage:.3f}",
    "CPU s": "{cpu_seconds:.0f}",
}


class GeneralizedBCE(SampledSoftmax):
    """The loss `gbce`: binary decisions, of which those for the target count β times."""

    def __init__(self, hidden_size: int, tree: ClassTree, *, counts: Tensor, **options: Any):
        super().__init__(hidden_size, tree, counts=torch.zeros_like(counts), **options)  # uniform

    def sampled_nll(self, own: Tensor, others: Tensor, sample: Tensor) -> Tensor:
        """The loss of each position, see the top of the file."""
        share = self.num_samples / (self.vocab_size - 1)
        weight = share * (CONFIDENCE * (1 - 1 / share) + 1 / share)
        return F.softplus(others).sum(1) - weight * F.logsigmoid(own)


def item_knn(run: TrainedRun, num_recent: int) -> Scores:
    """The scores of item-kNN by the last items of each user."""
    tokens, eos_id = run.prepared.tokens("train"), run.prepared.eos_id
    is_item = tokens != eos_id
    user = np.cumsum(~is_item)[is_item]
    ones = np.ones(len(user), np.float32)
    shape = (int(user.max()) + 1, run.prepared.vocab_size)
    users = sparse.csr_array((ones, (user, tokens[is_item])), shape=shape)
    users.data[:] = 1  # repeated events count once
    length = np.sqrt(np.maximum(users.power(2).sum(0), 1))
    users = sparse.csr_array(users / length)
    cosine = sparse.csr_array(users.T @ users)
    cosine.setdiag(0)

    def scores(hidden: Tensor, histories: Sequence[Ints]) -> Tensor:
        recent = [history[-num_recent:] for history in histories]
        row = np.repeat(np.arange(len(recent)), list(map(len, recent)))
        history = (np.ones(len(row), np.float32), (row, np.concatenate(recent)))
        last = sparse.csr_array(history, shape=(len(recent), cosine.shape[0]))
        return torch.from_numpy((last @ cosine).toarray())

    return scores


class Comparison:
    """The runs of a comparison, in a folder, and the table of their figures."""

    def __init__(self, options: argparse.Namespace, overrides: Sequence[str]) -> None:
        self.source, self.folder, self.overrides = options.config, options.runs, overrides
        self.seeds, self.points = SEEDS[: options.seeds], options.points
        self.table = Table(COLUMNS, options.json)
        self.corpus = Path(str(Run.read(self.source, overrides).config.data.files.train)).stem

    def train(self, way: str, point: str, seed: int) -> TrainedRun:
        """Train a run, or continue it, unless it is complete."""
        folder = self.folder / f"{way}-{point}-{seed}"
        keys = [*TRAINED[way], *POINTS[point], f"seed={seed}", f"run_dir={folder}"]
        run = Run.read(self.source, [*self.overrides, *(f"--{key}" for key in keys)])
        seconds = folder / SECONDS
        if not seconds.exists():
            resumes = (folder / "config.yaml").exists()
            set_num_threads(run.config.train.threads)
            run = prepare_run(run, "auto", progress=False)
            start = time.process_time()
            loss = patch("lm.model.build.SampledSoftmax", GeneralizedBCE)
            with loss if way == "gbce" else nullcontext():
                train(run, resume="auto", progress=False)
            used = time.process_time() - start
            seconds.write_text(json.dumps(None if resumes else used))
        return TrainedRun.open(folder)

    def measure(
        self, run: TrainedRun, split: str, scores: Scores | None = None, **row: Any
    ) -> Ranked:
        """Rank by the model of a run, or by other scores, and add a row."""
        ways = [scores or (lambda hidden, histories: run.model.output.log_prob(hidden))]
        ((found,), _) = rank_by(run, split, ways, [K], "seen", progress=False)
        figures = as_json(found.at[0])
        del figures["calibration"]
        if row["way"] == "item-knn":  # its scores are no probabilities
            del figures["expected_hit_rate"]
        if scores is None:
            figures["cpu_seconds"] = json.loads((run.folder / SECONDS).read_text())
        settings = {"epochs": run.config.train.max_epochs, "batch": run.config.train.batch_size}
        name = {"corpus": self.corpus, **row, "split": split}
        self.table.add({**name, **figures, "mrr": found.mrr, **settings})
        return found

    def search(self, way: str) -> None:
        """Train and validate the points of a way; train and measure the best one."""

        def ndcg(point: str) -> float:
            run = self.train(way, point, self.seeds[0])
            return self.measure(run, "valid", way=way, point=point, seed=self.seeds[0]).at[0].ndcg

        best = max(self.points, key=ndcg)
        for seed in self.seeds:
            run = self.train(way, best, seed)
            if seed != self.seeds[0]:
                self.measure(run, "valid", way=way, point=best, seed=seed)
            self.measure(run, "test", way=way, point=best, seed=seed)

    def untrained(self, run: TrainedRun) -> None:
        """Measure popularity and item-kNN on the data of a run."""
        self.measure(run, "test", popularity(run), way="popularity", point="", seed=1)

        def ndcg(num_recent: int) -> float:
            row = {"way": "item-knn", "point": f"last {num_recent}", "seed": 1}
            return self.measure(run, "valid", item_knn(run, num_recent), **row).at[0].ndcg

        best = max(RECENT, key=ndcg)
        row = {"way": "item-knn", "point": f"last {best}", "seed": 1}
        self.measure(run, "test", item_knn(run, best), **row)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison."""
    parser = benchmark_parser(__doc__, takes_config=True)
    parser.add_argument("--runs", type=Path, required=True, metavar="DIR", help="folder of runs")
    names = [*TRAINED, "untrained"]
    default = ["untrained", "exchange", "full", "sampled", "gbce"]
    parser.add_argument("--points", nargs="+", choices=POINTS, default=list(POINTS))
    parser.add_argument("--seeds", type=int, choices=(1, 2, 3), default=3, help="their number")
    parser.add_argument("--ways", nargs="+", choices=names, default=default, help="only these")
    options, overrides = parser.parse_known_args(arguments)
    comparison = Comparison(options, overrides)
    for way in options.ways:
        if way == "untrained":
            comparison.untrained(comparison.train("exchange", comparison.points[0], SEEDS[0]))
        else:
            comparison.search(way)


if __name__ == "__main__":
    run(main)
